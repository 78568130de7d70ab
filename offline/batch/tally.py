"""Tally of a batch: how many of its lines have ended, with which usage, and how many do so a second."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from streaming.batches.ledger import AnswerRow, LineOutcome
from streaming.jobs.terminal import Usage

RATE_WINDOW_S = 10.0


class Tally:
    """The counts of one turn. `first_rate`: lines a second, as an earlier turn measured."""

    def __init__(self, first_rate: float) -> None:
        self._first_rate = first_rate
        self.completed = self.failed = self.retried = 0
        self.usage = Usage()
        self._ends: deque[tuple[float, int]] = deque()
        """Loop time and number of lines, for each commit that ended some."""

    def count(self, rows: Sequence[AnswerRow], copies: Sequence[int]) -> int:
        """Count these ended lines and their duplicates, and return how many lines that makes. `copies`: how many lines
        are the same as each line, with it."""
        ended, used = 0, self.usage
        prompt, completion, cached, reasoning = used.prompt, used.completion, used.cached, used.reasoning
        for row in rows:
            lines = copies[row.line]
            ended += lines
            if row.outcome is LineOutcome.DONE:
                self.completed += lines
            else:
                self.failed += lines
            prompt, completion = prompt + row.usage.prompt, completion + row.usage.completion
            cached, reasoning = cached + row.usage.cached, reasoning + row.usage.reasoning
        self.usage = Usage(prompt, completion, cached, reasoning)
        return ended

    def note(self, ended: int) -> None:
        """So many lines have ended now."""
        if ended:
            self._ends.append((asyncio.get_running_loop().time(), ended))

    def rate(self) -> float:
        """Return the lines ended a second, over the last seconds; at first the rate that an earlier turn measured."""
        now = asyncio.get_running_loop().time()
        while self._ends and self._ends[0][0] < now - RATE_WINDOW_S:
            self._ends.popleft()
        if not self._ends or now - self._ends[0][0] < 1.0:
            return self._first_rate
        return sum(count for _, count in self._ends) / (now - self._ends[0][0])
