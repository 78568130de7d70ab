"""Delivery times: buffers the times at which answers were sent, and writes them in batches to the jobs' records.

Only `GET /v1/jobs/{id}/timing` shows them. If one is lost, with its process or while the store is unavailable, it is
missing there; nothing else uses it.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from penstock.loops import ExpectedErrors, run_periodically
from streaming.errors import Unavailable
from streaming.ids import partition_of
from streaming.jobs.codec import decode, encode
from streaming.redis.client import RedisClient

log = logging.getLogger(__name__)

WRITE_INTERVAL_S = 0.25
MAX_WAITING = 20_000
MAX_AT_ONCE = 500
"""Entries of one script call, so that it blocks the server for only about half a millisecond."""


class Delivered(msgspec.Struct, frozen=True, array_like=True):
    """When an API process forwarded a job's answer, in microseconds of Redis time, accurate to `clock_us`; 0: never."""

    first_got: int = 0
    first_sent: int = 0
    last_got: int = 0
    last_sent: int = 0
    """`got`: the first token, or the end, came from the worker; `sent`: it was written to the connection."""
    clock_us: int = 0
    whole: bool = False
    """The answer was sent in one piece, so `first_got` and `first_sent` are 0."""


_DELIVERED = msgspec.msgpack.Decoder(Delivered)


def decode_delivered(data: bytes) -> Delivered:
    """Raises DecodeError."""
    return decode(_DELIVERED, data)


class Deliveries:
    """Delivery times of one API process that are not written yet."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._notes: dict[str, Delivered] = {}
        self._noted = asyncio.Event()

    def note(self, job_id: str, delivered: Delivered) -> None:
        """Buffer when the answer of a job was delivered; dropped if MAX_WAITING entries are buffered."""
        if len(self._notes) < MAX_WAITING:
            self._notes[job_id] = delivered
            self._noted.set()

    def of(self, job_id: str) -> Delivered | None:
        """Return an entry that is not written yet, or None."""
        return self._notes.get(job_id)

    async def keep_writing(self) -> None:
        """Write in a loop until cancelled."""
        expected = ExpectedErrors(Unavailable, log.debug, "deliveries are noted later: %s")
        await run_periodically(self._write_noted, 0, expected)

    async def _write_noted(self) -> None:
        """Wait for an entry, then WRITE_INTERVAL_S for others, and write them together. Raises Unavailable."""
        await self._noted.wait()
        await asyncio.sleep(WRITE_INTERVAL_S)
        await self.write()
        self._noted.clear()

    async def write(self) -> None:
        """Write the buffered entries. Raises Unavailable; entries that were not written stay buffered."""
        while batch := self._batch():
            calls: dict[int, list[str | bytes | int]] = {}
            for job_id, delivered in batch.items():
                calls.setdefault(partition_of(job_id) or 0, []).extend((job_id, encode(delivered)))
            await self._client.calls([("deliver", partition, args) for partition, args in calls.items()])
            for job_id in batch:
                del self._notes[job_id]

    def _batch(self) -> dict[str, Delivered]:
        return {job_id: self._notes[job_id] for job_id in list(self._notes)[:MAX_AT_ONCE]}
