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
from streaming.jobs.media import MediaLost, MediaStore
from streaming.jobs.queue import Accepted, Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.records import JobRecord
from streaming.jobs.settings import NO_WEIGHTS
from streaming.keys import parse_lane, partition_key
from streaming.redis.client import RedisClient

LETTERS_PER_READ = 500
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
        self._media = MediaStore(client)

    async def recent(self, limit: int) -> list[DeadLetter]:
        """List the dead letters of all partitions, newest first."""
        found = []
        for partition in self._client.partitions:
            entries = await self._newest(partition, "+", limit)
            found += [_letter(partition, entry, fields) for entry, fields in entries]
        return sorted(found, key=lambda letter: letter.at_ms, reverse=True)[:limit]

    async def get(self, letter_id: str) -> DeadLetter:
        """Read one dead letter, by its id or by that of its job. Raises UnknownJob."""
        if (partition := partition_of(letter_id)) is not None and partition in self._client.partitions:
            return await self._of_job(partition, letter_id)
        partition, entry = self._entry_of(letter_id)
        entries = await self._client.call("XRANGE", partition, partition_key(partition, "dead"), entry, entry)
        if not entries:
            raise UnknownJob(letter_id)
        return _letter(partition, *entries[0])

    async def _of_job(self, partition: int, job_id: str) -> DeadLetter:
        """The newest letter of a job. Raises UnknownJob."""
        last = "+"
        while last:
            entries = await self._newest(partition, last, LETTERS_PER_READ)
            for letter in [_letter(partition, *each) for each in entries]:
                if letter.job == job_id:
                    return letter
            last = f"({entries[-1][0].decode()}" if len(entries) == LETTERS_PER_READ else ""
        raise UnknownJob(job_id)

    async def drop(self, letter_id: str) -> None:
        """Delete a dead letter by its id. Raises UnknownJob."""
        partition, entry = self._entry_of(letter_id)
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
        job = _again(record, replay_job_id(letter.id, letter.job))
        try:
            media = await self._media.all_of(record.job)
        except MediaLost as error:
            raise MalformedJob(str(error)) from None
        accepted = await self._queue.put(job, caller=record.caller, media=media)
        with contextlib.suppress(UnknownJob):  # a concurrent replay, which gives the same job, has dropped it
            await self.drop(letter.id)
        return accepted

    async def _newest(self, partition: int, last: str, count: int) -> list[Any]:
        """Entries up to `last`, the newest first."""
        key = partition_key(partition, "dead")
        entries: list[Any] = await self._client.call("XREVRANGE", partition, key, last, "-", "COUNT", count)
        return entries

    def _entry_of(self, letter_id: str) -> tuple[int, str]:
        match = LETTER_ID.fullmatch(letter_id)
        if match is None or int(match[1]) not in self._client.partitions:
            raise UnknownJob(letter_id)
        return int(match[1]), match[2]


def _letter(partition: int, entry: bytes, fields: Sequence[bytes]) -> DeadLetter:
    texts = [field.decode(errors="replace") for field in fields]
    words = dict(zip(texts[::2], texts[1::2], strict=True))
    return DeadLetter(
        id=f"{partition}-{entry.decode()}",
        reason=words.get("reason", ""),
        at_ms=int(entry.split(b"-")[0]),
        job=words.get("job", ""),
        lane=_lane_name(words.get("lane", "")),
        entry=words.get("entry", ""),
    )


def _lane_name(key: str) -> str:
    """A lane's key as model:priority; any other key as it is."""
    with contextlib.suppress(ValueError, IndexError):
        return ":".join(parse_lane(key))
    return key


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
        not_before_ms=None,
        delay_ms=None,
        received_us=0,
        past=record.attempts,
        response=form and msgspec.structs.replace(form, conversation=""),
    )
    return fresh
