"""The gate's decisions: what fits, what does not, and why; the peak of KV use, against counting it step by step; and
the history of output lengths, from which it draws."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from bench.order.gate import NoEvictEngine, simulated
from planner.simulator.engine import AdmissionRule, EngineShape, Greedy, ModelEngine, ModelText, PastFuture
from workers.gate import (
    MAX_RESERVE,
    MAX_TENANTS,
    MIN_RESERVE,
    MIN_TENANT_LENGTHS,
    REDRAWN,
    WINDOW,
    WINDOW_TEXTS,
    Gate,
    HeldText,
    Holding,
    KvCapacity,
    LengthHistory,
    LengthWindow,
    Reserve,
    future_peak,
    wait_reason,
)


def window_of(*lengths: int, unknown: int = 0) -> LengthWindow:
    window = LengthWindow(unknown)
    for length in lengths:
        window.add(length)
    return window


def text(prompt: int, limit: int, generated: int = 0, lengths: tuple[int, ...] = ()) -> HeldText:
    """One whose answer is as long as one of `lengths`, or its limit."""
    return HeldText(prompt, limit, window_of(*lengths, unknown=not lengths), Random(1), generated)


def gate_of(*lengths: int, lane: str = "standard") -> Gate:
    history = LengthHistory()
    for length in lengths * (200 // len(lengths)) if lengths else ():
        history.add(lane, "t", length)
    return Gate(history, Random(2))


def waits(held: HeldText, tokens: int, more: HeldText, **changes: Any) -> str:
    """Why `more` waits beside a text, with a cache of so many tokens."""
    return wait_reason(more, [held], KvCapacity(8, tokens, **changes))


@pytest.mark.parametrize(
    ("tokens", "changes", "reason"),
    [
        (300, {}, ""), (299, {}, "kv"), (400, {"taken": 100}, ""), (400, {"taken": 101}, "kv"),
        (400, {"reserve": 0.25}, ""), (400, {"reserve": 0.26}, "kv"),
    ],
)  # fmt: skip
def test_a_text_is_admitted_if_the_peak_fits_to_the_token(tokens: int, changes: dict[str, Any], reason: str) -> None:
    """Two texts of 100 tokens that generate 50 each: together 300. What is pinned or reserved is taken."""
    assert waits(text(100, 50), tokens, text(100, 50), **changes) == reason


def test_no_more_texts_than_slots_but_an_idle_engine_takes_any_text() -> None:
    """Or that text would wait for ever: nothing that ends makes room."""
    for tokens in (0, 10**6):
        found = [wait_reason(text(1, 1), [text(1, 1)] * 3, KvCapacity(slots, tokens)) for slots in (4, 3)]
        assert found == ["", "slots"]
    assert not wait_reason(text(500, 500), [], KvCapacity(4, 100, taken=100, reserve=0.2))


def test_texts_that_remain_are_drawn_in_as_many_futures_as_fewer_need() -> None:
    """Of 55 texts 16 would go: those that remain are compared in more futures than all were."""
    gate = gate_of(40)
    gate.held = {str(number): text(10, 100, lengths=(40,)) for number in range(55)}
    chat = text(10, 100, lengths=(40,))
    gone = [str(number) for number in range(16)]
    assert gate.fitting([chat], KvCapacity(60, 4000), gone) == 1
    assert gate.fitting([chat], KvCapacity(60, 1000), gone) == 0


def test_an_engine_that_never_evicts_keeps_whole_limits_free() -> None:
    """So does the gate: what the engine would keep waiting stays in order outside. No prediction, hence no reserve."""
    held, more = text(10, 90, 89, (95,)), text(10, 90, 0, (1,))
    found = [waits(held, tokens, more, evicts=evicts) for tokens, evicts in ((200, False), (199, False), (199, True))]
    assert found == ["", "kv", ""]


def test_a_text_that_has_outgrown_its_draws_is_drawn_again() -> None:
    """Else it would count as ending at once, for as long as it runs."""
    gate = gate_of(10, 500)
    gate.held = {str(number): gate.text("standard", "t", 10, 600) for number in range(2 * REDRAWN)}
    for each in gate.held.values():
        each.generated = 490
    assert gate.peak(KvCapacity(99, 10**6)) >= 2 * REDRAWN * (10 + 491)
    assert all(min(each.finals) > 490 for each in gate.held.values())


def test_the_reserve_rises_with_evictions_and_falls_without() -> None:
    reserve = Reserve()
    assert reserve.share == MIN_RESERVE == 0.05
    reserve.note(0, 4)  # two in a hundred are tolerated
    assert reserve.share == 0.05
    reserve.note(0, 5)
    assert reserve.share == pytest.approx(0.07)
    for evicted in range(10, 100, 5):
        reserve.note(0, evicted)
    assert reserve.share == MAX_RESERVE == 0.20
    reserve.note(WINDOW_TEXTS - 1, 95)
    assert reserve.share == MAX_RESERVE
    reserve.note(1, 95)
    assert reserve.share == pytest.approx(0.18)
    for _ in range(20):
        reserve.note(WINDOW_TEXTS, 95)
    assert reserve.share == MIN_RESERVE


def load(seed: int, count: int) -> list[ModelText]:
    random = Random(seed)
    lengths = [min(800, 1 + int(random.lognormvariate(4.3, 0.8))) for _ in range(count)]
    return [ModelText(random.randint(20, 200), length, 800) for length in lengths]


@pytest.mark.slow
def test_the_gate_prevents_nearly_all_evictions_and_costs_no_throughput() -> None:
    """In the engine model, a small one: against the engine's own policies, and against looking at now alone."""
    outcomes = {
        name: simulated(load(5, 1200), rule, EngineShape(8000, 128), engine)
        for name, rule, engine in (
            ("never", AdmissionRule(), NoEvictEngine),
            ("always", AdmissionRule(), ModelEngine),
            ("greedy", Greedy(), ModelEngine),
            ("gate", PastFuture(Random(6)), ModelEngine),
        )
    }
    assert len({each.tokens for each in outcomes.values()}) == 1  # the same work
    assert outcomes["never"].evictions == 0 < outcomes["always"].evictions
    assert outcomes["gate"].evictions < 0.1 * outcomes["always"].evictions
    assert outcomes["gate"].evictions < outcomes["greedy"].evictions
    assert outcomes["gate"].tokens_per_s > 1.5 * outcomes["never"].tokens_per_s
    assert outcomes["gate"].tokens_per_s > 0.9 * max(each.tokens_per_s for each in outcomes.values())


def test_a_cold_gate_evicts_nothing() -> None:
    """As long as no answer has ended, it counts with every limit."""
    texts = [ModelText(50, 790, 800) for _ in range(30)]
    outcome = simulated(texts, PastFuture(Random(7)), EngineShape(4000, 64))
    assert outcome.evictions == 0 and outcome.most_running >= 4


def counted(texts: list[Holding]) -> int:
    """The peak as an engine would see it: every text grows by a token per step and is gone after its last one."""
    most = 0
    for step in range(max((remaining for remaining, _ in texts), default=-1) + 1):
        most = max(most, sum(held + step for remaining, held in texts if remaining >= step))
    return most


def a_batch(random: Random, *, least: int = 0) -> list[Holding]:
    return [(random.randint(0, 60), random.randint(1, 200)) for _ in range(random.randint(least, 12))]


def test_the_formula_equals_counting_on_a_thousand_random_batches() -> None:
    random = Random(20)
    batches = [a_batch(random) for _ in range(1000)]
    assert [future_peak(each) for each in batches] == [counted(each) for each in batches]
    assert sum(len(each) > 5 for each in batches) > 300  # it was no test of empty batches


def test_each_answer_replaces_an_unknown_one() -> None:
    window = LengthWindow(unknown=WINDOW // 2)
    shares = []
    for _ in range(WINDOW // 2):
        window.add(10)
        shares.append(window.draws(0, 99, 400, Random(2)).count(99) / 400)
    assert shares[0] > 0.9 and 0.4 < shares[len(shares) // 2 - 1] < 0.6 and shares[-1] == 0


def test_a_running_text_is_drawn_from_the_lengths_above_what_it_has() -> None:
    """Evenly over the parts between neighbours: what it has, 100, 200, its limit; all within these."""
    window = window_of(10, 20, 100, 200)
    drawn = window.draws(50, 1000, 30_000, Random(4))
    assert min(drawn) > 50 and max(drawn) <= 1000
    parts = Counter("low" if each <= 100 else "middle" if each <= 200 else "high" for each in drawn)
    assert all(0.31 < parts[part] / len(drawn) < 0.36 for part in ("low", "middle", "high"))
    assert min(drawn) < 53 and max(drawn) > 990


@pytest.mark.parametrize("generated", [0, 1, 9, 10, 11, 49, 99])
def test_no_draw_leaves_the_bounds(generated: int) -> None:
    """Above what it has and at most its limit, also where the history is longer, shorter, or unknown."""
    for window in (window_of(10, 60, 500), LengthWindow(3), window_of(10, unknown=3), LengthWindow()):
        drawn = window.draws(generated, 100, 500, Random(5))
        assert all(generated < each <= 100 for each in drawn)


def test_a_tenant_is_drawn_from_its_own_lengths_once_enough_are_known() -> None:
    history = LengthHistory()
    for number in range(MIN_TENANT_LENGTHS):
        assert history.window("batch", "long") is history.window("batch"), number
        history.add("batch", "long", 900)
        history.add("batch", "short", 5)
    assert set(history.window("batch", "long").draws(0, 2000, 50, Random(8))) == {900}
    assert history.window("interactive", "long") is history.window("interactive")


def test_the_history_is_bounded() -> None:
    """The tenants that were silent for longest go first."""
    history = LengthHistory()
    for number in range(MAX_TENANTS + 10):
        for _ in range(WINDOW + 10):
            history.add("batch", f"tenant-{number}", number)
        if number == MAX_TENANTS - 1:
            history.add("batch", "tenant-0", 0)  # it is not silent any more
    lane = history.window("batch")
    known = [number for number in range(MAX_TENANTS + 10) if history.window("batch", f"tenant-{number}") is not lane]
    assert known == [0, *range(11, MAX_TENANTS + 10)]
    assert {len(history.window("batch", f"tenant-{number}")) for number in known} == {len(lane)} == {WINDOW}
