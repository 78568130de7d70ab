"""Deaths by job: how often in a row each worker of this machine has died running the same job.

A worker that completes a job begins anew: it does not die of each one. A job that kills its workers is given up after
`redis.max_attempts` of them at the latest; this counts what happens before, and on this machine alone.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

MIN_DEATHS = 3
"""From this death on, the job is named."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """The jobs that a worker ran each time that it died."""

    times: int
    jobs: tuple[str, ...]
    given_up: bool = False
    """Whether all of them are dead letters now."""

    def sentence(self, worker: str) -> str:
        """Say it of the worker of this name."""
        return f"{worker} died {self.times} times running job{'s' * (len(self.jobs) > 1)} {', '.join(self.jobs)}"


class JobDeaths:
    """The counts of one machine, by worker and job."""

    def __init__(self) -> None:
        self._deaths: dict[str, dict[str, int]] = {}

    def died(self, worker: str, jobs: Collection[str], given_up: Collection[str] = ()) -> Suspicion | None:
        """Count a death, while the worker ran `jobs`. Returns whom to suspect; None before MIN_DEATHS.

        Args:
            given_up: those of the jobs that no worker runs again; they are counted no further.
        """
        before = self._deaths.get(worker, {})
        counts = {job: before.get(job, 0) + 1 for job in jobs}
        found = _suspicion(counts, given_up)
        self._deaths[worker] = {job: count for job, count in counts.items() if job not in given_up}
        return found

    def begin_anew(self, worker: str) -> None:
        """Begin anew with a worker, which has completed a job or is gone."""
        self._deaths.pop(worker, None)

    def suspected(self, worker: str) -> Suspicion | None:
        """Whom to suspect of the deaths of a worker so far, of the jobs that are not given up."""
        return _suspicion(self._deaths.get(worker, {}), ())


def _suspicion(counts: dict[str, int], given_up: Collection[str]) -> Suspicion | None:
    """The jobs of most deaths; of these only those given up, if there are such: the others ran beside them."""
    times = max(counts.values(), default=0)
    if times < MIN_DEATHS:
        return None
    jobs = [job for job, count in counts.items() if count == times]
    dead = [job for job in jobs if job in given_up]
    return Suspicion(times, tuple(dead or jobs), bool(dead))
