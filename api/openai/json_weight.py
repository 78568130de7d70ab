"""Weight of a JSON body: how long it will hold up the event loop, estimated before it is parsed.

The parser holds the interpreter's lock, so a thread would not help the other streams: a body of 2 MB that is nothing
but `[]` stopped them all for 200 ms. What a body costs goes by its values, not by its bytes. Measured with
pydantic-core 2.50 on one core, parsing and checking took about 80 ns for each unit of the weights below, so that
MAX_JSON_WEIGHT units are about 5 ms. The weight is found in slices, with other work between them.

Every parser calls `check_weight`, so that nothing is parsed that was not weighed (api/openai/schemas.py,
read_object). Code that receives a body on the event loop calls `weighed` first: then it is weighed once, in slices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import accumulate

from api.openai import errors

MAX_JSON_WEIGHT = 65_536
"""Units of one body. 65,000 token ids, 1,024 messages of one part each, or 2 MB of text weigh less."""
CONTAINER_WEIGHT = 8
"""Of a list or object; the heaviest byte there is."""
KEY_WEIGHT = 4
COMMA_WEIGHT = 1
BACKSLASHES_PER_UNIT = 4
"""Escapes in strings are cheap, but there may be a million of them."""
LONG_NUMBER = b"0" * 32
LONG_NUMBER_WEIGHT = 10
"""Of so many digits in a row outside strings: reading a whole number takes longer the more digits it has."""
SLICE_BYTES = 32 * 1024

BACKSLASH, QUOTE = b"\\", b'"'
STRIDE = 64
"""Brackets that are looked at together, and one by one only where they might lead too deep."""
_ALIKE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_ALIKE_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_STEPS = {ord("["): 1, ord("]"): -1}


class Weighed(bytes):
    """A body that is known to be light enough; `weighed` makes them."""

    __slots__ = ()


def is_heavy(body: bytes | bytearray) -> bool:
    """Whether the body might exceed MAX_JSON_WEIGHT; most are too short for that."""
    return len(body) * CONTAINER_WEIGHT > MAX_JSON_WEIGHT


async def weighed(body: bytes | bytearray) -> Weighed:
    """The body, once it was found light enough; others work meanwhile. Raises ApiError (400)."""
    if is_heavy(body):
        for _ in _weigh(body):
            await asyncio.sleep(0)
    return Weighed(body)


def check_weight(body: bytes) -> None:
    """Raises ApiError (400) if parsing the body would take too long. Costs nothing if it was weighed before."""
    if not isinstance(body, Weighed) and is_heavy(body):
        for _ in _weigh(body):
            pass


def nested_beyond(body: bytes, levels: int) -> bool:
    """Whether lists and objects of this valid JSON are nested more deeply than that."""
    if body.count(b"[") + body.count(b"{") <= levels:
        return False
    level = 0
    for outside in _outside(body):
        brackets = outside.translate(_ALIKE, _NO_BRACKETS)
        for at in range(0, len(brackets), STRIDE):
            part = brackets[at : at + STRIDE]
            opened = part.count(b"[")
            if level + opened > levels and level + max(accumulate(map(_STEPS.__getitem__, part))) > levels:
                return True
            level += 2 * opened - len(part)
    return False


def _weigh(body: bytes | bytearray) -> Iterator[None]:
    """Slice by slice. Raises ApiError (400)."""
    weight = body.count(BACKSLASH) // BACKSLASHES_PER_UNIT
    for outside in _outside(body):
        weight += _weight(outside)
        if weight > MAX_JSON_WEIGHT:
            raise errors.body_too_complex(MAX_JSON_WEIGHT)
        yield


def _outside(body: bytes | bytearray) -> Iterator[bytes]:
    """The bytes that are in no string, slice by slice."""
    start, in_string = 0, False
    while start < len(body):
        end = _slice_end(body, start)
        outside, in_string = _outside_strings(bytes(body[start:end]), in_string=in_string)
        yield outside
        start = end


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
    long_numbers = outside.translate(_ALIKE_DIGITS).count(LONG_NUMBER)
    return (
        CONTAINER_WEIGHT * containers
        + KEY_WEIGHT * outside.count(b":")
        + COMMA_WEIGHT * outside.count(b",")
        + LONG_NUMBER_WEIGHT * long_numbers
    )
