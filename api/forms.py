"""POST /v1/audio/transcriptions, /v1/audio/translations and /v1/images/edits: forms with files, which become jobs."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from api.admission import LARGE_BYTES, Admitted, accept, header, hold, prepare, read_request
from api.chat import JobEndpoint
from api.openai import errors
from api.openai.schemas import FormRequest, Kind
from api.services import Services
from api.stream.reply import WholeReply
from streaming.jobs.codec import Delta, Terminal

MAX_FILES, MAX_FIELDS = 16, 64
MAX_OVERHEAD_BYTES = 64 * 1024
"""Bytes of a body besides its files."""
PLAIN = ("text", "srt", "vtt")
"""Formats of transcripts that are no JSON."""


async def admit_form(services: Services, scope: Scope, receive: Receive, kind: Kind, *, waits: bool) -> Admitted:
    """As `admit`, for a form. A repeated one is known by its fields and files: clients draw a boundary each time."""
    fields, files = await _read(Request(scope, receive), services.media_settings.max_request_bytes + MAX_OVERHEAD_BYTES)
    body = msgspec.json.encode(fields)
    asked = read_request(services, scope["state"], kind, body)
    assert isinstance(asked, FormRequest)
    errors.refuse_if(not files, "image" if kind == "image_edit" else "file", "is required")
    asked.attach(files)
    prepared = prepare(services, scope["state"]["caller"], asked, waits=waits)
    if header(scope, b"idempotency-key"):
        body += msgspec.msgpack.encode([_named(**part["file"]) for part in files])
    return await accept(services, scope, prepared, body, waits=waits)


def _named(file_data: bytes, filename: str, field: str) -> tuple[str, str, bytes]:
    return field, filename, hashlib.sha256(file_data).digest()


class FormReply(WholeReply):
    """Sends a transcript that is no JSON as it is."""

    @property
    def _is_plain(self) -> bool:
        return self._job.task is not None and self._job.task.options.get("response_format") in PLAIN

    async def _whole(self, terminal: Terminal, rows: list[Delta]) -> bytes:
        body = await super()._whole(terminal, rows)
        return str(msgspec.json.decode(body)["text"]).encode() if self._is_plain else body

    async def _send(self, send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
        kind = {"content-type": "text/plain; charset=utf-8"} if status == 200 and self._is_plain else {}
        await super()._send(send, status, body, headers | kind)


class FormEndpoint(JobEndpoint):
    """As JobEndpoint, for a request that is a form."""

    admit, whole = staticmethod(admit_form), FormReply


class _Parser(MultiPartParser):
    """Keeps files in memory, which `hold` counts, and knows whether the last boundary came."""

    spool_max_size, ended = 0, False  # 0: no file on a disk, whatever its size

    def on_end(self) -> None:
        self.ended = True


async def _read(request: Request, limit: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The fields of a form, those named `x[]` as the list x, and its files as parts of a turn. Raises ApiError."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise errors.unsupported_upload()

    async def stream() -> AsyncGenerator[bytes, None]:
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise errors.payload_too_large(limit, "[media] max_request_bytes")
            if size > LARGE_BYTES:
                hold(request.scope, size)
            yield chunk
        if not parser.ended:
            raise errors.invalid_request("The body ends before its last part does.")

    fields, files = dict[str, Any](), list[dict[str, Any]]()
    parser = _Parser(request.headers, stream(), max_files=MAX_FILES, max_fields=MAX_FIELDS)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise errors.invalid_request(f"The body is not valid multipart/form-data: {error.message}.") from None
    try:
        for name in form:
            texts = [each for each in form.getlist(name) if isinstance(each, str)]
            for each in form.getlist(name):
                if isinstance(each, UploadFile):
                    own = {"file_data": await each.read(), "filename": (each.filename or name)[:255]}
                    files.append({"type": "file", "file": own | {"field": name[:64]}})
            if texts:
                plain = name.removesuffix("[]")
                errors.refuse_if(plain in fields or (len(texts) > 1 and plain == name), name[:64], "is given twice")
                fields[plain] = texts if plain != name else texts[0]
    finally:
        await form.close()
    return fields, files
