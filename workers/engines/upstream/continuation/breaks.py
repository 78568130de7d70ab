"""Break counts: remembers how often servers have broken each text that the engine gave back to the queue.

A request that breaks servers would otherwise begin anew after each return, for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

MAX_KNOWN = 4096


@dataclass(slots=True)
class BreakCounts:
    """Of one text."""

    breaks: int = 0
    """How often a server failed it since its last progress. Servers that took no connection do not count."""
    restarts: int = 0
    """How often its answer had to begin again, because no server could continue it."""
    shown: bool = False
    """Whether a part of the answer had come out when the text was given back."""
    refused_at: float | None = None
    """When a server first refused it because of a limit (429) since its last progress, in monotonic seconds."""
    refusal: str = ""
    """What the last of these servers said."""
    by_model: dict[str, int] = field(default_factory=dict)
    """How often each model's servers failed it before its first token."""


class BrokenTexts:
    """The counts of texts that wait in the queue, by Request.text_id. It forgets the oldest."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, BreakCounts] = OrderedDict()

    def keep(self, text_id: str, counts: BreakCounts) -> None:
        """The text goes back to the queue."""
        if text_id:
            self._known[text_id] = counts
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def take(self, text_id: str, *, begins: bool) -> BreakCounts:
        """The text is submitted again, or for the first time. `begins`: without a part of its answer."""
        counts = self._known.pop(text_id, None) or BreakCounts()
        counts.restarts += int(counts.shown and begins)
        return counts
