"""Past of a job's texts: what earlier runs logged of each choice, and which run began it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from streaming.jobs.frames import Delta, Run, Section, author

PastRows = list[tuple[str, Sequence[int], int]]
"""As in penstock.engine.Request.past."""


class PastTexts:
    """Of one job, by the index of the choice."""

    def __init__(self, rows: Sequence[Delta], sections: tuple[Section, ...], own: Run) -> None:
        """`own`: the run that continues them."""
        self._sections, self._own = sections, own
        self._rows: defaultdict[int, PastRows] = defaultdict(list)
        self._firsts: dict[int, int] = {}
        """The number of each choice's first delta."""
        for row in rows:
            self._rows[row.index].append((row.text, row.ids, row.n))
            self._firsts.setdefault(row.index, row.seq)

    def of(self, index: int) -> PastRows:
        return self._rows[index]

    def begun_by(self, index: int) -> str:
        """As in penstock.engine.Request."""
        first = self._firsts.get(index)
        run = self._own if first is None else author(self._sections, first) or self._own
        return f"{run.worker}/{run.number}"
