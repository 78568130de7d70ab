"""Shown waits: remembers what clients were told, so that the estimate of a waiting job does not rise by mere noise."""

from __future__ import annotations

from collections import OrderedDict

from api.openai.wait import Wait

MAX_SHOWN = 10_000
"""Jobs remembered; the one not shown for longest is forgotten first."""


class ShownWaits:
    """The estimate that each waiting job was last shown with, in one process."""

    def __init__(self) -> None:
        self._shown: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """By job: its `eta_ms`, and the jobs that were ahead of it."""

    def settle(self, job_id: str, wait: Wait, ahead: int) -> Wait:
        """Return the wait to show: at most the last one, unless more jobs are ahead of the job than then.

        The upper end of the band is not held down: it shows if the job starts later than it was told.

        Args:
            ahead: Jobs of its own lane and of higher ones that are to start before it.
        """
        shown = self._shown.pop(job_id, None)
        eta_ms = wait.eta_ms if shown is None or ahead > shown[1] else min(wait.eta_ms, shown[0])
        self._shown[job_id] = (eta_ms, ahead)
        if len(self._shown) > MAX_SHOWN:
            self._shown.popitem(last=False)
        return Wait(eta_ms, None if wait.low_ms is None else min(wait.low_ms, eta_ms), wait.high_ms)
