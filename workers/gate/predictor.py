"""Latency predictor: fits what steps and first tokens of one engine cost, while it runs, and predicts both. Pure.

After xLLM: `TPOT = d0 + d1 * texts + d2 * tokens held`, `TTFT = c0 + c1 * prompt + c2 * prompt^2`, in seconds, by
recursive least squares. Lane batch is admitted only while a chat would keep its targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workers.gate.decision import ADMITTED, GateDecision, GateReason

FORGETTING = 0.998
"""Weight of an observation relative to the next one: the last 500 or so count."""
MIN_OBSERVATIONS = 20
"""Before so many observations nothing is predicted."""
OUTLIER = 4.0
"""Residuals beyond so many times the usual one pull the fit no further than one of this size."""
MAX_COVARIANCE = 1e6
"""Bound of the covariance: without new information it would grow for ever."""


class RecursiveFit:
    """Linear fit with forgetting, updated by one observation at a time; robust to outliers, in constant memory.

    `sum(coefficient * feature)`. Features should be about 1, so that all coefficients are learned equally fast.
    """

    def __init__(self, size: int) -> None:
        self._weights = [0.0] * size
        self._covariance = [[1e3 * (row == column) for column in range(size)] for row in range(size)]
        self._usual = 0.0
        """Usual size of a residual."""
        self.count = 0
        """Observations so far."""

    def predict(self, features: Sequence[float]) -> float:
        """The fitted value."""
        return sum([weight * feature for weight, feature in zip(self._weights, features, strict=True)])

    def observe(self, features: Sequence[float], value: float) -> None:
        """Fit one more observation."""
        residual = value - self.predict(features)
        if self.count >= MIN_OBSERVATIONS:
            bound = OUTLIER * self._usual
            residual = max(-bound, min(bound, residual))
        self.count += 1
        self._usual += (abs(residual) - self._usual) / min(self.count, 100)
        spread = [sum([a * b for a, b in zip(row, features, strict=True)]) for row in self._covariance]
        scale = FORGETTING + sum([a * b for a, b in zip(spread, features, strict=True)])
        self._weights = [weight + residual * each / scale for weight, each in zip(self._weights, spread, strict=True)]
        for row, own in zip(self._covariance, spread, strict=True):
            for column, other in enumerate(spread):
                row[column] = (row[column] - own * other / scale) / FORGETTING
        largest = max(self._covariance[place][place] for place in range(len(spread)))
        if largest > MAX_COVARIANCE:
            self._covariance = [[each * MAX_COVARIANCE / largest for each in row] for row in self._covariance]


class LatencyPredictor:
    """Predicts TTFT and TPOT of one engine."""

    TEXTS, HELD, PROMPT = 64.0, 16_384.0, 1024.0
    """Texts, tokens held and prompt tokens are divided by these."""

    def __init__(self) -> None:
        self._step, self._first = RecursiveFit(3), RecursiveFit(3)

    def note_step(self, texts: int, held: int, seconds: float) -> None:
        """Learn from a step of `texts` texts that hold `held` tokens."""
        self._step.observe(self._load(texts, held), seconds)

    def note_first(self, prompt: int, seconds: float) -> None:
        """Learn from the time between a text's hand-over to the engine and its first token."""
        self._first.observe(self._size(prompt), seconds)

    def tpot_s(self, texts: int, held: int) -> float | None:
        """Seconds between two tokens of a text; None: not known yet."""
        return self._predicted(self._step, self._load(texts, held))

    def ttft_s(self, prompt: int) -> float | None:
        """Seconds to the first token of a text that the engine begins at once; None: not known yet."""
        return self._predicted(self._first, self._size(prompt))

    def _load(self, texts: int, held: int) -> tuple[float, float, float]:
        return 1.0, texts / self.TEXTS, held / self.HELD

    def _size(self, prompt: int) -> tuple[float, float, float]:
        size = prompt / self.PROMPT
        return 1.0, size, size * size

    @staticmethod
    def _predicted(fit: RecursiveFit, features: Sequence[float]) -> float | None:
        return max(0.0, fit.predict(features)) if fit.count >= MIN_OBSERVATIONS else None


def may_admit_offline(
    predictor: LatencyPredictor,
    *,
    ttft_ms: float | None,
    itl_ms: float | None,
    texts: int,
    offline: int,
    held: int,
    prefills: Sequence[int],
    prompt: int,
    chat_prompt: int,
) -> GateDecision:
    """Decide whether the engine takes a text of lane batch beside the chats that it runs, or that may come.

    Otherwise a target that cannot be met would keep the lane waiting for ever: so an idle engine takes one, and so does
    an engine that runs none of the lane and misses the target without it. Nothing waits for a latency that is not
    known yet.

    Args:
        ttft_ms: milliseconds that a chat may wait for its first token; None: no target.
        itl_ms: milliseconds between two tokens of a chat; None: no target.
        texts: texts that the engine runs.
        offline: how many of them are of lane batch.
        held: tokens that they hold.
        prefills: prompt tokens of each of them that has no token yet.
        prompt: tokens of the text in question.
        chat_prompt: tokens of a usual chat.
    """
    if not texts:
        return ADMITTED
    before = _tpot_ms(predictor, texts, held), _ttft_ms(predictor, (*prefills, chat_prompt))
    behind = _tpot_ms(predictor, texts + 1, held + prompt), _ttft_ms(predictor, (*prefills, prompt, chat_prompt))
    reasons: tuple[GateReason, GateReason] = ("itl", "ttft")
    for reason, target, without, beside in zip(reasons, (itl_ms, ttft_ms), before, behind, strict=True):
        if target is not None and beside > target and (offline or without <= target):
            return GateDecision(False, reason)
    return ADMITTED


def _tpot_ms(predictor: LatencyPredictor, texts: int, held: int) -> float:
    """Predicted milliseconds between two tokens; 0: not known yet."""
    return 1000 * (predictor.tpot_s(texts, held) or 0.0)


def _ttft_ms(predictor: LatencyPredictor, prompts: Iterable[int]) -> float:
    """Predicted milliseconds until the last of these prompts has its first token; 0: not known yet."""
    return 1000 * sum([predictor.ttft_s(prompt) or 0.0 for prompt in prompts])
