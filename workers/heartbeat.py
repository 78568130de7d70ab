"""What a worker learns from the store as it beats: jobs that are not where it thinks, and peers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NoReturn, TypeAlias

from penstock.loops import ExpectedErrors, run_periodically
from streaming.errors import Unavailable
from streaming.fleet.process import HEARTBEAT_INTERVAL_S, Process
from streaming.fleet.processes import Fleet
from streaming.jobs.lease import HeldJob
from workers.held_jobs import HeldJobs

log = logging.getLogger(__name__)

Runs: TypeAlias = set[tuple[str, int]]
"""Jobs, each with the number of its run."""


class BeatComparison:
    """Compares the jobs that the worker holds in one partition with those that the store counts as its own. Only what
    two heartbeats in a row have found is certain: the first may have been answered while a claim or an end was."""

    def __init__(self, held: HeldJobs, partition: int) -> None:
        self._held, self._partition = held, partition
        self._strays: Runs = set()
        self._taken: Runs = set()

    def strays(self, counted: Mapping[str, HeldJob], *, may_claim: bool) -> Runs:
        """Jobs that the store counts as the worker's, and of which it knows nothing: the reply to their claim was lost.
        `may_claim`: a claim is in flight, which may bring them."""
        found = {(job_id, job.number) for job_id, job in counted.items() if not self._held.holds(job_id, job.number)}
        before, self._strays = self._strays, set() if may_claim else found
        return before & self._strays

    def taken(self, counted: Mapping[str, HeldJob]) -> Runs:
        """Held jobs that the store does not count as the worker's: it has lost their claim."""
        kept = {(job_id, job.number) for job_id, job in counted.items()}
        ours = {(each.job.id, each.number) for each in self._held.of(self._partition) if not each.over}
        before, self._taken = self._taken, ours - kept
        return before & self._taken


def peers_of(me: Process, others: list[Process]) -> int:
    """How many workers of the same pool may run requests, this one included. Those that start run none yet, and those
    that drain still do."""
    lives = {
        each.life for each in others if (each.model, each.shape) == (me.model, me.shape) and each.state != "starting"
    }
    return len(lives | {me.life})


async def keep_counting(fleet: Fleet, me: Process, share: Callable[[int], None]) -> NoReturn:
    """Call `share` with the number of peers every few seconds; while the store does not answer, the last one stays."""

    async def count() -> None:
        share(peers_of(me, await fleet.processes("worker")))

    expected = ExpectedErrors(Unavailable, log.warning, "the other workers cannot be counted: %s", once=True)
    await run_periodically(count, HEARTBEAT_INTERVAL_S, expected)
