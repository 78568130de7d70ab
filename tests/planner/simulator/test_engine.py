"""The engine model keeps its books: tokens held, prefill, eviction, abort, and what its policies let in."""

from __future__ import annotations

from random import Random

import pytest

from bench.order.gate import NoEvictEngine
from planner.simulator.engine import EngineShape, ModelEngine, ModelText, StepCosts

COSTS = StepCosts(fixed_s=1.0, text_s=0.1, held_s=0.001, prefill_s=0.01)


def test_a_step_costs_what_it_computes() -> None:
    """Two texts, 30 tokens of prompt, then their tokens."""
    engine = ModelEngine(EngineShape(1000, 8, costs=COSTS))
    for prompt in (10, 20):
        engine.submit(ModelText(prompt, 2, 5))
    first, second = engine.step(), engine.step()
    assert first.duration_s == pytest.approx(1 + 0.2 + 0.03 + 0.3)
    assert second.duration_s == pytest.approx(1 + 0.2 + 0.032)
    assert [len(first.tokens), len(first.ended), len(second.ended)] == [2, 0, 2]
    assert engine.is_idle and engine.held == 0


def test_by_slot_the_tokens_of_running_texts_count_among_those_of_a_step() -> None:
    """Three generate, so 97 of 100 tokens of a prompt are computed; otherwise all."""
    for by_slot, steps in ((True, [3, 4]), (False, [4, 4])):
        engine = ModelEngine(EngineShape(1000, 8, prefill_tokens=100, by_slot=by_slot))
        for _ in range(3):
            engine.submit(ModelText(10, 9, 20))
        engine.step()
        engine.submit(ModelText(100, 9, 20))
        assert [len(engine.step().tokens) for _ in range(2)] == steps


def test_by_slot_prompts_are_computed_in_the_order_of_their_slots() -> None:
    """A text takes the slot that was left first: here the first, before that of an older prompt."""
    engine = ModelEngine(EngineShape(1000, 2, prefill_tokens=20, by_slot=True))
    short, old, young = ModelText(10, 1, 20), ModelText(60, 9, 20), ModelText(10, 9, 20)
    for each in (short, old):
        engine.submit(each)
    assert engine.step().ended == [short]
    engine.submit(young)
    assert engine.step().tokens == [young] and old.to_prefill == 40


@pytest.mark.parametrize(("kind", "together"), [(NoEvictEngine, 2), (ModelEngine, 9)])
def test_the_policies(kind: type[ModelEngine], together: int) -> None:
    """Of 100 tokens: two texts of at most 50, or nine that hold 11 after their first token."""
    engine = kind(EngineShape(100, 99))
    for _ in range(20):
        engine.submit(ModelText(10, 20, 40))
    engine.step()
    assert len(engine.running) == together


def test_the_youngest_is_evicted_and_computed_again_and_nothing_is_lost() -> None:
    engine = ModelEngine(EngineShape(30, 8))
    old, young = ModelText(10, 12, 20), ModelText(10, 12, 20)
    for each in (old, young):
        engine.submit(each)
    evicted = []
    while not engine.is_idle:
        evicted += engine.step().evicted
        assert engine.held == sum(each.held for each in engine.running) <= 30
    assert evicted == [young] and (old.evictions, young.evictions, young.recomputed) == (0, 1, 15)
    assert (old.generated, young.generated) == (12, 12)


def test_an_aborted_text_keeps_what_it_has_generated() -> None:
    engine = ModelEngine(EngineShape(100, 1))
    one, other = ModelText(10, 9, 20), ModelText(10, 9, 20)
    for each in (one, other):
        engine.submit(each)
    engine.step()
    engine.step()
    engine.abort(one)
    assert (one.generated, engine.held) == (2, 0)
    engine.step()
    assert (other.generated, engine.held) == (1, 11)
    engine.submit(one)
    engine.abort(other)
    engine.step()
    assert (one.generated, one.to_prefill) == (3, 0)


def test_the_books_hold_over_a_random_load() -> None:
    random = Random(3)
    engine = ModelEngine(EngineShape(2000, 32, prefill_tokens=300))
    texts = [ModelText(random.randint(1, 250), random.randint(1, 150), 200) for _ in range(150)]
    for each in texts:
        engine.submit(each)
    while not engine.is_idle:
        engine.step()
        assert engine.held == sum(each.held for each in engine.running)
        assert len(engine.running) <= 32 and (engine.held <= 2000 or len(engine.running) == 1)
    assert [each.generated for each in texts] == [each.output for each in texts]
