"""Findings: each planted bottleneck is named, and no other, and so are large parts of the time that none explains."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from msgspec.structs import replace
from pytest import approx
from recorded import delivery, request, sample

from telemetry.records.reader import ReportedRequest, evidence_of
from telemetry.records.schema import REFUSED, Record, RequestRecord
from telemetry.report.figures import figures_of, fit, run_times
from telemetry.report.report import Advice, advise, verdict


def advice(records: Iterable[Record]) -> list[Advice]:
    evidence = evidence_of(records)
    return advise(figures_of(evidence, {}), evidence)


def delivered(requests: Iterable[RequestRecord], late: float = 1.0) -> list[Record]:
    return [each for record in requests for each in (record, delivery(record, late))]


def healthy(by: str = "worker-1", first: int = 0, **more: float) -> list[RequestRecord]:
    return [request(first + number, 100.0 * number, by=by, **more) for number in range(20)]  # type: ignore[arg-type]


def waiting(count: int, wait: float, first: int = 0, lane: str = "standard", model: str = "m") -> list[RequestRecord]:
    return [request(first + n, 10.0 * n, wait=wait, lane=lane, model=model) for n in range(count)]


def in_turn(*waits: tuple[str, float]) -> list[RequestRecord]:
    """Ten requests of each of these lanes, which wait so long."""
    return [request(number, 10.0 * number, wait=wait, lane=lane) for number, (lane, wait) in enumerate(waits * 10)]


def worker_samples(running: int, until_ms: float = 10_000) -> list[Record]:
    return [sample("worker", "worker-1", at, at, model="m", slots=8, running=running) for at in (0, until_ms)]  # type: ignore[arg-type]


def api_samples(process: str, lag_ms: float, pid: int = 1) -> list[Record]:
    ends = (sample("api", process, 0, 0.0), sample("api", process, 10_000, 1.0, lag_ms=lag_ms))
    return [replace(each, pid=pid) for each in ends]


def begun_again(number: int, after_ms: int, **ends: int) -> RequestRecord:
    """A request whose last attempt began that much later than its first."""
    one = request(number, 100.0 * number)
    later = {name: getattr(one, name) + 1000 * after_ms for name in
             ("claimed_us", "released_us", "scheduled_us", "first_us", "last_us", "ended_us")}  # fmt: skip
    return replace(one, attempts=2, **later, **ends)  # type: ignore[arg-type]


LARGE = [replace(each, model="n") for each in healthy("worker-3", 200, per_token=50.0)]
PROMPTS = [request(n, 1000.0 * n, prefill=900.0, prompt=4000) for n in range(20)]


@pytest.mark.parametrize(("records", "kinds"), [
    (delivered([*healthy(), *healthy("worker-2", 100)]), []),
    # A larger model takes longer, and a single worker has no others to compare with.
    (delivered([*healthy(), *healthy("worker-2", 100), *LARGE]), []),
    (delivered(healthy(per_token=200.0)), []),
    # A slow worker explains why first tokens come late.
    (delivered([*healthy(), *healthy("worker-2", 100, prefill=900.0, per_token=20.0), *healthy("worker-3", 200)]),
     ["slow_worker"]),
    # The lane before it is served at once, so the pool is not full; the highest lane waits for no other.
    (delivered([*healthy(), *waiting(20, 9000.0, 100, "batch")]), ["starved_lane"]),
    (delivered([*healthy(), *waiting(20, 9000.0, 100, "interactive")]), ["full_pool"]),
    (delivered(in_turn(("batch", 9000.0), ("standard", 9001.0), ("interactive", 9002.0))), ["full_pool"]),
    ([*delivered(waiting(30, 9000.0)), *worker_samples(1)], ["idle_pool"]),
    (delivered([request(n, 20.0 * n) for n in range(20)], late=60.0), ["gateway_stall"]),
    (delivered([*healthy(), *(request(100 + n, 100.0 * n, prefill=900.0, prompt=4000) for n in range(5))]),
     ["long_prompts"]),
    # All of the engine's time for an embedding is before its only token.
    (delivered([request(n, 1000.0 * n, prefill=900.0, tokens=1) for n in range(20)]), []),
    # The weightiest comes first.
    (delivered([*healthy(), *healthy("worker-2", 100, per_token=20.0), *waiting(20, 9000.0, 300, "batch")]),
     ["starved_lane", "slow_worker"]),
])  # fmt: skip
def test_each_bottleneck_is_named_and_no_other(records: list[Record], kinds: list[str]) -> None:
    assert [each.kind for each in advice(records)] == kinds


@pytest.mark.parametrize(("records", "found"), [
    # One lane starves, and the other waits for a second, too; another model's requests begin at once.
    ([*in_turn(("interactive", 1000.0), ("batch", 9000.0)), *waiting(60, 1.0, 100, "interactive", "other")],
     {("starved_lane", "m"), ("full_pool", "m")}),
    ([*in_turn(("interactive", 1.0), ("batch", 9000.0)), *waiting(20, 9000.0, 100, model="other")],
     {("starved_lane", "m"), ("full_pool", "other")}),
    # What explains the waiting of one model explains that of no other.
    ([*in_turn(("interactive", 1.0), ("batch", 1000.0)), *waiting(3, 60_000.0, 100, model="other")],
     {("starved_lane", "m"), ("waiting", "other")}),
])  # fmt: skip
def test_models_are_judged_apart(records: list[RequestRecord], found: set[tuple[str, str]]) -> None:
    assert {(each.kind, each.model) for each in advice(delivered(records))} == found


@pytest.mark.parametrize(("factor", "named"), [(1.4, []), (1.6, ["worker-2 is slow"])])
def test_a_worker_is_slow_from_half_as_long_again(factor: float, named: list[str]) -> None:
    """Per token, compared with the others alone: its own time would raise what is usual."""
    usual, slow = healthy(per_token=10.0), healthy("worker-2", 100, per_token=10.0 * factor)
    found = advice(delivered([*usual, *slow]))
    assert [each.title for each in found] == named
    if found:
        assert "16.0 ms per token" in found[0].reason and found[0].saves_s == approx(20 * 6 * 11 / 1000)


def test_slots_that_others_hold_are_not_free() -> None:
    """In a report about one lane: the pool is full, with texts of the other one."""
    own = evidence_of(delivered(waiting(30, 2000.0)))
    others = [request(100 + number, 1.0, per_token=250.0, lane="batch") for number in range(8)]
    everyone = evidence_of([*delivered(others), *worker_samples(8, 2_400)])
    own.samples = everyone.samples
    figures = figures_of(own, {}, shared=True)
    assert [each.kind for each in advise(figures, own, everyone=own.requests)] == ["idle_pool"]
    found = advise(figures, own, everyone=[*own.requests, *everyone.requests])
    assert [each.kind for each in found] == ["full_pool"] and "100 % of 8 slots" in found[0].reason


def test_a_process_that_stood_still_in_several_lives_is_named_once() -> None:
    """And the one that stood longest comes first."""
    stalls = [*api_samples("api-1", 300.0), *(each for pid in (2, 3, 4) for each in api_samples("api-2", 400.0, pid))]
    found = advice([*delivered(healthy()), *stalls])
    assert [(each.kind, each.title) for each in found] == [
        ("gateway_stall", "api-2 stood still"), ("gateway_stall", "api-1 stood still"),
    ]  # fmt: skip


def test_short_requests_are_no_stalled_gateway() -> None:
    """Three milliseconds of six are half, and nothing is wrong."""
    short = [request(number, 100.0 * number, wait=0.1, prefill=2.0, tokens=1) for number in range(20)]
    (found,) = advice(delivered(short))
    assert found.kind == "short_requests" and found.saves_s == 0 and "of each" in found.reason


@pytest.mark.parametrize(("state", "code", "change"), [
    (REFUSED, "queue_full", "raise the limit"),
    (REFUSED, "unsupported_media_type", "mend the requests"),
    ("expired", "deadline_exceeded", "more time"),
    ("failed", "unknown", "jobs ls"),
])  # fmt: skip
def test_requests_without_an_answer_are_named_with_their_code(state: str, code: str, change: str) -> None:
    """A limit is named only where one refused."""
    ended = [replace(request(100 + number), state=state, code=code) for number in range(5)]
    (found,) = [each for each in advice(delivered([*healthy(), *ended])) if each.kind == state]
    assert f"{code} (5 times)" in found.reason and change in found.change


def test_the_verdict_names_the_largest_share_first() -> None:
    figures = figures_of(evidence_of(delivered(healthy())), {})
    assert verdict(figures).startswith("Requests spent 94 % of their time generating, ")
    assert verdict(figures_of(evidence_of([]), {})) == "No request was completed in this window."


def test_few_requests_that_waited_are_told_with_their_number() -> None:
    """The first sentence says that most of the time was waiting, so the report must say more of it."""
    records = delivered(waiting(3, 9000.0))
    (found,) = advice(records)
    assert found.kind == "waiting" and "only 3 requests completed" in found.reason and "min_workers" in found.change
    assert "waiting for a place" in verdict(figures_of(evidence_of(records), {}))
    inside = [
        replace(each, scheduled_us=each.first_us - 1000) for each in (request(n, prefill=500.0) for n in range(3))
    ]
    (found,) = advice(delivered(inside))
    assert found.kind == "waiting" and "slots of the engine" in found.change


@pytest.mark.parametrize(("end", "word"), [("preempted", "lane interactive"), ("handed_back", "drain time")])
def test_attempts_that_began_again_are_told_by_how_they_ended(end: str, word: str) -> None:
    (found,) = advice(delivered(begun_again(number, 80, **{end: 1}) for number in range(20)))
    assert found.kind == "retries" and word in found.change
    assert f"20 {end.replace('_', ' ')}" in found.reason and "waiting" in found.reason


def test_the_time_of_attempts_that_were_lost_counts_whatever_became_of_the_job() -> None:
    """A job that is given up has no answer, and its workers died all the same. A death is not told twice."""
    last = request(100).started_us + 2_000_000
    lost = [replace(request(100 + n), lost=3, claimed_us=last, state="failed", code="poison") for n in range(2)]
    (found,) = [each for each in advice([*delivered(healthy()), *lost]) if each.kind == "lost_workers"]
    assert found.title == "Workers died under 2 requests" and "6 attempts lost, in all 4.0 s" in found.reason
    (found,) = advice(delivered(begun_again(number, 80, lost=1) for number in range(20)))
    assert found.kind == "lost_workers"


def test_even_prompts_that_take_the_engine_are_told_with_what_was_cached() -> None:
    (found,) = advice(delivered(replace(each, cached_tokens=1000) for each in PROMPTS))
    assert found.kind == "prompts" and "4000 tokens, an answer 11" in found.reason and "25 % of the" in found.reason


def test_prompts_of_a_model_whose_worker_is_slow_are_not_told_again() -> None:
    """But those of another model are."""
    slow = [request(n, 1000.0 * n, prefill=900.0, per_token=20.0, by="worker-2") for n in range(20)]
    usual = [request(100 + n, 1000.0 * n) for n in range(20)]
    other = [request(200 + n, 1000.0 * n, prefill=400.0, model="other", by="worker-3") for n in range(20)]
    found = {each.kind: each for each in advice(delivered([*slow, *usual, *other]))}
    assert set(found) == {"slow_worker", "prompts"} and found["prompts"].saves_s == approx(20 * 0.4, rel=0.01)


# --- idealized and denoised run time ---------------------------------------------------------------------------------


def test_the_fit_finds_planted_coefficients() -> None:
    """Within 2 %, through noise of 5 % of a run time."""
    source = random.Random(7)
    points = []
    for _ in range(400):
        prompt, output = source.randrange(10, 4000), source.randrange(2, 400)
        spent = (30 + 0.2 * prompt + 12 * (output - 1)) * source.uniform(0.95, 1.05)
        points.append((prompt, output, spent))
    found = fit(points)
    assert abs(found.per_prompt_token / 0.2 - 1) < 0.02 and abs(found.per_token / 12 - 1) < 0.02


def test_contention_is_what_sharing_cost() -> None:
    """Requests alone take 60 ms; five at a time, each takes 20 ms per token more, after a wait of 7 ms."""
    alone = [request(number, 1000.0 * number, tokens=5 + number % 9) for number in range(20)]
    shared = [request(100 + n, 50_000 + 5_000 * (n // 5), wait=7.0, per_token=25.0, tokens=11) for n in range(50)]
    (found,) = run_times([ReportedRequest(record) for record in [*alone, *shared]])
    assert (found.fitted, found.beside) == (20, 0)
    assert abs(found.run_time.per_token - 5.0) < 0.1 and abs(found.run_time.overhead - 10.0) < 0.5
    of_shared = 50 * (20.0 * 10) / 70
    assert abs(found.sharing - of_shared) < 1.0
    assert abs(found.contention - (found.waiting + found.sharing)) < 1e-9


def test_the_idealized_time_is_that_of_the_fastest_worker() -> None:
    fast, slow = healthy("worker-1"), healthy("worker-2", 100, per_token=20.0)
    (found,) = run_times([ReportedRequest(record) for record in [*fast, *slow]])
    assert found.fastest == "worker-1" and abs(found.idealized - 60.0) < 0.5
    assert abs(found.denoised - (60.0 + 210.0) / 2) < 0.5
