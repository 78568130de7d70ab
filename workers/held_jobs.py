"""Held jobs: the jobs that one worker has claimed and not ended, and which part of its log they need."""

from __future__ import annotations

from streaming.jobs.codec import MAX_ROWS_PER_FRAME, Frame, packed
from streaming.jobs.lease import Lease
from workers.attempt import Attempt
from workers.slot_shares import MAX_PARKED_DELTAS


class HeldJobs:
    """The held jobs of all partitions."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self.attempts: dict[str, Attempt] = {}
        """By job id, oldest first, until their end is written."""
        self._parking: dict[str, Attempt] = {}
        """By job id: jobs that were taken out of the running ones, and that the store has not put back yet; in a drain,
        all that are handed back."""

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

    def oldest_frame(self, partition: int) -> int:
        """The first frame that a held job may still need from the log, or one that is being put back."""
        parking = [each.first_frame for each in self._parking.values() if each.partition == partition]
        oldest = min([self._lease.next_frame(partition), *parking])
        for attempt in self.attempts.values():
            if attempt.partition == partition:
                oldest = min(oldest, attempt.first_frame)
                if not attempt.is_checkpointed:
                    break  # they were claimed one after the other: no later one needs more
        return oldest

    def parked_frames(self, attempt: Attempt) -> list[Frame]:
        """The deltas of all runs of a held job, as frames for its parked log; none if nothing was generated, or so much
        that the log of a worker that leaves is kept for it instead."""
        if attempt.seq > MAX_PARKED_DELTAS:
            return []
        rows, openings = attempt.logged(), attempt.openings
        parts = [rows[first : first + MAX_ROWS_PER_FRAME] for first in range(0, len(rows), MAX_ROWS_PER_FRAME)]
        return [
            Frame(self._lease.id, number, packed(len(part), b"".join(part)), openings)
            for number, part in enumerate(parts, 1)
        ]

    def holds(self, job_id: str, number: int) -> bool:
        attempt = self.attempts.get(job_id) or self._parking.get(job_id)
        return attempt is not None and attempt.number == number
