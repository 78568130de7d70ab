"""Stop strings over a stream of text: cut exactly before the match, hold back what may become one.

Engines differ in how they treat stop strings at a step boundary; this does it once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Feed text as it is generated; get back what may be shown. After a match `hit` is True and nothing follows."""

    def __init__(self, stops: Sequence[str], held: str = "") -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = held
        self.hit = False

    def feed(self, text: str) -> str:
        """The text that is now safe to show. Empty while a stop string may still be forming."""
        if not self._stops:
            return text
        if self.hit:
            return ""
        self._held += text
        starts = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if starts:
            self.hit = True
            shown, self._held = self._held[: min(starts)], ""
            return shown
        keep = self._longest_partial()
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """The text held back, when the generation ended for another reason."""
        shown, self._held = ("" if self.hit else self._held), ""
        return shown

    def _longest_partial(self) -> int:
        """Length of the longest tail of the held text that begins a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
