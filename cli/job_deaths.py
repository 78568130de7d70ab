"""Deaths by job: how often in a row the workers of this machine have died running the same job.

A worker that completes a job begins anew: it does not die of each one. A job that kills its workers is given up after
`redis.max_attempts` of them; this counts what happens before, and on this machine alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from penstock.text import counted

if TYPE_CHECKING:
    from streaming.jobs.records import JobRecord

MIN_DEATHS = 3
"""From this death on, the job is named."""


class Suspicion(msgspec.Struct, frozen=True):
    """Jobs, and the workers that died running them."""

    jobs: tuple[str, ...]
    deaths: dict[str, int]
    """By worker."""
    given_up: bool = False
    """Whether the jobs are dead letters now."""

    @property
    def sentence(self) -> str:
        return f"{deaths_of(self.deaths)} running job{'s' * (len(self.jobs) > 1)} {', '.join(self.jobs)}"


def deaths_of(deaths: Mapping[str, int]) -> str:
    """How often each worker died, in words."""
    return ", ".join(f"{worker} died {counted(times, 'time')}" for worker, times in deaths.items())


def fates_of(records: Iterable[JobRecord | None], worker: str) -> Counter[str]:
    """Count what became of jobs that a worker (`worker-1@host`) left when it was lost."""
    return Counter(_fate(record, worker) for record in records if record is not None)


def _fate(record: JobRecord, worker: str) -> str:
    lost = [
        run for run, attempt in record.attempts_by_run.items() if (attempt.worker, attempt.outcome) == (worker, "lost")
    ]
    if record.state == "queued":
        return "waiting"
    if record.state.final and record.state != "completed":
        return str(record.state)
    went_on = not lost or lost[-1] in {logged.run for logged in record.runs}
    return "continued" if went_on else "begun again"


def in_words(fates: Mapping[str, int]) -> str:
    """The counts of jobs, the most wanted first; "" for none."""
    order = ("continued", "begun again", "waiting", "cancelled", "expired", "failed")
    found = [fate for fate in order if fates.get(fate)]
    return ", ".join(
        f"{f'{fates[fate]}' if at else counted(fates[fate], 'job')} {fate}" for at, fate in enumerate(found)
    )


class JobDeaths:
    """The counts of one machine."""

    def __init__(self) -> None:
        self._deaths: dict[str, dict[str, int]] = {}
        """By job and worker."""

    def died(self, worker: str, jobs: Collection[str], given_up: Collection[str] = ()) -> Suspicion | None:
        """Count a death, while the worker ran `jobs`. Returns whom to suspect; None before MIN_DEATHS.

        Args:
            given_up: those of the jobs that no worker runs again: they are suspected now, and counted no further.
        """
        self._forget(worker, jobs)
        for job in jobs:
            deaths = self._deaths.setdefault(job, {})
            deaths[worker] = deaths.get(worker, 0) + 1
        found = self._suspicion(given_up, given_up=True) or self._suspicion(self._named(jobs))
        for job in given_up:
            self._deaths.pop(job, None)
        return found

    def begin_anew(self, worker: str) -> None:
        """Forget the deaths of a worker, which has completed a job or is gone."""
        self._forget(worker, ())

    @property
    def suspected(self) -> Suspicion | None:
        """Whom to suspect of the deaths so far, of the jobs that are not given up."""
        return self._suspicion(self._named(self._deaths))

    def _named(self, jobs: Collection[str]) -> list[str]:
        """Those of the jobs with enough deaths, most deaths first."""
        totals = {job: sum(self._deaths[job].values()) for job in jobs}
        return sorted((job for job in jobs if totals[job] >= MIN_DEATHS), key=totals.__getitem__, reverse=True)

    def _suspicion(self, jobs: Collection[str], *, given_up: bool = False) -> Suspicion | None:
        """The first of the jobs, and those that ran with it each time."""
        for first in jobs:
            deaths = self._deaths[first]
            return Suspicion(tuple(job for job in jobs if self._deaths[job] == deaths), dict(deaths), given_up)
        return None

    def _forget(self, worker: str, but: Collection[str]) -> None:
        for job in [job for job in self._deaths if job not in but]:
            self._deaths[job].pop(worker, None)
            if not self._deaths[job]:
                del self._deaths[job]
