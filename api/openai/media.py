"""Media of requests: takes the bytes of images, recordings and documents out of a job's conversation, and checks them.

Whatever a part says of them, the first bytes decide what they are. Long ones are decoded in slices.
"""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import Mapping
from functools import cached_property
from typing import Any
from urllib.parse import urljoin

from httpcore2 import AsyncConnectionPool, default_ssl_context
from msgspec.structs import replace

from api.openai.errors import ApiError, from_failure, invalid_request, payload_too_large
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
MAX_FETCHES = 16
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


class MediaReader:
    """Takes the media of requests of all tenants, within the settings."""

    def __init__(self, settings: MediaSettings, client: RedisClient, file_store: FileStore) -> None:
        self.settings, self.files, self.file_store = settings, Files(client), file_store
        self.stored = MediaStore(client)
        self._fetches = asyncio.Semaphore(MAX_FETCHES)

    async def taken(
        self, job: Job, card: ModelCard | None, text_limit: int | None = None, size: int = 0
    ) -> tuple[Job, tuple[bytes, ...]]:
        """Return the job with references in place of its media, and these.

        Args:
            text_limit: bytes of the request besides its media; None: any number. `size`: bytes of the whole.

        Raises:
            ApiError: 400, 413.
            Unavailable: the store does not answer.
        """
        request = _RequestMedia(self, job)
        assert isinstance(job.prompt, Chat)
        turns = [await request.turn(place, turn) for place, turn in enumerate(job.prompt.turns)]
        if text_limit is not None and size - request.chars > text_limit:
            raise payload_too_large(text_limit)
        job = replace(job, prompt=Chat(tuple(turns)), media=tuple(request.kinds))
        if card is not None and (failure := unsupported(job, card)):
            raise from_failure(failure)
        return job, tuple(request.data)

    @cached_property
    def _pool(self) -> AsyncConnectionPool:
        return guarded_pool(self.settings.networks, default_ssl_context())

    async def fetched(self, url: str, field: str) -> bytes:
        """What a link leads to. Redirects lead where links may. Raises ApiError (400)."""
        limit_s = self.settings.link_timeout_s
        try:
            async with self._fetches, asyncio.timeout(limit_s):
                for _ in range(MAX_REDIRECTS + 1):
                    async with self._pool.stream("GET", url, headers=[("user-agent", "penstock")]) as response:
                        headers = {name.lower(): value for name, value in response.headers}
                        if 300 <= response.status < 400 and b"location" in headers:
                            url = urljoin(url, headers[b"location"].decode("latin-1"))
                            continue
                        if response.status != 200:
                            raise _refused(field, f"could not be fetched: its server answered {response.status}")
                        data = bytearray()
                        async for chunk in response.aiter_stream():
                            data += chunk
                            self.check_size(len(data), field)
                        return bytes(data)
                raise _refused(field, f"leads to more than {MAX_REDIRECTS} redirects")
        except Forbidden:
            raise _refused(field, "leads to an address that is not public") from None
        except ERRORS as error:
            raise _refused(field, f"could not be fetched within {limit_s:g} s ({type(error).__name__})") from None

    def check_size(self, size: int, field: str) -> None:
        """Raises ApiError (400)."""
        if size > self.settings.max_bytes:
            what = f"has more than {self.settings.max_bytes} bytes ([media] max_bytes). Send less"
            raise _refused(field, what)


class _RequestMedia:
    """The media of one request."""

    def __init__(self, reader: MediaReader, job: Job) -> None:
        self._reader, self._job = reader, job
        self.data: list[bytes] = []
        self.kinds: list[Media] = []
        self.chars = 0
        """Characters of the request that these were."""
        self._count = 0

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
        if isinstance(source, str) and kind == "image_url" and source.startswith("http") and settings.links == "pass":
            return part
        data, declared, name = await self._bytes(part, source, field)
        found = self._checked(kind if self._job.task is None else self._job.task.kind, data, declared, field)
        if found == TEXT:
            return {"type": "text", "text": data.decode()}
        place = next((at for at, known in enumerate(self.data) if known == data), len(self.data))
        if place == len(self.data):
            self.data.append(data)
            self.kinds.append(Media(found, len(data)))
            if (total := sum(map(len, self.data))) > settings.max_request_bytes:
                what = f"brings the request to {total} bytes of media, and it may have {settings.max_request_bytes}"
                raise _refused(field, f"{what} ([media] max_request_bytes). Send fewer or smaller ones")
        inner = {each: said for each, said in part[kind].items() if each != "file_id"}
        if name and kind == "file":
            inner.setdefault("filename", name)
        return with_source(part | {kind: inner}, f"{REFERENCE}{place}")

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
        if source.startswith(("http://", "https://")):
            if reader.settings.links != "fetch":
                remedy = "Send its bytes as a data: URL"
                raise _refused(field, f"is a link, and this server fetches none ([media] links). {remedy}")
            return await reader.fetched(source, field), "", ""
        start, declared = 0, str(inner.get("format", ""))
        if kind != "input_audio":
            start = source.find(",", 0, 256) + 1
            declared, *options = source[5 : max(5, start - 1)].split(";")
            if not start or "base64" not in options:
                raise _refused(field, "must be a data: URL with base64, such as data:image/png;base64,iVBO...")
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


def _is_text(data: bytes) -> bool:
    try:
        return "\0" not in data.decode()
    except UnicodeDecodeError:
        return False


def _refused(field: str, what: str) -> ApiError:
    return invalid_request(f"{field} {what}.", field)
