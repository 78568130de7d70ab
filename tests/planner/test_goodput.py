"""Goodput: an M/D/1 queue by its closed form, bisection, joint objectives, and prefill apart."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from planner import goodput as serving
from planner.facts.catalogue import PlanError, device, model
from planner.load import LatencySlo, PlanInput, RequestLengths
from planner.search import ParallelPlan, ReplicaModel, attainment

pytestmark = pytest.mark.slow

OUT = 16
TWO = PlanInput(model("opt-13b"), device("a100-80gb"), RequestLengths(512, OUT), efficiency=0.7, gpus=2)
ONE = ParallelPlan()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortest run that a rate is judged by has a fifth of its requests."""
    monkeypatch.setattr(serving, "REQUESTS", 60)


def test_prefill_apart_is_an_m_d_1_queue() -> None:
    """Mean time to the first token: D + rho D / (2 (1 - rho)), within 5 %."""
    load = 0.6
    d = ReplicaModel(TWO, ONE).step(1, 512, 512).seconds
    given = replace(TWO, lengths=RequestLengths(512, 1))  # what follows the first token is none of its queue
    texts = serving.served(given, serving.ServingSetup(ONE, ONE), load / d, 10_000)
    wanted = d + load * d / (2 * (1 - load))
    assert fmean((text.first_s or 0) - text.arrived_s for text in texts) == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize("rate", [0.001, 0.7, 1.0, 33.0, 900.0])
def test_bisection_finds_the_rate(rate: float) -> None:
    asked: list[float] = []

    def holds(each: float) -> bool:
        asked.append(each)
        return each <= rate

    assert rate / 1.05 <= serving.highest_rate(holds, 1.0) <= rate and len(asked) < 25


def test_no_rate_holds_or_every_rate() -> None:
    assert serving.highest_rate(lambda _: False, 1.0) == 0
    assert serving.highest_rate(lambda _: True, 1.0) == 4096


def test_objectives_judged_one_by_one_promise_more(few: None) -> None:
    """DistServe's search accepts a rate where each is kept by six of ten, and both by fewer."""
    tight = replace(TWO, max_batch=64, slo=LatencySlo(0.12, 0.04, 0.6))
    both, apart = (serving.goodput(tight, serving.ServingSetup(ONE), jointly=jointly) for jointly in (True, False))
    assert 0 < 1.1 * both < apart
    found = attainment(serving.served(tight, serving.ServingSetup(ONE), apart), tight.slo)
    assert found.both < 0.6 <= min(found.ttft, found.tpot)


def test_prefill_apart_keeps_tokens_even_and_pays_the_transfer() -> None:
    """Its decode steps have no prefill in them; its first token is that of the queue of prompts."""
    beside, apart = serving.ServingSetup(ParallelPlan(dp=2)), serving.ServingSetup(ONE, ONE)
    slow = [serving.served(TWO, each, 6.0) for each in (beside, apart)]
    worst = [max(((t.ended_s or 0) - (t.first_s or 0)) / (OUT - 1) for t in texts) for texts in slow]
    assert worst[1] < worst[0]
    assert all(text.generated == OUT and (text.ended_s or 0) > (text.first_s or 0) for text in slow[1])
    assert serving.transfer_s(ReplicaModel(TWO, ONE), 512) == pytest.approx(512 * 819_200 / 300e9)


def test_replicas_of_both_kinds_are_in_the_ratio_of_their_work() -> None:
    """Seconds of a prefill over those of the decode steps of an answer, at the largest batch."""
    one = ReplicaModel(TWO, ONE)
    batch = min(256, one.kv_tokens // (512 + OUT))
    decode_s = OUT * one.step(batch, round(batch * (512 + OUT / 2)), 0).seconds / batch
    share = serving.prefill_share(TWO, ONE, ONE)
    assert share == pytest.approx(one.step(1, 512, 512).seconds / decode_s)


def test_the_best_deployment_and_its_reason(few: None) -> None:
    rows = serving.best_goodput(replace(TWO, max_batch=16))
    assert [row.rate for row in rows] == sorted((row.rate for row in rows), reverse=True)
    assert rows[0].separate_rate is not None and rows[0].separate_rate >= 0.95 * rows[0].rate
    said = serving.goodput_advice(TWO, rows)
    assert said.startswith(f"Take {rows[0].deployment.name}") and "Prefill apart" in said
    apart = serving.GoodputRow(serving.ServingSetup(ONE, ONE), 10.0, 12.0)
    said = serving.goodput_advice(TWO, [apart, serving.GoodputRow(serving.ServingSetup(ParallelPlan(dp=2)), 5.0, None)])
    assert "12 would seem to hold" in said and "2.00 x what prefill beside decode does" in said
    assert "at no rate" in serving.goodput_advice(TWO, [apart])


def test_a_queue_that_grows_slowly_does_not_hold() -> None:
    """The share of a short run says nothing while it still falls in a longer one."""
    assert not serving.holds_for_long({1: 1.0, 4: 0.8, 16: 0.3}.__getitem__, 0.9)
    assert not serving.holds_for_long({1: 0.99, 4: 0.95, 16: 0.5}.__getitem__, 0.9)
    assert serving.holds_for_long({1: 0.99, 4: 0.99}.__getitem__, 0.9)
    assert serving.holds_for_long({1: 0.99, 4: 0.97, 16: 0.96}.__getitem__, 0.9)
    assert not serving.holds_for_long({1: 0.5}.__getitem__, 0.9)


def test_a_simulation_at_the_goodput_keeps_the_share() -> None:
    """Of as many requests as a user might ask: a rate that holds for a minute alone is no goodput."""
    slo = LatencySlo.given(500, 60, 0.9)
    given = PlanInput(model("llama-3.1-8b"), device("h200"), RequestLengths(1024, 256), efficiency=0.7, slo=slo)
    rate = serving.goodput(given, serving.ServingSetup(ONE))
    assert 20 < rate < 28
    for count in (300, 3000):
        assert attainment(serving.served(given, serving.ServingSetup(ONE), rate, count), slo).both >= slo.share


def test_objectives_that_no_request_keeps_are_named_with_what_is_least() -> None:
    with pytest.raises(
        PlanError, match=r"keeps 1 ms to the first token and 100 ms .*: the least are \d+ ms and \d+ ms"
    ):
        serving.best_goodput(replace(TWO, slo=LatencySlo.given(1, 100, 0.9)))
    with pytest.raises(PlanError, match="does not fit"):
        serving.best_goodput(replace(TWO, model=model("llama-3.1-70b"), gpus=1))
