"""JSON cost check: estimates how long parsing a body would block the event loop, and refuses too costly bodies.

The parser holds the GIL, so a thread would not help: a 2 MB body of nothing but `[]` blocked all streams for 200 ms.
The cost depends on the number of values, not of bytes. Measured with
pydantic-core 2.50 on one core, parsing and checking took about 80 ns for each unit of the weights below, so that
MAX_JSON_WEIGHT units are about 10 ms. The weight is counted in slices, with other tasks in between.

Every parser calls `check_weight`, so that no body is parsed unchecked (api/openai/json_body.py, read_object). Code that
receives a body on the event loop calls `weighed` first, which counts it in slices, once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import accumulate

from api.openai import errors

MAX_JSON_WEIGHT = 131_072
"""Units of one body. 130,000 token ids, a schema of 5,000 described properties, or 2 MB of text weigh less."""
CONTAINER_WEIGHT = 8
"""Weight of a list or object: the largest weight of one byte."""
KEY_WEIGHT = 4
COMMA_WEIGHT = 1
BACKSLASHES_PER_UNIT = 4
"""Escapes in strings are cheap, but a body may hold a million of them."""
LONG_NUMBER = b"0" * 32
LONG_NUMBER_WEIGHT = 10
"""Weight of each such run of digits outside strings: long integers are slow to parse."""
SLICE_BYTES = 32 * 1024

BACKSLASH, QUOTE = b"\\", b'"'
STRIDE = 64
"""Brackets that are counted together, and one by one only where they might exceed the depth."""
_ALIKE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_ALIKE_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_STEPS = {ord("["): 1, ord("]"): -1}


class Weighed(bytes):
    """A body that passed the check; created by `weighed`."""

    __slots__ = ()


def is_heavy(body: bytes | bytearray) -> bool:
    """Whether the body might exceed MAX_JSON_WEIGHT; most are too short for that."""
    return len(body) * CONTAINER_WEIGHT > MAX_JSON_WEIGHT


async def weighed(body: bytes | bytearray) -> Weighed:
    """Check a body in slices, letting other tasks run in between, and return it. Raises ApiError (400)."""
    if is_heavy(body):
        for _ in _weigh(body):
            await asyncio.sleep(0)
    return Weighed(body)


def check_weight(body: bytes) -> None:
    """Raise ApiError (400) if parsing the body would take too long. Free for a body that `weighed` returned."""
    if not isinstance(body, Weighed) and is_heavy(body):
        for _ in _weigh(body):
            pass


def nested_beyond(body: bytes, levels: int) -> bool:
    """Whether lists and objects of this valid JSON are nested more than `levels` deep."""
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
    """Count the weight slice by slice. Raises ApiError (400)."""
    weight = body.count(BACKSLASH) // BACKSLASHES_PER_UNIT
    for outside in _outside(body):
        weight += _weight(outside)
        if weight > MAX_JSON_WEIGHT:
            raise errors.body_too_complex(MAX_JSON_WEIGHT)
        yield


def _outside(body: bytes | bytearray) -> Iterator[bytes]:
    """Yield the bytes outside strings, slice by slice."""
    start, in_string = 0, False
    while start < len(body):
        end = _slice_end(body, start)
        outside, in_string = _outside_strings(bytes(body[start:end]), in_string=in_string)
        yield outside
        start = end


def _slice_end(body: bytes | bytearray, start: int) -> int:
    """Return the end of the slice that begins at `start`: never between a backslash and the byte it escapes."""
    part = body[start : start + SLICE_BYTES]
    backslashes = len(part) - len(part.rstrip(BACKSLASH))
    return start + len(part) + backslashes % 2


def _outside_strings(part: bytes, *, in_string: bool) -> tuple[bytes, bool]:
    """Return the bytes outside strings, and whether a string is open at the end."""
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
