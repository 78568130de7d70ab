"""/v1/files: upload, list, show, read and delete files, compatible with OpenAI's files API.

An upload is streamed to disk in blocks, and its limits are enforced while it is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from api.admission import caller_of, services_of, withdraw
from api.auth.keys import Caller
from api.jobs import as_json, as_page
from api.openai import errors
from api.openai.batch_lines import MAX_EXPIRY_S, MIN_EXPIRY_S
from api.query import value_of, whole_number
from api.services import Services
from streaming.batches.file_store import FileStore, Incoming
from streaming.batches.store import Batch, StoredFile
from streaming.errors import QuotaExceeded, UnknownFile

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

BATCH, PURPOSES = "batch", ("batch", "user_data", "vision", "assistants")
"""What a file is for: the input of batches; the others all mean parts of messages."""
MAX_FILES_PER_PAGE = 10_000
DISK_FULL = "the disk that holds files is full"
RECORDS_PER_CALL = 500


async def create(request: Request) -> Response:
    """Upload a file.

    POST /v1/files: store the upload on disk and return the file object.
    """
    services, caller = services_of(request), caller_of(request)
    if services.refusal:
        raise errors.store_full(services.refusal)
    length = request.headers.get("content-length", "")
    limits = await file_limits(services, caller)
    with _allowance(services, caller.tenant, limits) as allowance:
        allowance.check_length(int(length) if length.isdecimal() else 0)
        kind = request.headers.get("content-type", "")
        idle_timeout_s = services.settings.send_timeout_s
        await asyncio.to_thread(services.file_store.claim, services.store.deployment)
        upload = await receive(request.stream(), kind, services.file_store, allowance, idle_timeout_s)
        file = await _keep(services, caller.tenant, upload, limits.quota)
    return as_json(file_object(file))


async def keep_input(services: Services, batch: Batch, data: bytes, limits: FileLimits) -> None:
    """Give a batch an input that is no upload; it counts in the quota as soon as the batch is accepted. Raises ApiError
    (413, 503)."""
    limits = limits._replace(quota=None)
    with _allowance(services, batch.tenant, limits) as allowance:
        allowance.take(len(data))
        await asyncio.to_thread(services.file_store.claim, services.store.deployment)
        await asyncio.to_thread(services.file_store.begin_work, batch.id, batch.input_file, data=data)


@contextlib.contextmanager
def _allowance(services: Services, tenant: str, limits: FileLimits) -> Iterator[Allowance]:
    """Reserve the bytes of a file while they come. Raises ApiError if there is no room for them."""
    try:
        with Allowance(services.receiving_bytes, tenant, services.files_settings.size_limit, limits) as allowance:
            yield allowance
    except QuotaExceeded as error:
        raise errors.quota_exceeded(error, "file") from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise errors.store_full(DISK_FULL) from None


async def _keep(services: Services, tenant: str, upload: Upload, limit: int | None) -> StoredFile:
    """Keep an upload; on an error remove all of it. Raises ApiError (400), QuotaExceeded, OSError, Unavailable."""
    incoming = upload.incoming
    try:
        if incoming is None:
            raise errors.invalid_request("The body must have a part named 'file'.", "file")
        purpose, max_lines = upload.fields.get("purpose", ""), services.batch_settings.max_lines
        if purpose not in PURPOSES:
            what = "for the input of batches, 'user_data' for images and documents of messages"
            raise errors.invalid_request(f"purpose must be {BATCH!r} {what}.", "purpose")
        if purpose == BATCH and upload.lines > max_lines:
            raise errors.invalid_request(
                f"The file has more than {max_lines} lines, the most one batch may have.", "file"
            )
        now_ms = await services.store_client.now_ms()
        file = StoredFile(
            id=services.files.new_id(tenant),
            tenant=tenant,
            name=upload.name,
            size=incoming.size,
            purpose=purpose,
            created_ms=now_ms,
            expires_ms=now_ms + 1000 * _keep_s(upload, services.files_settings.retention_s),
        )
        await asyncio.to_thread(services.file_store.keep, incoming, file.id)
    finally:
        if incoming is not None:
            incoming.discard()
    try:
        await services.files.put(file, limit)
    except QuotaExceeded:
        await asyncio.to_thread(services.file_store.remove, file.id)
        raise
    except BaseException:  # the store may have the record: remove it first, then the bytes
        services.spawn(withdraw(partial(_drop, services, file)))
        raise
    return file


async def _drop(services: Services, file: StoredFile) -> None:
    """Remove a file's record and its bytes. Raises Unavailable, and UnknownFile if it had no record."""
    known = await services.files.known([file.id])
    await services.files.forget(file.id, file.tenant)
    await asyncio.to_thread(services.file_store.remove, file.id)
    if not known:
        raise UnknownFile(file.id)


def _keep_s(upload: Upload, default: int) -> int:
    """Return `expires_after` in seconds. Raises ApiError (400)."""
    anchor, seconds = upload.fields.get("expires_after[anchor]"), upload.fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return default
    if anchor != "created_at":
        raise errors.invalid_request("expires_after.anchor must be 'created_at'.", "expires_after.anchor")
    return whole_number(seconds or "", "expires_after.seconds", MIN_EXPIRY_S, MAX_EXPIRY_S)


async def listing(request: Request) -> Response:
    """List your files.

    GET /v1/files[?purpose=&limit=&order=&after=]: list the caller's files.
    """
    services, caller, query = services_of(request), caller_of(request), request.query_params
    limit, purpose = value_of(query, "file_limit") or MAX_FILES_PER_PAGE, query.get("purpose")
    newest_first = value_of(query, "order") != "asc"
    found: list[StoredFile] = []
    after, more = query.get("after"), True
    while more and len(found) <= limit:
        try:
            page = await services.files.recent(caller.tenant, after, RECORDS_PER_CALL, newest_first=newest_first)
        except UnknownFile:
            raise errors.invalid_request("after names no file of yours.", "after") from None
        found += [file for file in page if purpose in (None, file.purpose)]
        after = page[-1].id if page else after
        more = len(page) == RECORDS_PER_CALL
    return as_page({file.id: file_object(file) for file in found[:limit]}, has_more=len(found) > limit)


async def show(request: Request) -> Response:
    """Show a file.

    GET /v1/files/{id}: show the file object.
    """
    return as_json(file_object(await own_file(request)))


async def content(request: Request) -> Response:
    """Read a file.

    GET /v1/files/{id}/content: stream the file's bytes from disk.
    """
    services, file = services_of(request), await own_file(request)
    path = services.file_store.path(file.id)
    if not await asyncio.to_thread(path.exists):
        raise errors.file_not_found()
    return FileResponse(
        path, media_type="application/octet-stream", filename=file.name, headers={"X-Content-Type-Options": "nosniff"}
    )


async def delete(request: Request) -> Response:
    """Delete a file.

    DELETE /v1/files/{id}: delete the file. Batches created from it continue.
    """
    services, file = services_of(request), await own_file(request)
    await asyncio.to_thread(services.file_store.remove, file.id)
    await services.files.forget(file.id, file.tenant)
    return as_json({"id": file.id, "object": "file", "deleted": True})


async def own_file(request: Request) -> StoredFile:
    """Return the file in the path, if the caller owns it. Raises UnknownFile (404)."""
    return await services_of(request).files.get(request.path_params["file_id"], caller_of(request).tenant)


def file_object(file: StoredFile) -> dict[str, Any]:
    """Render OpenAI's file object."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size,
        "created_at": file.created_ms // 1000,
        "expires_at": file.expires_ms // 1000,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


# --- reading an upload ------------------------------------------------------------------------------------------------


BLOCK_BYTES = 256 * 1024
"""Bytes of one write to disk, and thus held in memory."""
MAX_PARTS = 16
MAX_HEADER_BYTES = 4096
MAX_FIELD_BYTES = 1024
MAX_NAME_CHARS = 255
PLAIN_PARTS = {
    b"content-encoding": (b"", b"identity"),
    b"content-transfer-encoding": (b"", b"7bit", b"8bit", b"binary"),
}
"""The values of these fields of a part that leave its bytes as they are."""


class FileLimits(NamedTuple):
    """What a tenant's files may take. All in bytes."""

    used: int
    """They take already; 0 without a quota."""
    quota: int | None
    """They may take; None: there is no limit."""
    free: int
    """Are free on the disk now."""
    min_free: int
    """Must stay free."""


async def file_limits(services: Services, caller: Caller) -> FileLimits:
    """Read the limits of a new file of this caller. Where several tenants share the server, the files of none that has
    no quota of its own take more than what then stays free. Raises Unavailable, OSError."""
    quotas = services.quotas(caller)
    quota, shared = quotas.file_bytes, quotas.store_share is not None
    used = await services.quota_usage.file_bytes(caller.tenant) if shared or quota is not None else 0
    free = await asyncio.to_thread(services.file_store.free_bytes)
    if quota is None and shared:
        quota = (free + used) // 2
    return FileLimits(used, quota, free, services.files_settings.min_free_bytes)


LOOK_BYTES = 4 << 20
"""An upload brings so many bytes before the disk is looked at again."""
MAX_OVERHEAD_BYTES = 64 * 1024
"""Upper bound of the bytes of a body besides its file: the other parts are small."""


class Allowance:
    """Byte budget of one upload; a context manager that reserves its bytes while they are received.

    Args:
        receiving: bytes of all uploads in progress in this process, by tenant; shared by all allowances.
        tenant: whose upload it is.
        size_limit: bytes of one file.
        limits: what the tenant's files and the disk take.
    """

    def __init__(self, receiving: Counter[str], tenant: str, size_limit: int, limits: FileLimits) -> None:
        self._receiving, self._tenant, self._size_limit = receiving, tenant, size_limit
        self._used, self._quota, self._room = limits.used, limits.quota, limits.free - limits.min_free
        self._min_free, self._taken, self._looked = limits.min_free, 0, 0

    def __enter__(self) -> Allowance:
        return self

    def __exit__(self, *_: object) -> None:
        self._receiving[self._tenant] -= self._taken
        if self._receiving[self._tenant] <= 0:
            del self._receiving[self._tenant]

    def check_length(self, length: int) -> None:
        """Refuse a body whose Content-Length shows that its file cannot fit. Raises ApiError (413), QuotaExceeded."""
        self._check(length - MAX_OVERHEAD_BYTES)

    def take(self, count: int) -> None:
        """Count `count` more bytes of the file. Raises ApiError (413), QuotaExceeded."""
        self._check(self._taken + count)
        self._taken += count
        self._receiving[self._tenant] += count

    @property
    def is_to_look_again(self) -> bool:
        """Whether much was written since the disk's free bytes were read."""
        return self._taken - self._looked >= LOOK_BYTES

    def look_again(self, free: int) -> None:
        """Take over the free bytes of the disk. Raises ApiError (503) if too few are left."""
        self._looked = self._taken
        if free < self._min_free:
            raise errors.store_full(DISK_FULL)

    def _check(self, size: int) -> None:
        if size > self._size_limit:
            raise errors.payload_too_large(self._size_limit, "[files] size_limit")
        used = self._used + self._receiving[self._tenant] - self._taken
        if self._quota is not None and used + max(1, size) > self._quota:
            raise QuotaExceeded("file_bytes", used, self._quota)
        if sum(self._receiving.values()) - self._taken + max(0, size) > self._room:
            raise errors.store_full(DISK_FULL)


@dataclass(slots=True)
class Upload:
    """A parsed upload: its plain fields, and its file, which the caller must keep or discard."""

    fields: dict[str, str] = field(default_factory=dict)
    incoming: Incoming | None = None
    name: str = ""
    lines: int = 0


async def receive(
    stream: AsyncIterator[bytes], content_type: str, file_store: FileStore, allowance: Allowance, idle_timeout_s: float
) -> Upload:
    """Read a body with one file; on any error discard it.

    Args:
        idle_timeout_s: longest gap between two chunks of the body.

    Raises:
        ApiError: 400, 408, 413, 415.
        QuotaExceeded: the tenant may not keep so many bytes.
        OSError: the disk refused the file.
    """
    reader = _Reader(file_store, allowance)
    try:
        parser = MultipartParser(_boundary(content_type), reader.callbacks)
        while chunk := await _next(stream, idle_timeout_s):
            parser.write(chunk)
            await reader.write_out(BLOCK_BYTES)
            if allowance.is_to_look_again:  # other processes and other programs write, too
                allowance.look_again(await asyncio.to_thread(file_store.free_bytes))
        if not reader.ended:
            raise errors.invalid_request("The body ends before its last part does.")
        await reader.write_out(1)
    except BaseException as error:
        if reader.upload.incoming is not None:
            reader.upload.incoming.discard()
        if isinstance(error, FormParserError):
            raise errors.invalid_request(f"The body is not valid multipart/form-data: {error}.") from None
        if isinstance(error, TimeoutError):
            raise errors.upload_stalled(idle_timeout_s) from None
        raise
    return reader.upload


def _boundary(content_type: str) -> bytes:
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise errors.unsupported_upload()
    return options[b"boundary"]


class _Reader:
    """Collects what the parser's callbacks report; `write_out` writes it to disk."""

    def __init__(self, file_store: FileStore, allowance: Allowance) -> None:
        self.upload, self.ended = Upload(), False
        self._file_store, self._allowance = file_store, allowance
        self._header, self._value = bytearray(), bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._field, self._is_file, self._opening = "", False, False
        self._text, self._block = bytearray(), bytearray()
        self._parts = 0

    @property
    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._part_begin,
            "on_header_field": partial(self._header_data, self._header),
            "on_header_value": partial(self._header_data, self._value),
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": self._part_data,
            "on_part_end": self._part_end,
            "on_end": self._end,
        }

    async def write_out(self, min_bytes: int) -> None:
        """Write the collected bytes to disk, if there are at least `min_bytes`."""
        if self._opening:
            self._opening = False
            self.upload.incoming = await asyncio.to_thread(self._file_store.open_incoming)
        if self.upload.incoming is not None and len(self._block) >= min_bytes:
            block, self._block = bytes(self._block), bytearray()
            self.upload.lines += block.count(b"\n")
            await asyncio.to_thread(self.upload.incoming.write, block)

    def _part_begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise errors.invalid_request(f"The body has more than {MAX_PARTS} parts.")
        self._headers.clear()
        self._text.clear()
        self._field, self._is_file = "", False

    def _header_data(self, kept: bytearray, data: bytes, start: int, end: int) -> None:
        kept += data[start:end]
        if len(self._header) + len(self._value) > MAX_HEADER_BYTES:
            raise errors.invalid_request("A part of the body has too long a header.")

    def _header_end(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._field = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = b"filename" in options
        for name, plain in PLAIN_PARTS.items():
            if self._headers.get(name, b"").strip().lower() not in plain:
                raise errors.encoded_part(name.decode().title())
        if not self._is_file:
            return
        if self._field != "file" or self._opening or self.upload.incoming is not None:
            raise errors.invalid_request("The body must have one file, in a part named 'file'.", "file")
        self.upload.name = _display_name(options[b"filename"].decode("utf-8", "replace"))
        self._opening = True

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._allowance.take(end - start)
            self._block += data[start:end]
        else:
            self._text += data[start:end]
            errors.refuse_if(len(self._text) > MAX_FIELD_BYTES, self._field[:64], "is too long")

    def _part_end(self) -> None:
        if not self._is_file:
            self.upload.fields[self._field] = self._text.decode("utf-8", "replace")

    def _end(self) -> None:
        self.ended = True


async def _next(stream: AsyncIterator[bytes], idle_timeout_s: float) -> bytes:
    """Return the next bytes; b"" at the end. Raises TimeoutError when none arrive in time."""
    async with asyncio.timeout(idle_timeout_s):
        async for chunk in stream:
            if chunk:
                return chunk
    return b""


def _display_name(name: str) -> str:
    """Clean a client's file name for display: no path, no control characters."""
    last = PurePosixPath(PureWindowsPath(name).name).name
    shown = "".join(each for each in last if each.isprintable())[:MAX_NAME_CHARS]
    return shown if shown.strip(". ") else "file"
