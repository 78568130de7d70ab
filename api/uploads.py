"""Multipart upload parser: streams the file of a request to disk in blocks, and enforces size limits while it reads."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from api.openai import errors
from streaming.batches.file_store import FileStore, Incoming
from streaming.errors import QuotaExceeded

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

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
MAX_OVERHEAD_BYTES = 64 * 1024
"""Upper bound of the bytes of a body besides its file: the other parts are small."""


class Allowance:
    """Byte budget of one upload; a context manager that reserves its bytes while they are received.

    Args:
        receiving: bytes of all uploads in progress in this process, by tenant; shared by all allowances.
        tenant: whose upload it is.
        size_limit: bytes of one file.
        used: bytes of files that the tenant keeps already.
        quota: bytes that the tenant may keep; None: no limit.
    """

    def __init__(self, receiving: Counter[str], tenant: str, size_limit: int, used: int, quota: int | None) -> None:
        self._receiving, self._tenant = receiving, tenant
        self._size_limit, self._used, self._quota = size_limit, used, quota
        self._taken = 0

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

    def _check(self, size: int) -> None:
        if size > self._size_limit:
            raise errors.payload_too_large(self._size_limit, "[files] size_limit")
        used = self._used + self._receiving[self._tenant] - self._taken
        if self._quota is not None and used + max(1, size) > self._quota:
            raise QuotaExceeded("file_bytes", used, self._quota)


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
