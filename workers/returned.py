"""Returned jobs: counts how often the engine has given each job back without a new token."""

from __future__ import annotations

from collections import OrderedDict

MAX_RETURNS = 20
"""An engine gives a job back while what computes it is away, which costs no attempt. A job that is given back so often
may itself be what brings that down."""
MAX_KNOWN = 4096
"""Jobs whose counts are kept."""


class ReturnCounts:
    """The counts of one worker."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """By job: how often, and its number of deltas at the last time."""

    def note(self, job_id: str, deltas: int) -> bool:
        """Count one return of a job that has so many deltas. Returns whether it may be tried again."""
        count, before = self._counts.pop(job_id, (0, deltas))
        count = 1 if deltas > before else count + 1
        self._counts[job_id] = count, deltas
        while len(self._counts) > MAX_KNOWN:
            self._counts.popitem(last=False)
        return count <= MAX_RETURNS
