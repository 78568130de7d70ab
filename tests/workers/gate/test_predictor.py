"""What the predictor learns of an engine's steps and first tokens, and what it lets in beside a chat."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from workers.gate import (
    MIN_OBSERVATIONS,
    SAMPLE_INTERVAL_S,
    Colocation,
    HeldText,
    LatencyPredictor,
    LengthWindow,
    RecursiveFit,
)


def step_s(texts: int, held: int) -> float:
    return 0.006 + 0.00003 * texts + 0.0000002 * held


def first_s(prompt: int) -> float:
    return 0.02 + 0.00005 * prompt + 1e-8 * prompt**2


def learned(random: Random, count: int = 400, noise: float = 0.02, outliers: int = 0) -> LatencyPredictor:
    predictor = LatencyPredictor()
    for number in range(count):
        texts, prompt = random.randint(1, 128), random.randint(10, 4000)
        held = texts * random.randint(50, 900)
        factor = random.gauss(1, noise)
        if outliers and number > 50 and number % outliers == 0:
            factor = 50.0  # the machine stood still
        predictor.note_step(texts, held, step_s(texts, held) * factor)
        predictor.note_first(prompt, first_s(prompt) * factor)
    return predictor


@pytest.mark.parametrize("outliers", [0, 20])
def test_steps_and_first_tokens_are_predicted_within_a_tenth(outliers: int) -> None:
    """Also if every twentieth observation is fifty times too long."""
    predictor = learned(Random(1), outliers=outliers)
    for texts, held in ((1, 300), (16, 9000), (64, 30_000), (128, 100_000)):
        assert predictor.tpot_s(texts, held) == pytest.approx(step_s(texts, held), rel=0.1)
    for prompt in (500, 2000, 4000):
        assert predictor.ttft_s([prompt]) == pytest.approx(first_s(prompt), rel=0.1)


def test_it_follows_an_engine_that_becomes_slower() -> None:
    random = Random(2)
    predictor = learned(random)
    for _ in range(3000):
        texts = random.randint(1, 128)
        held = texts * random.randint(50, 900)
        predictor.note_step(texts, held, 2 * step_s(texts, held))
    assert predictor.tpot_s(64, 30_000) == pytest.approx(2 * step_s(64, 30_000), rel=0.1)


def test_a_long_quiet_load_leaves_it_sound() -> None:
    """Where all observations are alike the other coefficients are not known, and must not run away."""
    fit = RecursiveFit(3)
    for _ in range(20_000):
        fit.observe((1.0, 0.5, 0.25), 0.01)
    assert fit.predict((1.0, 0.5, 0.25)) == pytest.approx(0.01, rel=0.01)
    assert all(abs(each) < 1e7 for row in fit._covariance for each in row)
    for _ in range(200):
        fit.observe((1.0, 1.0, 0.3), 0.012)
    assert fit.predict((1.0, 1.0, 0.3)) == pytest.approx(0.012, rel=0.1)


def test_nothing_is_predicted_from_too_little() -> None:
    predictor = LatencyPredictor()
    for number in range(MIN_OBSERVATIONS):
        assert predictor.tpot_s(1, 100) == 0, number
        predictor.note_step(1, 100, 0.01)
    assert predictor.tpot_s(1, 100) == pytest.approx(0.01, rel=0.01) and predictor.ttft_s([10]) == 0


def reason(
    predictor: LatencyPredictor,
    *,
    texts: int = 10,
    offline: int = 1,
    held: int = 5000,
    prefills: tuple[int, ...] = (),
    prompt: int = 100,
    chat_prompt: int = 100,
    ttft_ms: float | None = 200,
    itl_ms: float | None = 10,
) -> str:
    """Why a line waits, if it does. Beside ten texts, with targets of 200 and 10 ms, as far as nothing else is said."""
    colocation = Colocation(ttft_ms, itl_ms)
    colocation._predictor = predictor
    colocation.note_chat(chat_prompt)
    running = texts - len(prefills)
    sizes = [(size, 0) for size in prefills] + [(held // max(1, running), 1)] * running
    window, random = LengthWindow(1), Random(1)
    beside = [HeldText(size - generated, 1000, window, random, generated) for size, generated in sizes]
    return colocation.wait_reason(prompt, beside, offline)


@pytest.mark.parametrize(("beside", "waits"), [
    ({}, ""),
    ({"texts": 100, "held": 8000}, "itl"),
    ({"prompt": 3000}, "ttft"),
    ({"prefills": (1000, 1000)}, "ttft"),
    ({"chat_prompt": 3000}, "ttft"),
    # Without a target nothing waits.
    ({"ttft_ms": None, "itl_ms": None, "texts": 200, "held": 10**6, "prompt": 4000}, ""),
    # An engine that misses the target without it takes one, and only one: else the lane would never run.
    ({"texts": 100, "held": 8000, "offline": 0}, ""),
    ({"chat_prompt": 3000, "offline": 0}, ""),
    ({"prompt": 3000, "offline": 0}, "ttft"),
    ({"texts": 100, "held": 8000, "prompt": 3000, "offline": 0}, "ttft"),
])  # fmt: skip
def test_a_line_of_a_batch_is_admitted_while_a_chat_keeps_its_targets(beside: dict[str, Any], waits: str) -> None:
    assert reason(learned(Random(3), noise=0.001), **beside) == waits


def test_without_knowledge_nothing_is_refused() -> None:
    assert reason(LatencyPredictor(), texts=200, held=10**6, prompt=4000) == ""


STEP_S, PREFILL_S = 0.01, 0.0001
"""Of the engine that these tests play: a step, and each prompt token more."""


def text(prompt: int = 200, generated: int = 0) -> HeldText:
    return HeldText(prompt, 1000, LengthWindow(1), Random(1), generated)


class Played:
    """An engine that computes one prompt in a step, the oldest first."""

    def __init__(self, **targets: float) -> None:
        self.colocation = Colocation(**targets)
        self.held: list[HeldText] = []
        self.begun: list[float] = []
        """When each of them was handed over."""
        self.now = 0.0

    def begin(self, *texts: HeldText) -> None:
        for each in texts:
            self.colocation.begin(each, self.held)
            self.held.append(each)
            self.begun.append(self.now)

    def step(self) -> None:
        fresh = next((place for place, each in enumerate(self.held) if not each.generated), None)
        self.now += STEP_S + (0.0 if fresh is None else PREFILL_S * self.held[fresh].prompt)
        if fresh is not None:
            self.colocation.note_first(self.held[fresh], self.held[fresh].prompt, self.now - self.begun[fresh])
        texts = [each for place, each in enumerate(self.held) if each.generated or place == fresh]
        for each in texts:
            each.generated += 1
        if self.colocation.is_due(self.now):
            self.colocation.note_step(len(texts), self.held, self.now)

    def end_all(self) -> None:
        self.held.clear()
        self.begun.clear()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def waits(self, prompt: int = 200) -> str:
        """Beside one text of lane batch."""
        return self.colocation.wait_reason(prompt, self.held, 1)


def lone(played: Played, count: int = MIN_OBSERVATIONS + 5) -> None:
    """Texts that begin one after the other."""
    for number in range(count):
        played.begin(text(100 + 10 * (number % 5)))
        played.steps(3)
        played.end_all()


def test_a_burst_of_prompts_is_not_taken_for_the_cost_of_one() -> None:
    """First tokens that waited for thirty prompts would keep every line out, and so the fit from learning better."""
    played = Played(ttft_ms=100)
    for _ in range(3):
        played.begin(*[text() for _ in range(30)])
        played.steps(33)
        played.end_all()
    lone(played)
    played.held.append(text(generated=5))
    assert played.waits() == ""


def test_only_steps_without_a_prompt_are_learned() -> None:
    """Two lines begin at a time, and their long prompts stretch two steps; the others take 10 ms."""
    played = Played(itl_ms=20)
    for _ in range(3 * MIN_OBSERVATIONS):
        played.begin(text(2000), text(2000))
        played.steps(int(SAMPLE_INTERVAL_S / STEP_S) + 2)
        played.end_all()
    played.held.append(text(generated=5))
    assert played.colocation._predictor._step.count >= MIN_OBSERVATIONS
    assert played.waits() == ""
