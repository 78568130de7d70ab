"""Control listener: obeys the messages by which other processes steer a worker and its jobs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from penstock.loops import ExpectedErrors, run_periodically
from streaming.errors import Unavailable
from streaming.jobs.control import Cancel, Control, Cordon, Follow, Hold, Wake
from streaming.jobs.lease import Lease
from workers.claimer import Claimer
from workers.held_jobs import HeldJobs

log = logging.getLogger(__name__)


class ControlListener:
    """Listener of one worker. An interruption may lose messages: then polling finds the jobs, the heartbeat finds the
    cancels, and readers ask again."""

    def __init__(
        self,
        lease: Lease,
        held: HeldJobs,
        claimer: Claimer,
        room: asyncio.Event,
        retry_delay_s: float,
        *,
        on_cancelled: Callable[[str, str], None],
        on_cordon: Callable[[str], None],
    ) -> None:
        """
        Args:
            room: set on a wake-up, so that the claimer looks for jobs.
            on_cancelled: called with the id of a job, and who cancelled it.
            on_cordon: called with the reason.
        """
        self._lease, self._held, self._claimer, self._room = lease, held, claimer, room
        self._retry_delay_s, self._on_cancelled, self._on_cordon = retry_delay_s, on_cancelled, on_cordon

    async def keep_listening(self) -> None:
        """Obey until cancelled; subscribe again after an interruption."""
        expected = ExpectedErrors(Unavailable, log.warning, "control channel interrupted, subscribing again: %s")
        await run_periodically(self._listen, self._retry_delay_s, expected)

    async def _listen(self) -> None:
        async for control in self._lease.controls():
            self.obey(control)

    def obey(self, control: Control) -> None:
        """Obey one message."""
        match control:
            case Wake():
                self._room.set()
            case Cancel(job_id, by):
                self._on_cancelled(job_id, by)
            case Follow(job_id, address):
                if attempt := self._held.attempts.get(job_id):
                    attempt.follow(address)
                else:
                    self._claimer.note_follow(job_id, address)
            case Cordon(reason):
                self._on_cordon(reason)
            case Hold(for_ms):
                self._claimer.hold(for_ms)
