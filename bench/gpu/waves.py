"""Waves of requests through a decoder: a batch at a time, each with the same prompt and answer lengths."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.gpu.decoder import Decoder
from planner.facts.model import ModelShape

PROMPT, ANSWER = 512, 256
"""Tokens, as in SLM-Pareto."""
REQUESTS = 500


@dataclass(frozen=True, slots=True)
class ServedWaves:
    """`waves` of `batch` requests each."""

    batch: int
    waves: int
    seconds: float
    first_s: float
    """Mean of a wave's prefill."""

    @property
    def tokens(self) -> int:
        return self.batch * self.waves * ANSWER

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def latency_s(self) -> float:
        """Of one request, from the start of its wave."""
        return self.seconds / self.waves


class Waves:
    """One decoder that serves waves; with `graphs`, its step is a captured graph."""

    def __init__(self, shape: ModelShape, batch: int, *, graphs: bool = True) -> None:
        self.decoder = Decoder(shape, batch, PROMPT + ANSWER)
        self._step: Callable[[], object] = self.decoder.graph() if graphs else self.decoder.step
        self._prompts = torch.randint(shape.vocab, (batch, PROMPT), device="cuda")

    def serve(self, at_least_s: float, at_most_requests: int | None = REQUESTS) -> ServedWaves:
        """Waves until so many seconds have passed, or so many requests have been served."""
        batch, waves, prefill_s = self.decoder.batch, 0, 0.0
        torch.cuda.synchronize()
        begin = time.perf_counter()
        while (passed := time.perf_counter() - begin) < at_least_s:
            if at_most_requests is not None and waves * batch >= at_most_requests:
                break
            self.decoder.prefill(self._prompts)
            torch.cuda.synchronize()
            prefill_s += time.perf_counter() - begin - passed
            for _ in range(ANSWER - 1):
                self._step()
            torch.cuda.synchronize()
            waves += 1
        return ServedWaves(batch, waves, time.perf_counter() - begin, prefill_s / waves)
