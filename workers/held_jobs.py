"""Held jobs: the jobs that one worker has claimed and not ended, which part of its log they need, and what the store
says of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from streaming.jobs.codec import Frame, in_frames, packed
from streaming.jobs.lease import HeldJob, Lease
from workers.attempt import Attempt

Runs: TypeAlias = set[tuple[str, int]]
"""Jobs, each with the number of its run."""


class HeldJobs:
    """The held jobs of all partitions."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self.attempts: dict[str, Attempt] = {}
        """By job id, oldest first, until their end is written."""
        self._parking: dict[str, Attempt] = {}
        """By job id: jobs that were taken out of the running ones, and that the store has not put back yet."""

    def park(self, job_id: str) -> Attempt:
        """Take a job out of the running ones, while the store puts it back."""
        attempt = self._parking[job_id] = self.attempts.pop(job_id)
        return attempt

    def unpark(self, attempt: Attempt) -> None:
        """The store has put the job back, or another worker has it."""
        if self._parking.get(attempt.job.id) is attempt:
            del self._parking[attempt.job.id]

    def of(self, partition: int) -> list[Attempt]:
        """The held jobs of one partition."""
        return [attempt for attempt in self.attempts.values() if attempt.partition == partition]

    def media_bytes(self) -> int:
        """Bytes of the media of the running jobs."""
        return sum([media.size for attempt in self.attempts.values() for media in attempt.job.media])

    def oldest_frame(self, partition: int) -> int:
        """The first frame that a held job may still need from the log, or one that is being put back."""
        frames = [self._lease.next_frame(partition)]
        for attempt in self._parking.values():
            if attempt.partition == partition:
                frames.append(attempt.first_frame)
        for attempt in self.attempts.values():
            if attempt.partition == partition:
                frames.append(attempt.first_frame)
                if attempt.first_frame == attempt.claim.first_frame:  # no checkpoint was written since
                    break  # they were claimed one after the other: no later one needs more
        return min(frames)

    def parked_frames(self, attempt: Attempt) -> list[Frame]:
        """The deltas of all runs of a held job, as frames for its parked log; none if nothing was generated."""
        rows, openings = attempt.logged(), attempt.openings
        return [
            Frame(self._lease.id, number, packed(len(part), b"".join(part)), openings)
            for number, part in enumerate(in_frames(rows), 1)
        ]

    def holds(self, job_id: str, run_number: int) -> bool:
        attempt = self.attempts.get(job_id) or self._parking.get(job_id)
        return attempt is not None and attempt.run_number == run_number


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
        theirs = {(job_id, job.run_number) for job_id, job in counted.items()}
        found = {(job_id, run_number) for job_id, run_number in theirs if not self._held.holds(job_id, run_number)}
        before, self._strays = self._strays, set() if may_claim else found
        return before & self._strays

    def taken(self, counted: Mapping[str, HeldJob]) -> Runs:
        """Held jobs that the store does not count as the worker's: it has lost their claim."""
        kept = {(job_id, job.run_number) for job_id, job in counted.items()}
        ours = {(each.job.id, each.run_number) for each in self._held.of(self._partition) if not each.over}
        before, self._taken = self._taken, ours - kept
        return before & self._taken
