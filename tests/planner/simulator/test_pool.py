"""Simulated pools: texts, steps and workers keep their books, whichever simulation runs them."""

from __future__ import annotations

from random import Random

import pytest

from planner.simulator import queues
from planner.simulator.engine import EngineShape, Greedy, ModelEngine, ModelText, StepCosts

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
    assert simulated(queues.SortedQueue(queues.by_arrival), [greedy(ENGINE)], texts) == [6.0, 10.0, 9.0, 12.0]


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
    ended = simulated(queues.SortedQueue(queues.by_arrival), [greedy(shape)], pool)
    queues.Simulation(queues.SortedQueue(queues.by_arrival), [greedy(shape)]).run(single)
    assert ended == pytest.approx([each.ended_s for each in single], abs=0.05)


def test_every_text_ends_with_the_workers_and_the_order_of_the_product() -> None:
    """All tokens, and nobody waits for ever."""
    queue, texts = queues.PenstockQueue(), made(4, 1500)
    workers: list[queues.ModelWorker] = [
        queues.PenstockWorker(ModelEngine(EngineShape(4000, 8)), Random(3)) for _ in range(3)
    ]
    simulated(queue, workers, texts)
    assert not len(queue)
    assert all(each.generated == each.output and (each.begun_s or -1) >= each.arrived_s for each in texts)
