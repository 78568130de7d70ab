"""Co-location: what it learns from, so that one burst does not hold lane batch back, and what it lets in."""

from __future__ import annotations

from random import Random

from workers.gate import MIN_OBSERVATIONS, SAMPLE_INTERVAL_S, Colocation, HeldText, LengthWindow

STEP_S, PREFILL_S = 0.01, 0.0001
"""Of the engine that these tests play: a step, and each prompt token more."""


def text(prompt: int = 200, generated: int = 0) -> HeldText:
    return HeldText(prompt, 1000, LengthWindow((100,)), Random(1), generated)


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

    def admits(self, prompt: int = 200) -> tuple[bool, str]:
        """Beside one text of lane batch."""
        return self.colocation.admit(prompt, self.held, 1)[:2]


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
    assert played.admits() == (True, "")


def test_only_steps_without_a_prompt_are_learned() -> None:
    """Two lines begin at a time, and their long prompts stretch two steps; the others take 10 ms."""
    played = Played(itl_ms=20)
    for _ in range(3 * MIN_OBSERVATIONS):
        played.begin(text(2000), text(2000))
        played.steps(int(SAMPLE_INTERVAL_S / STEP_S) + 2)
        played.end_all()
    played.held.append(text(generated=5))
    assert played.colocation._predictor._step.count >= MIN_OBSERVATIONS
    assert played.admits() == (True, "")


def test_a_pause_of_the_engine_is_no_step() -> None:
    """The last text ends, and the next begins a second later."""
    played = Played(itl_ms=20)
    for _ in range(3 * MIN_OBSERVATIONS):
        played.begin(text(10))
        played.steps(int(SAMPLE_INTERVAL_S / STEP_S) + 2)
        played.end_all()
        played.now += 1.0
    played.held.append(text(generated=5))
    assert played.admits() == (True, "")
