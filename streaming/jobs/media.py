"""Media of jobs: the bytes of images, recordings and documents, which the store keeps beside the records.

In a job's conversation `media:N` stands for the bytes in the place N of Job.media, which are a field of the hash
`media:<id>` of its partition. `put` writes them with the job; they go at its end, unless a replay of a dead letter or a
response that continues it may need them: then they stay as long as its record.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import msgspec

from penstock.engine import ChatTurn
from streaming.errors import StreamingError, UnknownJob
from streaming.jobs.job import REFERENCE, SOURCES, Chat, Job, source_of
from streaming.keys import partition_key
from streaming.redis.client import ClientUser, translated

SLICE_BYTES = 3 << 16
"""Bytes made base64 at once, in a quarter of a millisecond; a multiple of three."""


class MediaLost(StreamingError):
    """Raised when the store no longer has the media of a job."""


class StoredMedia(msgspec.Struct, frozen=True):
    """Stands in a part for bytes of an earlier job of the same tenant. No request can send one: it is no JSON."""

    job: str
    place: int


class MediaStore(ClientUser):
    """Reads media. All methods raise Unavailable, MediaLost."""

    async def read(self, job_id: str, places: Sequence[int]) -> list[bytes]:
        """The bytes in these places of a job's media."""
        partition = self._client.partition_of(job_id, "job_", UnknownJob)
        key = partition_key(partition, "media", job_id)
        with translated():  # not on the shared connection, where long answers hold up others
            redis = self._client.redis
            found = await cast(Awaitable[list[Any]], redis.hmget(key, [str(place) for place in places]))
        if None in found:
            raise MediaLost(f"the store no longer has the media of {job_id}")
        return found

    async def all_of(self, job: Job) -> tuple[bytes, ...]:
        """Everything that is kept beside a job."""
        return tuple(await self.read(job.id, range(len(job.media)))) if job.media else ()

    async def restored(self, job: Job) -> Job:
        """The job with its media in its conversation, as OpenAI's servers take them: as data: URLs, recordings as
        base64 alone."""
        data = await self.all_of(job)
        texts = [await _base64(each) for each in data]
        urls = [f"data:{media.type};base64,{text}" for media, text in zip(job.media, texts, strict=True)]

        def restore(source: str, kind: str) -> str:
            place = int(source.removeprefix(REFERENCE))
            return texts[place] if kind == "input_audio" else urls[place]

        assert isinstance(job.prompt, Chat)
        return msgspec.structs.replace(job, prompt=Chat(turns_with(job.prompt.turns, restore)))


async def _base64(data: bytes) -> str:
    """Let other tasks run between slices."""
    text = ""
    for start in range(0, len(data), SLICE_BYTES):
        text += b64encode(data[start : start + SLICE_BYTES]).decode()
        await asyncio.sleep(0)
    return text


def with_source(part: dict[str, Any], source: Any) -> dict[str, Any]:
    """A part with media whose bytes are there."""
    kind = part["type"]
    return part | {kind: part[kind] | {SOURCES[kind]: source}}


def turns_with(turns: Sequence[ChatTurn], replaced: Callable[[str, str], Any]) -> tuple[ChatTurn, ...]:
    """Turns with other sources in place of their references. `replaced`: gets a reference and the type of its part."""
    return tuple(
        msgspec.structs.replace(turn, parts=tuple([_replaced(part, replaced) for part in turn.parts]))
        if turn.parts
        else turn
        for turn in turns
    )


def _replaced(part: dict[str, Any], replaced: Callable[[str, str], Any]) -> dict[str, Any]:
    source = source_of(part)
    if not isinstance(source, str) or not source.startswith(REFERENCE):
        return part
    return with_source(part, replaced(source, part["type"]))


def borrowed(turns: Sequence[ChatTurn], job_id: str) -> tuple[ChatTurn, ...]:
    """Turns of an earlier job, for a job that continues it."""
    return turns_with(turns, lambda source, _: StoredMedia(job_id, int(source.removeprefix(REFERENCE))))


def text_only(turns: Sequence[ChatTurn]) -> tuple[ChatTurn, ...]:
    """Turns without what is kept, or sent, beside their texts."""
    return tuple(msgspec.structs.replace(turn, parts=()) if turn.parts else turn for turn in turns)
