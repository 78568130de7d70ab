"""Large parts of the time that no bottleneck explains get words: what they are made of, and what to change first."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from msgspec.structs import replace
from recorded import delivery, request, sample

from telemetry.records.schema import Record, RequestRecord
from telemetry.report.figures import figures_of
from telemetry.report.finding import Advice, advise, verdict
from telemetry.report.requests import evidence_of


def advice(records: Iterable[Record]) -> list[Advice]:
    evidence = evidence_of(records)
    return advise(figures_of(evidence, {}), evidence)


def delivered(requests: Iterable[RequestRecord], late: float = 1.0) -> list[Record]:
    return [each for record in requests for each in (record, delivery(record, late))]


def begun_again(number: int, after_ms: int, **ends: int) -> RequestRecord:
    """A request whose last attempt began that much later than its first."""
    one = request(number, 100.0 * number)
    later = {name: getattr(one, name) + 1000 * after_ms for name in
             ("claimed_us", "released_us", "scheduled_us", "first_us", "last_us", "ended_us")}  # fmt: skip
    return replace(one, attempts=2, **later, **ends)  # type: ignore[arg-type]


def test_few_requests_that_waited_are_told_with_their_number() -> None:
    """The first sentence says that most of the time was waiting, so the report must say more of it."""
    records = delivered(request(number, 10.0 * number, wait=9000.0) for number in range(3))
    (found,) = advice(records)
    assert found.kind == "waiting" and "only 3 requests completed" in found.reason and "min_workers" in found.change
    assert "waiting for a place" in verdict(figures_of(evidence_of(records), {}))


def test_waiting_inside_the_engine_is_told_apart_from_waiting_for_a_worker() -> None:
    waited = [
        replace(each, scheduled_us=each.first_us - 1000) for each in (request(n, prefill=500.0) for n in range(3))
    ]
    (found,) = advice(delivered(waited))
    assert found.kind == "waiting" and "slots of the engine" in found.change


@pytest.mark.parametrize(
    ("end", "word"), [("preempted", "lane interactive"), ("handed_back", "drain time"), ("lost", "")]
)
def test_attempts_that_began_again_are_told_by_how_they_ended(end: str, word: str) -> None:
    """A death has advice of its own, and is not told twice."""
    records = delivered(begun_again(number, 80, **{end: 1}) for number in range(20))
    (found,) = advice(records)
    assert found.kind == ("lost_workers" if end == "lost" else "retries") and word in found.change
    if end != "lost":
        assert f"20 {end.replace('_', ' ')}" in found.reason and "waiting" in found.reason


def test_short_requests_are_no_stalled_gateway() -> None:
    """Three milliseconds of six are half, and nothing is wrong."""
    short = [request(number, 100.0 * number, wait=0.1, prefill=2.0, tokens=1) for number in range(20)]
    (found,) = advice(delivered(short))
    assert found.kind == "short_requests" and found.saves_s == 0 and "of each" in found.reason


def test_even_prompts_that_take_the_engine_are_told_with_what_was_cached() -> None:
    long = [replace(request(n, 1000.0 * n, prefill=900.0, prompt=4000), cached_tokens=1000) for n in range(20)]
    (found,) = advice(delivered(long))
    assert found.kind == "prompts" and "4000 tokens, an answer 11" in found.reason and "25 % of the" in found.reason


def test_embeddings_have_no_answer_to_compare_with_their_prompts() -> None:
    """All of their engine's time is before the first token, as it must be."""
    assert advice(delivered(request(n, 1000.0 * n, prefill=900.0, tokens=1) for n in range(20))) == []


def test_a_full_pool_stays_named_beside_a_starved_lane_of_another_model() -> None:
    lanes = [request(number, wait=9000.0 if number % 2 else 1.0, lane="batch" if number % 2 else "interactive")
             for number in range(20)]  # fmt: skip
    full = [request(100 + number, wait=9000.0, model="other") for number in range(20)]
    found = {(each.kind, each.model) for each in advice(delivered([*lanes, *full]))}
    assert found == {("starved_lane", "m"), ("full_pool", "other")}


def test_what_explains_the_waiting_of_one_model_explains_that_of_no_other() -> None:
    """A lane of m starves for a second; most of the time, three requests of another model waited."""
    lanes = [request(number, wait=1000.0 if number % 2 else 1.0, lane="batch" if number % 2 else "interactive")
             for number in range(20)]  # fmt: skip
    few = [request(100 + number, wait=60_000.0, model="other") for number in range(3)]
    waiting, starved = advice(delivered([*lanes, *few]))
    assert (starved.kind, starved.model, waiting.kind) == ("starved_lane", "m", "waiting")
    assert "1.00 min of each" in waiting.reason and "only 3 requests completed" in waiting.reason


def test_prompts_of_a_model_whose_worker_is_slow_are_not_told_again() -> None:
    """But those of another model are."""
    slow = [request(n, 1000.0 * n, prefill=900.0, per_token=20.0, by="worker-2") for n in range(20)]
    usual = [request(100 + n, 1000.0 * n) for n in range(20)]
    other = [request(200 + n, 1000.0 * n, prefill=400.0, model="other", by="worker-3") for n in range(20)]
    found = advice(delivered([*slow, *usual, *other]))
    assert {each.kind for each in found} == {"slow_worker", "prompts"}
    (prompts,) = [each for each in found if each.kind == "prompts"]
    assert prompts.saves_s == pytest.approx(20 * 0.4, rel=0.01)


def test_what_a_bottleneck_explains_is_not_told_again() -> None:
    waiting = [request(number, 10.0 * number, wait=9000.0) for number in range(30)]
    samples = [sample("worker", "worker-1", at, at, model="m", slots=8, running=1) for at in (0, 10_000)]  # type: ignore[arg-type]
    assert [each.kind for each in advice([*delivered(waiting), *samples])] == ["idle_pool"]
    assert [each.kind for each in advice(delivered((request(n) for n in range(20)), late=60.0))] == ["gateway_stall"]
