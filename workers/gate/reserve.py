"""Reserve of the gate: the share of the KV cache that it leaves free, raised while the engine evicts texts. Pure."""

from __future__ import annotations

MIN_RESERVE, MAX_RESERVE = 0.05, 0.20
STEP = 0.02
WINDOW_TEXTS = 200
"""Ended texts after which evictions are judged anew."""
MAX_EVICTED = 0.02
"""Evictions per ended text that raise the reserve."""


class Reserve:
    """The reserve of one engine. It rises at once when predictions were too low, and falls after each quiet window."""

    def __init__(self) -> None:
        self.share = MIN_RESERVE
        """Of the KV cache; from 0.05 to 0.20."""
        self._ended = self._evicted = 0
        self._seen = 0

    def note(self, ended: int, evicted: int) -> None:
        """Judge the engine's evictions.

        Args:
            ended: texts that have ended since the last call.
            evicted: texts that the engine has evicted or paused since it started. Less than before: it has restarted.
        """
        self._ended += ended
        self._evicted += evicted - self._seen if evicted >= self._seen else evicted
        self._seen = evicted
        if self._evicted > MAX_EVICTED * max(self._ended, WINDOW_TEXTS):
            self.share = min(MAX_RESERVE, self.share + STEP)
        elif self._ended >= WINDOW_TEXTS:
            self.share = max(MIN_RESERVE, self.share - STEP)
        else:
            return
        self._ended = self._evicted = 0
