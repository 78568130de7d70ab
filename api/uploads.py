"""Reading a multipart upload as it comes: the file's bytes go to the disk, never more than a block of them in memory,
and the limits hold while it is read. Knows nothing of who may upload or what becomes of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath, PureWindowsPath

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from api.openai import errors
from streaming.batches.file_store import FileStore, Incoming
from streaming.errors import QuotaExceeded

BLOCK = 256 * 1024
"""Bytes written to the disk in one go."""
MAX_PARTS = 16
MAX_HEADER = 4096
MAX_FIELD = 1024
MAX_NAME = 255
AROUND_FILE = 64 * 1024
"""Bytes of a body that are not its file's, at most: the other parts are small."""


class Allowance:
    """How many bytes one upload may bring: `size_limit`, and of what its tenant may keep (`most`, None: no limit) what
    is left beside the `used` that it keeps and what this process receives for it at the same time (`coming`). A
    context manager: behind it, the bytes are kept or gone."""

    def __init__(self, coming: Counter[str], tenant: str, size_limit: int, used: int, most: int | None) -> None:
        self._coming, self._tenant = coming, tenant
        self._size_limit, self._used, self._most = size_limit, used, most
        self._taken = 0

    def __enter__(self) -> Allowance:
        return self

    def __exit__(self, *_: object) -> None:
        self._coming[self._tenant] -= self._taken
        if self._coming[self._tenant] <= 0:
            del self._coming[self._tenant]

    def check_length(self, length: int) -> None:
        """Refuse a body of so many bytes whose file cannot fit. Raises ApiError (413), QuotaExceeded."""
        self._check(length - AROUND_FILE)

    def take(self, count: int) -> None:
        """The file has so many more bytes. Raises ApiError (413), QuotaExceeded."""
        self._check(self._taken + count)
        self._taken += count
        self._coming[self._tenant] += count

    def _check(self, size: int) -> None:
        if size > self._size_limit:
            raise errors.payload_too_large(self._size_limit, "[files] size_limit")
        used = self._used + self._coming[self._tenant] - self._taken
        if self._most is not None and used + max(1, size) > self._most:
            raise QuotaExceeded("file_bytes", used, self._most)


@dataclass(slots=True)
class Upload:
    """What was sent: the plain fields, and the file, which is to be kept or discarded."""

    fields: dict[str, str] = field(default_factory=dict)
    incoming: Incoming | None = None
    name: str = ""
    lines: int = 0


async def receive(
    stream: AsyncIterator[bytes], content_type: str, shelf: FileStore, allowance: Allowance, silence_s: float
) -> Upload:
    """Read a body of at most one file, as large as it is allowed to be. On any error nothing of it stays.

    Raises ApiError (400, 408, 413, 415), QuotaExceeded, OSError.
    """
    try:
        reader = _Reader(_boundary(content_type), shelf, allowance)
    except FormParserError as error:  # for its boundary
        raise _invalid(error) from None
    try:
        await reader.read(stream, silence_s)
    except BaseException:
        if reader.upload.incoming is not None:
            reader.upload.incoming.discard()
        raise
    finally:
        reader.close()
    return reader.upload


def _boundary(content_type: str) -> bytes:
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise errors.unsupported_upload()
    return options[b"boundary"]


def _invalid(error: FormParserError) -> errors.ApiError:
    return errors.invalid_request(f"The body is not valid multipart/form-data: {error}.")


class _Reader:
    """The parser's callbacks. They only collect; `read` writes."""

    def __init__(self, boundary: bytes, shelf: FileStore, allowance: Allowance) -> None:
        self.upload = Upload()
        self._shelf, self._allowance = shelf, allowance
        self._header, self._value = bytearray(), bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._field, self._is_file = "", False
        self._text, self._block = bytearray(), bytearray()
        self._parts = 0
        self._opening = self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begin,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_finished,
                "on_part_data": self._part_data,
                "on_part_end": self._part_end,
                "on_end": self._end,
            },
        )

    async def read(self, stream: AsyncIterator[bytes], silence_s: float) -> None:
        try:
            while chunk := await _next(stream, silence_s):
                self._parser.write(chunk)
                await self._write(BLOCK)
        except FormParserError as error:
            raise _invalid(error) from None
        except TimeoutError:
            raise errors.upload_stalled(silence_s) from None
        if not self._ended:
            raise errors.invalid_request("The body ends before its last part does.")
        await self._write(1)

    def close(self) -> None:
        """Let go of the parser, which holds this reader: what was received would wait for the garbage collector."""
        del self._parser

    async def _write(self, least: int) -> None:
        """Bring what was collected to the disk, if it is enough."""
        if self._opening:
            self._opening = False
            self.upload.incoming = await asyncio.to_thread(self._shelf.open_incoming)
        if self.upload.incoming is not None and len(self._block) >= least:
            block, self._block = bytes(self._block), bytearray()
            self.upload.lines += block.count(b"\n")
            await asyncio.to_thread(self.upload.incoming.write, block)

    # --- what the parser finds ---------------------------------------------------------------------------------------

    def _part_begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise errors.invalid_request(f"The body has more than {MAX_PARTS} parts.")
        self._headers.clear()
        self._text.clear()
        self._field, self._is_file = "", False

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]
        self._bounded()

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._bounded()

    def _bounded(self) -> None:
        if len(self._header) + len(self._value) > MAX_HEADER:
            raise errors.invalid_request("A part of the body has too long a header.")

    def _header_end(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._field = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = b"filename" in options
        if not self._is_file:
            return
        if self._field != "file" or self._opening or self.upload.incoming is not None:
            raise errors.invalid_request("The body must have one file, in a part named 'file'.", "file")
        self.upload.name = _shown(options[b"filename"].decode("utf-8", "replace"))
        self._opening = True

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._allowance.take(end - start)
            self._block += data[start:end]
        else:
            self._text += data[start:end]
            if len(self._text) > MAX_FIELD:
                raise errors.invalid_request(f"{self._field[:64]} is too long.", self._field[:64])

    def _part_end(self) -> None:
        if not self._is_file:
            self.upload.fields[self._field] = self._text.decode("utf-8", "replace")

    def _end(self) -> None:
        self._ended = True


async def _next(stream: AsyncIterator[bytes], silence_s: float) -> bytes:
    """The next bytes; b"" at the end. Raises TimeoutError after so much silence."""
    async with asyncio.timeout(silence_s):
        async for chunk in stream:
            if chunk:
                return chunk
    return b""


def _shown(name: str) -> str:
    """A client's name for a file, for people to read: no path, nothing a terminal would obey."""
    last = PurePosixPath(PureWindowsPath(name).name).name
    shown = "".join(each for each in last if each.isprintable())[:MAX_NAME]
    return shown if shown.strip(". ") else "file"
