"""Texts of an engine whose step times are known, as its records would show them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from random import Random

from planner.fit import DecodeRegime, EngineFit, FittedTimes, ServedText
from planner.simulator.engine import EngineShape, Greedy, ModelEngine, ModelText
from planner.simulator.queues import ModelWorker, Simulation, TextQueue, by_arrival

REGIME = DecodeRegime(0.012, 2e-7, 4e-4)
TRUTH = FittedTimes((0.004, 5e-5, 2e-9), REGIME, REGIME)
DELAY_S, PATH_S = 0.010, 0.003
AFTER_S = 1e-6
"""A client's next request comes later than its answer, and no two clients ask at the same time."""
LIMITS = EngineShape(kv_tokens=100_000, slots=16, prefill_tokens=512)


@cache
def served_texts(
    seed: int = 1, rates: tuple[float, ...] = (0.5, 1, 2, 3, 1), count: int = 80, noise: float = 0.0
) -> tuple[ServedText, ...]:
    """`count` requests at each rate, with a minute between the rates."""
    random, texts, at_s = Random(seed), [], 0.0
    for rate in rates:
        for _ in range(count):
            at_s += random.expovariate(rate)
            texts.append(ModelText(random.randint(10, 1500), random.randint(2, 150), 256, at_s))
        at_s += 60
    engine = ModelEngine(replace(LIMITS, costs=TRUTH))
    Simulation(TextQueue(by_arrival), [ModelWorker(engine, Greedy())]).run(texts)
    return tuple(_served(text, 1 + noise * random.random()) for text in texts)


def _served(text: ModelText, longer: float) -> ServedText:
    assert text.first_s is not None and text.ended_s is not None
    first_s = text.handed_s + (text.first_s - text.handed_s + DELAY_S) * longer
    last_s = first_s + (text.ended_s - text.first_s) * longer
    return ServedText("w", text.arrived_s, text.handed_s, first_s, last_s, first_s + PATH_S, text.prompt, text.output)


def closed_loop(fit: EngineFit, clients: int, lengths: Sequence[tuple[int, int]]) -> list[ModelText]:
    """The texts of one engine under clients that each ask again as soon as they are answered, with these (prompt,
    answer) tokens in turn. What is asked at the end of a step comes when the next one is under way."""
    engine, now_s = ModelEngine(fit.shape), 0.0
    todo = iter([ModelText(prompt, answer, answer) for prompt, answer in lengths])
    numbers, coming = count(), list[tuple[float, int, ModelText]]()
    done: list[ModelText] = []

    def ask(at_s: float) -> None:
        if (text := next(todo, None)) is not None:
            text.arrived_s = at_s
            heapq.heappush(coming, (at_s, next(numbers), text))

    for number in range(clients):
        ask(number * AFTER_S)
    while coming or engine.texts:
        if not engine.texts:
            now_s = max(now_s, coming[0][0])
        while coming and coming[0][0] <= now_s:
            engine.submit(heapq.heappop(coming)[2])
        step = engine.step()
        now_s += step.duration_s
        for text in step.tokens:
            text.first_s = now_s if text.first_s is None else text.first_s
        for text in step.ended:
            text.ended_s = now_s
            done.append(text)
            ask(now_s + AFTER_S + fit.path_s + fit.delay_s)
    return done
