"""Media of requests: takes the bytes of images, recordings and documents out of a job's conversation, and checks them.

Whatever a part says of them, the first bytes decide what they are. Long ones are decoded in slices.
"""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any
from urllib.parse import urljoin
from weakref import WeakValueDictionary

from httpcore2 import AsyncConnectionPool, default_ssl_context
from msgspec.structs import replace

from api.openai.errors import ApiError, from_failure, invalid_request, links_in_the_way, payload_too_large
from api.settings import MediaSettings
from penstock.engine import ChatTurn, ModelCard
from penstock.guard import ERRORS, Forbidden, guarded_pool
from streaming.batches.file_store import FileStore
from streaming.batches.store import Files
from streaming.errors import UnknownFile, UnknownJob
from streaming.jobs.job import REFERENCE, SOURCES, Chat, Job, Media, source_of, unsupported
from streaming.jobs.media import MediaLost, MediaStore, StoredMedia, with_source
from streaming.redis.client import RedisClient

SLICE_CHARS = 1 << 18
"""Characters of base64 decoded at once, in half a millisecond; a multiple of four."""
MAX_REDIRECTS = 3
MAX_FETCHES, MAX_FETCHES_OF_TENANT = 16, 4
"""Links that one process follows at a time."""
TEXT = "text/plain"
RECORDINGS = ("audio/wav", "audio/mpeg", "audio/flac", "audio/ogg", "audio/mp4", "audio/webm")
TYPES: Mapping[str, tuple[str, ...]] = {
    "image_url": ("image/png", "image/jpeg", "image/gif", "image/webp"),
    "input_audio": ("audio/wav", "audio/mpeg"),
    "file": ("application/pdf", TEXT),
    **dict.fromkeys(("transcribe", "translate"), RECORDINGS),
    "edit": ("image/png", "image/jpeg", "image/webp"),
}
"""By the type of a part, or the kind of a task, what it may hold."""
SAME = {"image/jpg": "image/jpeg", "wav": "audio/wav", "audio/x-wav": "audio/wav", "audio/wave": "audio/wav",
        "mp3": "audio/mpeg", "audio/mp3": "audio/mpeg"}  # fmt: skip
"""Other names of media types."""


def media_type(data: bytes) -> str:
    """What bytes are, by how they begin; "" if that says nothing."""
    for start, found in (
        (b"\x89PNG\r\n\x1a\n", "image/png"),
        (b"\xff\xd8\xff", "image/jpeg"),
        (b"GIF87a", "image/gif"),
        (b"GIF89a", "image/gif"),
        (b"%PDF-", "application/pdf"),
        (b"ID3", "audio/mpeg"),
        (b"fLaC", "audio/flac"),
        (b"OggS", "audio/ogg"),
        (b"\x1aE\xdf\xa3", "audio/webm"),
    ):
        if data.startswith(start):
            return found
    if data[:4] == b"RIFF":
        return {b"WEBP": "image/webp", b"WAVE": "audio/wav"}.get(data[8:12], "")
    if data[4:8] == b"ftyp":
        return "audio/mp4"
    is_frame = len(data) > 1 and data[0] == 0xFF and data[1] & 0xE6 == 0xE2  # the third layer's sync word
    return "audio/mpeg" if is_frame else ""


async def decoded(text: str, start: int = 0) -> bytes:
    """The bytes of base64 from a place on. Raises ValueError."""
    found = bytearray()
    for at in range(start, len(text), SLICE_CHARS):
        found += binascii.a2b_base64(text[at : at + SLICE_CHARS], strict_mode=True)
        if len(text) > SLICE_CHARS:
            await asyncio.sleep(0)
    return bytes(found)


class LinkError(Exception):
    """Raised with what is wrong with a link."""


class MediaReader:
    """Takes the media of requests of all tenants, within the settings."""

    def __init__(self, settings: MediaSettings, client: RedisClient, file_store: FileStore) -> None:
        self.settings, self.files, self.file_store = settings, Files(client), file_store
        self.stored = MediaStore(client)
        self._fetches, self._fetches_of = asyncio.Semaphore(MAX_FETCHES), WeakValueDictionary[str, asyncio.Semaphore]()

    async def taken(
        self, job: Job, card: ModelCard | None, text_limit: int, size: int = 0
    ) -> tuple[Job, tuple[bytes, ...]]:
        """Return the job with references in place of its media, and these.

        Args:
            text_limit: bytes of the request besides its media. `size`: bytes of the whole.

        Raises:
            ApiError: 400, 413; 503: the links of others are in the way.
            Unavailable: the store does not answer.
        """
        assert isinstance(job.prompt, Chat)
        request = _RequestMedia(self, job, job.prompt.turns, text_limit)
        try:
            turns = [await request.turn(place, turn) for place, turn in enumerate(job.prompt.turns)]
        finally:
            await request.close()
        if size - request.chars + request.text_bytes > text_limit:
            raise payload_too_large(text_limit)
        job = replace(job, prompt=Chat(tuple(turns)), media=tuple(request.kinds))
        if card is not None and (failure := unsupported(job, card)):
            raise from_failure(failure)
        return job, tuple(request.data)

    @cached_property
    def _pool(self) -> AsyncConnectionPool:
        return guarded_pool(self.settings.networks, default_ssl_context())

    async def fetched(self, url: str, tenant: str, has_room: Callable[[int], bool]) -> bytes:
        """What a link leads to. Redirects lead where links may. `has_room`: is told of bytes as they come.

        Raises:
            LinkError, ApiError (503: other links are in the way).
        """
        limit_s, began = self.settings.link_timeout_s, False
        own = self._fetches_of.setdefault(tenant, asyncio.Semaphore(MAX_FETCHES_OF_TENANT))
        try:
            async with asyncio.timeout(limit_s), own, self._fetches:
                began = True
                for _ in range(MAX_REDIRECTS + 1):
                    headers = [("user-agent", "penstock")]
                    async with self._pool.stream("GET", url.encode("ascii"), headers=headers) as response:
                        found = {name.lower(): value for name, value in response.headers}
                        if 300 <= response.status < 400 and b"location" in found:
                            url = urljoin(url, found[b"location"].decode("latin-1"))
                            continue
                        if response.status != 200:
                            raise LinkError(f"could not be fetched: its server answered {response.status}")
                        data = bytearray()
                        async for chunk in response.aiter_stream():
                            data += chunk
                            if not has_room(len(chunk)) or len(data) > self.settings.max_bytes:
                                break
                        return bytes(data)
                raise LinkError(f"leads to more than {MAX_REDIRECTS} redirects")
        except Forbidden:
            raise LinkError("leads to an address that is not public") from None
        except (*ERRORS, ValueError) as error:
            if not began:
                raise links_in_the_way(limit_s) from None
            raise LinkError(f"could not be fetched within {limit_s:g} s ({type(error).__name__})") from None

    def check_size(self, size: int, field: str) -> None:
        """Raises ApiError (400)."""
        if size > self.settings.max_bytes:
            what = f"has more than {self.settings.max_bytes} bytes ([media] max_bytes). Send less"
            raise _refused(field, what)


class _RequestMedia:
    """The media of one request."""

    def __init__(self, reader: MediaReader, job: Job, turns: Sequence[ChatTurn], text_limit: int) -> None:
        self._reader, self._job, self._text_limit = reader, job, text_limit
        self.data: list[bytes] = []
        self.kinds: list[Media] = []
        self.chars = 0
        """Characters of the request that these were."""
        self.text_bytes = 0
        """Bytes of its documents of plain text."""
        self._count = self._linked = 0
        parts = [part for turn in turns for part in turn.parts if part["type"] != "text"][: reader.settings.max_parts]
        links = [link for part in parts if is_link(link := source_of(part))] if reader.settings.links == "fetch" else []
        follow = partial(reader.fetched, tenant=job.tenant, has_room=self._has_room)
        self._links = {link: asyncio.ensure_future(follow(link)) for link in dict.fromkeys(links)}
        """All are followed at once, within the time for one."""

    async def close(self) -> None:
        """Follow its links no further."""
        for link in self._links.values():
            link.cancel()
        await asyncio.gather(*self._links.values(), return_exceptions=True)

    def _has_room(self, more: int) -> bool:
        """Whether its links may bring more bytes, counting these."""
        self._linked += more
        return self._linked <= self._reader.settings.max_request_bytes

    async def turn(self, place: int, turn: ChatTurn) -> ChatTurn:
        """A turn with references. A document of plain text becomes a text of the conversation."""
        if not turn.parts:
            return turn
        parts = [await self._part(part, f"messages[{place}].content[{at}]") for at, part in enumerate(turn.parts)]
        text = "".join([part["text"] for part in parts if part["type"] == "text"])
        has_media = any(part["type"] != "text" for part in parts)
        return replace(turn, content=text, parts=tuple(parts) if has_media else ())

    async def _part(self, part: dict[str, Any], field: str) -> dict[str, Any]:
        kind = part["type"]
        if kind == "text":
            return part
        settings, source = self._reader.settings, source_of(part)
        named = f"{field}.{kind}.{'file_id' if source is None else SOURCES[kind]}"
        field = "input" if self._job.response is not None else "messages" if self._job.message is not None else named
        field = part[kind].get("field", field)
        self._count += 1
        if self._count > settings.max_parts:
            raise _refused(field, f"is one of more than {settings.max_parts} images, recordings and documents "
                                  "([media] max_parts). Send fewer")  # fmt: skip
        if kind == "image_url" and is_link(source) and settings.links == "pass":
            return part
        data, declared, name = await self._bytes(part, source, field)
        if self._linked > settings.max_request_bytes:
            raise self._too_much(self._linked, field)
        found = self._checked(kind if self._job.task is None else self._job.task.kind, data, declared, field)
        if found == TEXT:
            self.text_bytes += len(data)
            if self.text_bytes > self._text_limit:
                raise _refused(field, f"brings the request to more than {self._text_limit} bytes of text. Send less")
            return {"type": "text", "text": data.decode()}
        place = next((at for at, known in enumerate(self.data) if known == data), len(self.data))
        if place == len(self.data):
            self.data.append(data)
            self.kinds.append(Media(found, len(data)))
            if (total := sum(map(len, self.data))) > settings.max_request_bytes:
                raise self._too_much(total, field)
        inner = {each: said for each, said in part[kind].items() if each != "file_id"}
        if name and kind == "file":
            inner.setdefault("filename", name)
        return with_source(part | {kind: inner}, f"{REFERENCE}{place}")

    def _too_much(self, total: int, field: str) -> ApiError:
        what = f"brings the request to {total} bytes of media, and it may have"
        what = f"{what} {self._reader.settings.max_request_bytes} ([media] max_request_bytes)"
        return _refused(field, f"{what}. Send fewer or smaller ones")

    async def _bytes(self, part: dict[str, Any], source: Any, field: str) -> tuple[bytes, str, str]:
        """The bytes of a part, its media type and name, as far as it says them. Raises ApiError (400)."""
        kind, reader = part["type"], self._reader
        inner = part[kind]
        if isinstance(source, bytes):  # of a form
            return source, "", ""
        if isinstance(source, StoredMedia):
            try:
                return (await reader.stored.read(source.job, [source.place]))[0], "", ""
            except (MediaLost, UnknownJob):
                raise _refused(field, "refers to a response whose images are no longer kept. Send them again") from None
        if source is None:
            return await self._of_file(inner["file_id"], field)
        if is_link(source):
            if source not in self._links:
                remedy = "Send its bytes as a data: URL"
                raise _refused(field, f"is a link, and this server fetches none ([media] links). {remedy}")
            try:
                return await self._links[source], "", ""
            except LinkError as error:
                raise _refused(field, str(error)) from None
        start, declared = 0, str(inner.get("format", ""))
        if kind != "input_audio":
            start = source.find(",", 0, 256) + 1
            declared, *options = source[5 : max(5, start - 1)].split(";")
            if not start or "base64" not in options:
                raise _refused(field, "must be a data: URL with base64, such as data:image/png;base64,iVBORw0KGgo=")
        reader.check_size((len(source) - start) // 4 * 3 - 2, field)
        self.chars += len(source)
        try:
            return await decoded(source, start), declared.lower(), ""
        except ValueError:
            raise _refused(field, "is not valid base64") from None

    async def _of_file(self, file_id: str, field: str) -> tuple[bytes, str, str]:
        try:
            file = await self._reader.files.get(file_id, self._job.tenant)
            self._reader.check_size(file.size, field)
            return await asyncio.to_thread(self._reader.file_store.path(file.id).read_bytes), "", file.name
        except (UnknownFile, FileNotFoundError):
            raise _refused(field, "names no file of yours. Upload it to /v1/files") from None

    def _checked(self, kind: str, data: bytes, declared: str, field: str) -> str:
        """The media type of the bytes. Raises ApiError (400)."""
        self._reader.check_size(len(data), field)
        declared = SAME.get(declared, declared)
        found = media_type(data)
        says_text = declared.startswith("text/") or declared in ("", "application/json")
        if kind == "file" and not found and says_text and _is_text(data):
            return TEXT
        if found not in TYPES[kind]:
            raise _refused(field, f"is none of {', '.join(TYPES[kind])}, by its first bytes")
        if declared not in ("", found):
            raise _refused(field, f"says {declared[:64]}, and its first bytes are of {found}. Say what it is")
        return found


def is_link(source: Any) -> bool:
    """Whether the source of a part is a link."""
    return isinstance(source, str) and source.startswith(("http://", "https://"))


def _is_text(data: bytes) -> bool:
    try:
        return "\0" not in data.decode()
    except UnicodeDecodeError:
        return False


def _refused(field: str, what: str) -> ApiError:
    return invalid_request(f"{field} {what}.", field)
