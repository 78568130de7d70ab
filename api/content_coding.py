"""Content codings: decodes the bodies of requests that have a Content-Encoding, slice by slice.

A slice bounds the memory and the time that a small body may cost which decodes to a large one. Readers of a body count
the decoded bytes against their own limit, and stop.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.types import Message, Receive, Scope

from api.openai import errors

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

SLICE_BYTES = 64 * 1024
PIECE_BYTES = 16 * 1024
"""Encoded bytes that a decompressor gets at once: it copies what it does not take."""
MAX_CODINGS = 3
MAX_OVERHEAD_BYTES = 256 * 1024
"""Encoded bytes that may decode to nothing, besides four for each decoded byte: more than a block of zstd, of which
nothing is decoded before its end. Empty parts cost time, too."""
PART_COST_BYTES = 1024
"""Encoded bytes as which the beginning of a part counts, because it takes as long."""
MAX_WINDOW_LOG = 23
"""8 MiB, the largest window of the content coding zstd (RFC 9659)."""


def decoded(scope: Scope, receive: Receive) -> Receive:
    """Return what receives the body of a request without its content codings. It raises ApiError (400, 415)."""
    return _Decoder(scope, receive) if b"content-encoding" in scope["state"]["headers"] else receive


class _Decoder:
    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._scope, self._receive = scope, receive
        self._stages: list[_Stage] | None = None
        """The outermost coding, which was applied last, comes first."""
        self._slices: Iterator[bytes] = iter(())
        self._more, self._ended = True, False
        """Whether more encoded bytes are to come; whether the last decoded ones were returned."""

    async def __call__(self) -> Message:
        if self._stages is None:
            self._stages = [_Stage(name) for name in reversed(_codings(self._scope))]
        if self._ended:
            return await self._receive()
        while (part := next(self._slices, None)) is None:
            if not self._more:
                for stage in self._stages:
                    stage.check_end()
                self._ended = True
                return {"type": "http.request", "body": b"", "more_body": False}
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._more = message.get("more_body", False)
            self._slices = _through(self._stages, message.get("body", b""))
        await asyncio.sleep(0)
        return {"type": "http.request", "body": part, "more_body": True}


def _codings(scope: Scope) -> list[str]:
    """Return the names of the codings in the order in which they were applied. Raises ApiError (415)."""
    value = b",".join([value for name, value in scope["headers"] if name == b"content-encoding"]).decode("latin-1")
    names = [name.strip().lower().removeprefix("x-") for name in value.split(",")]
    names = [name for name in names if name not in ("", "identity")]
    if len(names) > MAX_CODINGS or not all(name in _NEW for name in names):
        raise errors.unsupported_coding(_NEW)
    return names


def _through(stages: Sequence[_Stage], data: bytes) -> Iterator[bytes]:
    if not stages:
        yield data
        return
    for part in stages[0].decode(data):
        yield from _through(stages[1:], part)


class _Stage:
    """Decoder of one coding, which may consist of several parts (members of gzip, frames of zstd)."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._part: Any = None
        """A decompressor of the library."""
        self._taken = self._given = 0

    def decode(self, data: bytes) -> Iterator[bytes]:
        """Yield decoded slices. Raises ApiError (400)."""
        for start in range(0, len(data), PIECE_BYTES):
            yield from self._decode(data[start : start + PIECE_BYTES])

    def _decode(self, data: bytes) -> Iterator[bytes]:
        self._taken += len(data)
        full = False
        while data or full:
            if self._part is None or self._part.eof:
                if self._part is not None and self._name == "deflate":
                    raise errors.coding_mismatch(self._name)
                if self._part is not None and self._name == "gzip" and not data[0]:
                    data = data.lstrip(b"\0")  # padding, as gzip(1) takes it
                    self._check_overhead(len(data))
                    continue
                self._part = _NEW[self._name](data)
                self._taken += PART_COST_BYTES
            try:
                found = self._part.decompress(data, SLICE_BYTES)
            except (zlib.error, zstd.ZstdError):
                raise errors.coding_mismatch(self._name) from None
            data = self._part.unused_data if self._part.eof else getattr(self._part, "unconsumed_tail", b"")
            full = len(found) == SLICE_BYTES and not self._part.eof
            self._given += len(found)
            self._check_overhead(len(data))
            yield found

    def _check_overhead(self, left: int) -> None:
        """Raise ApiError (400) if most of the data but the last `left` bytes decodes to nothing."""
        if self._taken - left > MAX_OVERHEAD_BYTES + 4 * self._given:
            raise errors.coding_mismatch(self._name)

    def check_end(self) -> None:
        """Raise ApiError (400) if the data is cut off."""
        if self._part is None or not self._part.eof:
            raise errors.coding_mismatch(self._name)


def _new_deflate(data: bytes) -> Any:
    """The standard means zlib's format; some clients send bare deflate data, which cannot begin with this byte."""
    return zlib.decompressobj(zlib.MAX_WBITS if data[0] & 0x8F == 8 else -zlib.MAX_WBITS)


def _new_zstd(_data: bytes) -> Any:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: MAX_WINDOW_LOG})


_NEW = {"gzip": lambda _data: zlib.decompressobj(16 + zlib.MAX_WBITS), "deflate": _new_deflate, "zstd": _new_zstd}
