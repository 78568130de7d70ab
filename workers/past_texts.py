"""Past of a job's texts: what earlier runs logged of each choice, which run began it, and the prompt in front of it.

A prompt that is echoed is part of the first delta of its choice. No engine sees it: it would continue it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from streaming.jobs.frames import Delta, Run, Section, author
from streaming.jobs.job import Job
from workers.prompts import prompt_of

PastRows = list[tuple[str, Sequence[int], int]]
"""As in penstock.engine.Request.past."""


def echoes_left(job: Job, rows: Sequence[Delta]) -> dict[int, str]:
    """The prompts that are still to be shown in front of their texts, by the index of the choice."""
    begun = {row.index for row in rows} if job.echo else ()
    return {index: _prompt(job, index) for index in range(job.choices) if index not in begun} if job.echo else {}


def _prompt(job: Job, index: int) -> str:
    return str(prompt_of(job, index // job.sampling.n))


class PastTexts:
    """Of one job, by the index of the choice."""

    def __init__(self, job: Job, rows: Sequence[Delta], sections: tuple[Section, ...], own: Run) -> None:
        """`own`: the run that continues them."""
        self._sections, self._own = sections, own
        self._rows: defaultdict[int, PastRows] = defaultdict(list)
        self._firsts: dict[int, int] = {}
        """The number of each choice's first delta."""
        for row in rows:
            text = row.text
            if job.echo and row.index not in self._firsts:
                text = text[len(_prompt(job, row.index)) :]
            self._rows[row.index].append((text, row.ids, row.n))
            self._firsts.setdefault(row.index, row.seq)

    def of(self, index: int) -> PastRows:
        return self._rows[index]

    def begun_by(self, index: int) -> str:
        """As in penstock.engine.Request."""
        first = self._firsts.get(index)
        run = self._own if first is None else author(self._sections, first) or self._own
        return f"{run.worker}/{run.number}"
