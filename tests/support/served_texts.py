"""Texts of an engine whose step times are known, as its records would show them."""

from __future__ import annotations

from random import Random

from planner.fit import DecodeRegime, FittedTimes, ServedLimits, ServedText
from planner.simulator.engine import EngineShape, Greedy, ModelEngine, ModelText
from planner.simulator.queues import ModelWorker, Simulation, SortedQueue, by_arrival

REGIME = DecodeRegime(0.012, 2e-7, 4e-4)
TRUTH = FittedTimes((0.004, 5e-5, 2e-9), REGIME, REGIME)
DELAY_S, PATH_S = 0.010, 0.003
LIMITS = ServedLimits(slots=16, kv_tokens=100_000, step_tokens=512)


def served_texts(
    seed: int = 1, rates: tuple[float, ...] = (0.5, 1, 2, 3, 1), count: int = 80, noise: float = 0.0
) -> list[ServedText]:
    """`count` requests at each rate, with a minute between the rates."""
    random, texts, at_s = Random(seed), [], 0.0
    for rate in rates:
        for _ in range(count):
            at_s += random.expovariate(rate)
            texts.append(ModelText(random.randint(10, 1500), random.randint(2, 150), 256, at_s))
        at_s += 60
    engine = ModelEngine(EngineShape(LIMITS.kv_tokens, LIMITS.slots, LIMITS.step_tokens, costs=TRUTH))
    Simulation(SortedQueue(by_arrival), [ModelWorker(engine, Greedy())]).run(texts)
    return [_served(text, 1 + noise * random.random()) for text in texts]


def _served(text: ModelText, longer: float) -> ServedText:
    assert text.first_s is not None and text.ended_s is not None
    first_s = text.handed_s + (text.first_s - text.handed_s + DELAY_S) * longer
    last_s = first_s + (text.ended_s - text.first_s) * longer
    return ServedText("w", text.arrived_s, text.handed_s, first_s, last_s, first_s + PATH_S, text.prompt, text.output)
