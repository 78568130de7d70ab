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
from telemetry.report.figures import figures_of
from telemetry.report.finding import Advice, advise, verdict
from telemetry.report.ideal import fit, run_times


def kinds(records: Iterable[Record]) -> list[str]:
    return [each.kind for each in advice(records)]


def advice(records: Iterable[Record]) -> list[Advice]:
    evidence = evidence_of(records)
    return advise(figures_of(evidence, {}), evidence)


def delivered(requests: Iterable[RequestRecord], late: float = 1.0) -> list[Record]:
    return [each for record in requests for each in (record, delivery(record, late))]


def healthy(by: str = "worker-1", first: int = 0, **more: float) -> list[RequestRecord]:
    return [request(first + number, 100.0 * number, by=by, **more) for number in range(20)]  # type: ignore[arg-type]


def test_nothing_is_said_where_nothing_is_wrong() -> None:
    assert kinds(delivered([*healthy(), *healthy("worker-2", 100)])) == []


def test_a_slow_worker_is_named() -> None:
    slow = healthy("worker-2", 100, per_token=20.0)
    found = advice(delivered([*healthy(), *slow, *healthy("worker-3", 200)]))
    assert [each.kind for each in found] == ["slow_worker"]
    assert found[0].title == "worker-2 is slow" and "20.0 ms per token" in found[0].reason
    assert abs(found[0].saves_s - 20 * 15 * 11 / 1000) < 0.1


@pytest.mark.parametrize(("factor", "named"), [(1.4, []), (1.6, ["worker-2 is slow"])])
def test_a_worker_is_slow_from_half_as_long_again(factor: float, named: list[str]) -> None:
    """Per token, compared with the others alone: its own time would raise what is usual."""
    usual, slow = healthy(per_token=10.0), healthy("worker-2", 100, per_token=10.0 * factor)
    assert [each.title for each in advice(delivered([*usual, *slow]))] == named


def test_models_are_not_compared() -> None:
    """A larger model takes longer; that is no fault of its workers."""
    large = healthy("worker-3", 200, per_token=50.0)
    assert (
        kinds(delivered([*healthy(), *healthy("worker-2", 100), *[replace(each, model="n") for each in large]])) == []
    )


def test_a_single_worker_is_not_slow() -> None:
    assert kinds(delivered(healthy(per_token=200.0))) == []


def test_a_starved_lane_is_named() -> None:
    """And not the pool, whose other lane is served at once."""
    starved = [request(100 + number, 10.0 * number, wait=9000.0, lane="batch") for number in range(20)]
    found = advice(delivered([*healthy(), *starved]))
    assert [each.kind for each in found] == ["starved_lane"]
    assert found[0].title == "Lane batch of m starves" and "9.0 s" in found[0].reason


def test_the_highest_lane_does_not_starve() -> None:
    """It has no lane before it: that its requests wait is not for the order."""
    waited = [request(100 + number, 10.0 * number, wait=9000.0, lane="interactive") for number in range(20)]
    assert [each.kind for each in advice(delivered([*healthy(), *waited]))] == ["full_pool"]


def test_the_time_of_attempts_that_were_lost_counts_whatever_became_of_the_job() -> None:
    """A job that is given up has no answer, and its workers died all the same."""
    last = request(100).started_us + 2_000_000
    lost = [replace(request(100 + n), lost=3, claimed_us=last, state="failed", code="poison") for n in range(2)]
    (found,) = [each for each in advice([*delivered(healthy()), *lost]) if each.kind == "lost_workers"]
    assert found.title == "Workers died under 2 requests" and "6 attempts lost, in all 4.0 s" in found.reason


def test_a_lane_starves_beside_the_best_of_the_lanes_before_it() -> None:
    """That another one waits as well is no excuse."""
    lanes = [request(number, 10.0 * number, wait=wait, lane=lane) for number, (lane, wait) in
             enumerate((("interactive", 4000.0), ("standard", 10.0), ("batch", 9000.0)) * 10)]  # fmt: skip
    (found,) = [each for each in advice(delivered(lanes)) if each.kind == "starved_lane"]
    assert found.title == "Lane batch of m starves" and "lane standard" in found.change


def test_a_pool_is_full_where_all_lanes_of_its_model_wait_whatever_others_do() -> None:
    """One lane starves, and the other waits for a second, too; another model's requests begin at once."""
    lanes = [request(number, 10.0 * number, wait=wait, lane=lane) for number, (lane, wait) in
             enumerate((("interactive", 1000.0), ("batch", 9000.0)) * 10)]  # fmt: skip
    quick = [request(100 + number, 10.0 * number, lane="interactive", model="other") for number in range(60)]
    found = {(each.kind, each.model) for each in advice(delivered([*lanes, *quick]))}
    assert found == {("starved_lane", "m"), ("full_pool", "m")}


def test_a_worker_that_is_slow_explains_why_first_tokens_come_late() -> None:
    """Reading takes most of the engine's time, because one worker reads and writes slowly: that is told once."""
    slow = healthy("worker-2", 100, prefill=900.0, per_token=20.0)
    found = kinds(delivered([*healthy(), *slow, *healthy("worker-3", 200)]))
    assert found == ["slow_worker"]


def test_a_lane_that_waits_as_all_do_does_not_starve() -> None:
    waiting = [
        request(number, 10.0 * number, wait=9000.0 + number, lane=lane)
        for number, lane in enumerate(["batch", "standard", "interactive"] * 10)
    ]
    found = advice(delivered(waiting))
    assert [each.kind for each in found] == ["full_pool"]
    assert found[0].title == "The pool of m is full"


def test_requests_that_wait_beside_free_slots_are_told_apart() -> None:
    waiting = [request(number, 10.0 * number, wait=9000.0) for number in range(30)]
    samples = [sample("worker", "worker-1", at, at, model="m", slots=8, running=1) for at in (0, 10_000)]  # type: ignore[arg-type]
    assert kinds([*delivered(waiting), *samples]) == ["idle_pool"]


def test_slots_that_others_hold_are_not_free() -> None:
    """In a report about one lane: the pool is full, with texts of the other one."""
    own = evidence_of(delivered(request(number, 10.0 * number, wait=2000.0) for number in range(30)))
    others = [request(100 + number, 1.0, per_token=250.0, lane="batch") for number in range(8)]
    samples = [sample("worker", "worker-1", at, at, model="m", slots=8, running=8) for at in (0, 2_400)]  # type: ignore[arg-type]
    everyone = evidence_of([*delivered(others), *samples])
    own.samples = everyone.samples
    figures = figures_of(own, {}, shared=True)
    assert [each.kind for each in advise(figures, own, everyone=own.requests)] == ["idle_pool"]
    found = advise(figures, own, everyone=[*own.requests, *everyone.requests])
    assert [each.kind for each in found] == ["full_pool"] and "100 % of 8 slots" in found[0].reason


def test_a_stalled_gateway_is_named() -> None:
    samples = [sample("api", "api-2", 0, 0.0), sample("api", "api-2", 10_000, 1.0, lag_ms=800.0)]
    found = advice([*delivered(healthy()), *samples])
    assert [(each.kind, each.title) for each in found] == [("gateway_stall", "api-2 stood still")]


def test_a_process_that_stood_still_in_several_lives_is_named_once() -> None:
    """And the one that stood longest comes first."""
    samples = [sample("api", "api-1", 0, 0.0), sample("api", "api-1", 10_000, 1.0, lag_ms=300.0)]
    for pid in (2, 3, 4):
        life = (sample("api", "api-2", 0, 0.0), sample("api", "api-2", 10_000, 1.0, lag_ms=400.0))
        samples += [replace(each, pid=pid) for each in life]
    found = advice([*delivered(healthy()), *samples])
    assert [each.title for each in found] == ["api-2 stood still", "api-1 stood still"]


def test_a_limit_is_named_only_where_one_refused() -> None:
    def change(code: str) -> str:
        ended = [request(100 + number, 1.0) for number in range(3)]
        refused = [replace(each, state="refused", code=code) for each in ended]
        (found,) = [each for each in advice(delivered([*healthy(), *refused])) if each.kind == "refused"]
        return found.change

    assert "raise the limit" in change("queue_full")
    assert "raise the limit" not in change("unsupported_media_type") and "mend the requests" in change("unknown")


def test_a_slow_gateway_is_named_with_its_part() -> None:
    found = advice(delivered(healthy(), late=60.0))
    assert [each.kind for each in found] == ["gateway_stall"] and "egress_tail" in found[0].reason


def test_long_prompts_are_named() -> None:
    long = [request(100 + number, 100.0 * number, prefill=900.0, prompt=4000) for number in range(5)]
    assert kinds(delivered([*healthy(), *long])) == ["long_prompts"]


def test_requests_without_an_answer_are_named_with_their_code() -> None:
    refused = [
        RequestRecord(id=f"req_{number}", ended_us=request(1).ended_us, state=REFUSED, model="m", code="lane_full")
        for number in range(5)
    ]
    expired = [replace(request(300 + number), state="expired", code="deadline_exceeded") for number in range(5)]
    found = {each.kind: each for each in advice([*delivered(healthy()), *refused, *expired])}
    assert set(found) == {"refused", "expired"} and "lane_full (5 times)" in found["refused"].reason


def test_the_weightiest_comes_first() -> None:
    slow = healthy("worker-2", 100, per_token=20.0)
    starved = [request(300 + number, 10.0 * number, wait=9000.0, lane="batch") for number in range(20)]
    assert kinds(delivered([*healthy(), *slow, *starved])) == ["starved_lane", "slow_worker"]


def test_the_verdict_names_the_largest_share_first() -> None:
    figures = figures_of(evidence_of(delivered(healthy())), {})
    assert verdict(figures).startswith("Requests spent 94 % of their time generating, ")
    assert verdict(figures_of(evidence_of([]), {})) == "No request was completed in this window."


# --- large parts of the time that no bottleneck explains -------------------------------------------------------------


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
    assert prompts.saves_s == approx(20 * 0.4, rel=0.01)


def test_what_a_bottleneck_explains_is_not_told_again() -> None:
    waiting = [request(number, 10.0 * number, wait=9000.0) for number in range(30)]
    samples = [sample("worker", "worker-1", at, at, model="m", slots=8, running=1) for at in (0, 10_000)]  # type: ignore[arg-type]
    assert [each.kind for each in advice([*delivered(waiting), *samples])] == ["idle_pool"]
    assert [each.kind for each in advice(delivered((request(n) for n in range(20)), late=60.0))] == ["gateway_stall"]


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


def test_the_fit_of_lengths_that_never_vary() -> None:
    """One of them, both, or only together."""
    assert fit([(20, output, 30 + 5.0 * (output - 1)) for output in (2, 5, 9)]).of(20, 50) == approx(275.0)
    assert fit([(20, 5, 50.0)] * 5).of(20, 5) == 50.0
    assert abs(fit([(n, n, 10 + 3.0 * (n - 1)) for n in (2, 5, 9)]).of(7, 7) - 28) < 1e-9


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
