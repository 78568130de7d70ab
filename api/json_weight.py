"""Weight of a JSON body: how long it will hold up the event loop, estimated before it is parsed.

The parser holds the interpreter's lock, so a thread would not help the other streams: a body of 2 MB that is nothing
but `[]` stopped them all for 200 ms. What a body costs goes by its values, not by its bytes. Measured with
pydantic-core 2.50 on one core, parsing and checking took about 80 ns for each unit of the weights below, so that
MAX_JSON_WEIGHT units are about 5 ms. The weight is found in slices, with other work between them.
"""

from __future__ import annotations

import asyncio

from api import errors

MAX_JSON_WEIGHT = 65_536
"""Units of one body. 65,000 token ids, 1,024 messages of one part each, or 2 MB of text weigh less."""
CONTAINER_WEIGHT = 8
"""Of a list or object; the heaviest byte there is."""
KEY_WEIGHT = 4
COMMA_WEIGHT = 1
BACKSLASHES_PER_UNIT = 4
"""Escapes in strings are cheap, but there may be a million of them."""
SLICE_BYTES = 32 * 1024

BACKSLASH, QUOTE = b"\\", b'"'


def is_heavy(body: bytes | bytearray) -> bool:
    """Whether the body might exceed MAX_JSON_WEIGHT; most are too short for that."""
    return len(body) * CONTAINER_WEIGHT > MAX_JSON_WEIGHT


async def check_weight(body: bytes | bytearray) -> None:
    """Raises ApiError (400) if parsing the body would take too long."""
    weight, start, in_string = body.count(BACKSLASH) // BACKSLASHES_PER_UNIT, 0, False
    while start < len(body):
        end = _slice_end(body, start)
        outside, in_string = _outside_strings(bytes(body[start:end]), in_string=in_string)
        weight += _weight(outside)
        if weight > MAX_JSON_WEIGHT:
            raise errors.body_too_complex(MAX_JSON_WEIGHT)
        start = end
        if start < len(body):
            await asyncio.sleep(0)


def _slice_end(body: bytes | bytearray, start: int) -> int:
    """The end of the slice that begins at `start`: never between a backslash and what it escapes."""
    part = body[start : start + SLICE_BYTES]
    backslashes = len(part) - len(part.rstrip(BACKSLASH))
    return start + len(part) + backslashes % 2


def _outside_strings(part: bytes, *, in_string: bool) -> tuple[bytes, bool]:
    """The bytes that are in no string, and whether a string is open at the end."""
    if BACKSLASH in part:
        part = part.replace(BACKSLASH * 2, b"").replace(BACKSLASH + QUOTE, b"")
    pieces = part.split(QUOTE)
    outside = b"".join(pieces[1 if in_string else 0 :: 2])
    return outside, in_string ^ (len(pieces) % 2 == 0)


def _weight(outside: bytes) -> int:
    containers = outside.count(b"[") + outside.count(b"{")
    return CONTAINER_WEIGHT * containers + KEY_WEIGHT * outside.count(b":") + COMMA_WEIGHT * outside.count(b",")
