"""Engines, pools and workers keep their books: tokens held, prefill, eviction and abort, in either simulation."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from bench.order.gate import NoEvictEngine
from bench.order.rule import PenstockQueue
from planner.simulator import queues
from planner.simulator.engine import EngineShape, Greedy, ModelEngine, ModelText, StepCosts
from streaming.order import Priority

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
    assert not engine.texts and engine.held == 0


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
    while engine.texts:
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
    while engine.texts:
        engine.step()
        assert engine.held == sum(each.held for each in engine.running)
        assert len(engine.running) <= 32 and (engine.held <= 2000 or len(engine.running) == 1)
    assert [each.generated for each in texts] == [each.output for each in texts]


ENGINE = EngineShape(1000, 2, costs=StepCosts(1.0, 0.0, 0.0, 0.0))
"""A token a second, whatever else runs."""


def text(at_s: float, output: int) -> ModelText:
    return ModelText(1, output, output, at_s)


def greedy(shape: EngineShape) -> queues.ModelWorker:
    return queues.ModelWorker(ModelEngine(shape), Greedy())


def simulated(queue: queues.TextQueue, workers: list[queues.ModelWorker], texts: list[ModelText]) -> list[float | None]:
    """When each text ended."""
    queues.PoolSimulation(queue, workers).run(texts)
    return [each.ended_s for each in texts]


def test_texts_take_their_tokens_in_turn() -> None:
    """The second of the first two comes when the step of the first has begun; the others wait for a slot."""
    texts = [text(1.0, 5), text(1.0, 8), text(2.0, 3), text(3.0, 3)]
    assert simulated(queues.TextQueue(queues.by_arrival), [greedy(ENGINE)], texts) == [6.0, 10.0, 9.0, 12.0]


def test_a_queue_skips_lanes_and_tenants_but_not_what_was_put_back() -> None:
    queue = queues.TextQueue(queues.by_lane)
    chat, flood, light, line = (
        ModelText(1, 1, 1, at_s, lane, tenant)
        for at_s, lane, tenant in (
            (4.0, "interactive", "a"),
            (1.0, "batch", "a"),
            (2.0, "batch", "b"),
            (3.0, "batch", "a"),
        )
    )
    for each in (flood, light, line, chat):
        queue.put(each, 4.0)
    batch = (Priority.BATCH,)
    assert queue.take(4.0, batch) is flood
    queue.put_back(flood)
    assert [queue.take(4.0, batch, ("a",)) for _ in range(3)] == [flood, light, None]
    assert [queue.take(4.0, queues.LANES) for _ in range(3)] == [chat, line, None] and not len(queue)


def made(seed: int, count: int = 400) -> list[ModelText]:
    random, at_s, texts = Random(seed), 0.0, list[ModelText]()
    for _ in range(count):
        at_s += random.expovariate(6.0)
        lane = random.choice(["interactive", "standard", "batch"])
        prompt, answer = random.randint(1, 300), random.randint(1, 120)
        texts.append(ModelText(prompt, answer, 1 << (answer - 1).bit_length(), at_s, lane))
    return texts


def test_one_worker_ends_every_text_at_the_time_of_both_simulations() -> None:
    shape = EngineShape(3000, 8, costs=StepCosts(0.006, 0.0003, 2e-6, 0.00005))
    pool, single = made(1), made(1)
    ended = simulated(queues.TextQueue(queues.by_arrival), [greedy(shape)], pool)
    queues.Simulation(queues.TextQueue(queues.by_arrival), [greedy(shape)]).run(single)
    assert ended == pytest.approx([each.ended_s for each in single], abs=0.05)


@pytest.mark.parametrize("new_queue", [PenstockQueue, lambda: queues.TextQueue(queues.by_lane)])
def test_every_text_ends_with_the_workers_of_the_product(new_queue: Callable[[], queues.TextQueue]) -> None:
    """All tokens, and nobody waits for ever, in the order of the product and by lanes alone."""
    queue, texts = new_queue(), made(4, 1500)
    workers: list[queues.ModelWorker] = [
        queues.PenstockWorker(ModelEngine(EngineShape(4000, 8)), Random(3)) for _ in range(3)
    ]
    simulated(queue, workers, texts)
    assert not len(queue)
    assert all(each.generated == each.output and (each.begun_s or -1) >= each.arrived_s for each in texts)
