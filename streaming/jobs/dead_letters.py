"""Dead letters: malformed entries, and jobs given up after lost workers, for operators to list, replay or drop."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from streaming.errors import MalformedJob, UnknownJob
from streaming.ids import partition_of, replay_job_id
from streaming.jobs.job import Job
from streaming.jobs.queue import Accepted, Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.records import JobRecord
from streaming.jobs.settings import NO_WEIGHTS
from streaming.keys import parse_lane, partition_key
from streaming.redis.client import RedisClient

MAX_LETTERS = 20_000
"""More than a partition keeps (`dead_letter` in streaming/lua/shared/waiting.lua)."""
LETTER_ID = re.compile(r"([0-9]{1,3})-([0-9]{1,15}-[0-9]{1,10})")


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A dead letter. `job`: the id of a job given up; without one, `lane` and `entry` name a malformed entry.

    `lane` is model:priority, or the key of what is no lane.
    """

    id: str
    reason: str
    at_ms: int
    job: str = ""
    lane: str = ""
    entry: str = ""


class DeadLetters:
    """Dead letters in the store. Stateless; many may share a client. Every method raises Unavailable."""

    def __init__(self, client: RedisClient, weights: Mapping[str, float] = NO_WEIGHTS) -> None:
        """`weights`: of tenants, for replays."""
        self._client, self._reader, self._queue = client, JobReader(client), Queue(client, weights=weights)

    async def recent(self, limit: int) -> list[DeadLetter]:
        """List the dead letters of all partitions, newest first."""
        found = []
        for partition in self._client.partitions:
            found += [_letter(partition, *entry) for entry in await self._newest(partition, limit)]
        return sorted(found, key=lambda letter: letter.at_ms, reverse=True)[:limit]

    async def get(self, letter_id: str) -> DeadLetter:
        """Read one dead letter, by its id or by that of its job. Raises UnknownJob."""
        if (partition := partition_of(letter_id)) is not None and partition in self._client.partitions:
            return await self._of_job(partition, letter_id)
        partition, entry = self._place(letter_id)
        entries = await self._client.call("XRANGE", partition, partition_key(partition, "dead"), entry, entry)
        if not entries:
            raise UnknownJob(letter_id)
        return _letter(partition, *entries[0])

    async def _of_job(self, partition: int, job_id: str) -> DeadLetter:
        """The newest letter of a job. Raises UnknownJob."""
        for entry in await self._newest(partition, MAX_LETTERS):
            if (letter := _letter(partition, *entry)).job == job_id:
                return letter
        raise UnknownJob(job_id)

    async def drop(self, letter_id: str) -> None:
        """Delete a dead letter by its id. Raises UnknownJob."""
        partition, entry = self._place(letter_id)
        if not await self._client.call("XDEL", partition, partition_key(partition, "dead"), entry):
            raise UnknownJob(letter_id)

    async def replay(self, letter_id: str) -> Accepted:
        """Put a copy of its job as a new job; the old one stays ended. Idempotent: repeated replays give one new job.

        Raises UnknownJob (the letter, or the job it names, is no longer kept), MalformedJob, LaneFull.
        """
        letter = await self.get(letter_id)
        record = await self._reader.record(letter.job)
        if record.fault:
            raise MalformedJob(record.fault)
        accepted = await self._queue.put(_again(record, replay_job_id(letter.id, letter.job)))
        with contextlib.suppress(UnknownJob):  # a concurrent replay, which gives the same job, has dropped it
            await self.drop(letter.id)
        return accepted

    async def _newest(self, partition: int, count: int) -> list[Any]:
        """Entries, the newest first."""
        key = partition_key(partition, "dead")
        entries: list[Any] = await self._client.call("XREVRANGE", partition, key, "+", "-", "COUNT", count)
        return entries

    def _place(self, letter_id: str) -> tuple[int, str]:
        match = LETTER_ID.fullmatch(letter_id)
        if match is None or int(match[1]) not in self._client.partitions:
            raise UnknownJob(letter_id)
        return int(match[1]), match[2]


def _letter(partition: int, entry: bytes, fields: Sequence[bytes]) -> DeadLetter:
    texts = [field.decode(errors="replace") for field in fields]
    words = dict(zip(texts[::2], texts[1::2], strict=True))
    lane = words.get("lane", "")
    with contextlib.suppress(ValueError, IndexError):  # no lane's key
        lane = ":".join(parse_lane(lane))
    return DeadLetter(
        id=f"{partition}-{entry.decode()}",
        reason=words.get("reason", ""),
        at_ms=int(entry.split(b"-")[0]),
        job=words.get("job", ""),
        lane=lane,
        entry=words.get("entry", ""),
    )


def _again(record: JobRecord, job_id: str) -> Job:
    """The job as a new one, which remembers the attempts at the old one. A turn of a conversation is over with the old
    job: the new one has its prompt, and adds nothing to it."""
    form = record.job.response
    fresh: Job = msgspec.structs.replace(
        record.job,
        id=job_id,
        reply_to="",
        stream=False,
        deadline_ms=None,
        max_queue_ms=None,
        received_us=0,
        past=record.attempts,
        response=form and msgspec.structs.replace(form, conversation=""),
    )
    return fresh
