"""Simulated pools: texts, steps and workers keep their books, and leaps change nothing."""

from __future__ import annotations

from random import Random

import pytest

from planner.simulator import queues
from planner.simulator.engine import EngineShape, Greedy, ModelEngine, ModelText, StepCosts
from planner.simulator.pool import PoolSimulation

ENGINE = EngineShape(1000, 2, costs=StepCosts(1.0, 0.0, 0.0, 0.0))
"""A token a second, whatever else runs."""


def text(at_s: float, output: int) -> ModelText:
    return ModelText(1, output, output, at_s)


def greedy(shape: EngineShape) -> queues.ModelWorker:
    return queues.ModelWorker(ModelEngine(shape), Greedy())


def simulated(queue: queues.TextQueue, workers: list[queues.ModelWorker], texts: list[ModelText]) -> list[float | None]:
    """When each text ended."""
    PoolSimulation(queue, workers).run(texts)
    return [each.ended_s for each in texts]


def test_texts_take_their_tokens_in_turn() -> None:
    """The second of the first two comes when the step of the first has begun; the others wait for a slot."""
    texts = [text(1.0, 5), text(1.0, 8), text(2.0, 3), text(3.0, 3)]
    assert simulated(queues.SortedQueue(queues.by_arrival), [greedy(ENGINE)], texts) == [6.0, 10.0, 9.0, 12.0]


def test_a_fuller_batch_takes_longer() -> None:
    """Alone two seconds a token: three by 6, and a fourth by 8. Together three: the first ends at 14."""
    shape = EngineShape(1000, 4, costs=StepCosts(1.0, 1.0, 0.0, 0.0))
    assert simulated(queues.SortedQueue(queues.by_arrival), [greedy(shape)], [text(0.0, 6), text(6.0, 6)]) == [
        14.0,
        22.0,
    ]


def made(seed: int, count: int = 400) -> list[ModelText]:
    random, at_s, texts = Random(seed), 0.0, list[ModelText]()
    for _ in range(count):
        at_s += random.expovariate(6.0)
        lane = random.choice(["interactive", "standard", "batch"])
        prompt, answer = random.randint(1, 300), random.randint(1, 120)
        texts.append(ModelText(prompt, answer, 1 << (answer - 1).bit_length(), at_s, lane))
    return texts


@pytest.mark.parametrize("held_s", [0.0, 2e-6])
def test_leaps_give_the_times_of_single_steps(held_s: float) -> None:
    """One worker: the pool and the simulation of single steps end every text at the same time."""
    shape = EngineShape(3000, 8, costs=StepCosts(0.006, 0.0003, held_s, 0.00005))
    leaping, single = made(1), made(1)
    ended = simulated(queues.SortedQueue(queues.by_arrival), [greedy(shape)], leaping)
    queues.Simulation(queues.SortedQueue(queues.by_arrival), [greedy(shape)]).run(single)
    assert ended == pytest.approx([each.ended_s for each in single], abs=0.05)


def test_a_leap_is_as_many_single_steps() -> None:
    shape = EngineShape(100, 8, costs=StepCosts(1.0, 0.1, 0.01, 0.0))
    one, other = ModelEngine(shape), ModelEngine(shape)
    for engine in (one, other):
        for prompt, output in ((10, 9), (20, 30)):
            engine.submit(ModelText(prompt, output, output))
        assert engine.alike() == 0, "it would begin them"
        engine.step()
    assert one.alike() == 8
    leap, single = one.leap(8), [other.step() for _ in range(8)]
    assert leap.duration_s == pytest.approx(sum(step.duration_s for step in single))
    assert (one.held, len(leap.ended), len(single[-1].ended)) == (other.held, 1, 1)


def test_no_leap_passes_an_eviction() -> None:
    engine = ModelEngine(EngineShape(50, 8, costs=StepCosts(1.0, 0.0, 0.0, 0.0)))
    for _ in range(2):
        engine.submit(ModelText(10, 30, 30))
    engine.step()
    engine.leap(engine.alike())
    assert engine.held <= 50 and engine.alike() == 0
    assert len(engine.step().evicted) == 1


def test_every_text_ends_with_the_workers_and_the_order_of_the_product() -> None:
    """All tokens, and nobody waits for ever."""
    queue, texts = queues.PenstockQueue(), made(4, 1500)
    workers: list[queues.ModelWorker] = [
        queues.PenstockWorker(ModelEngine(EngineShape(4000, 8)), Random(3)) for _ in range(3)
    ]
    simulated(queue, workers, texts)
    assert not len(queue)
    assert all(each.generated == each.output and (each.begun_s or -1) >= each.arrived_s for each in texts)
