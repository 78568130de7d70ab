"""JSON body of a request: parses it within bounds of weight and depth, validates it, and words the first error."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import msgspec
import pydantic_core
from pydantic import BaseModel, ValidationError

from api.openai import errors
from api.openai.errors import ApiError, invalid_request
from api.openai.fields import QueueOptions
from penstock.config import nearest
from penstock.text import fault_of, without_mark

# The parser holds the GIL, so a thread would not help: a 2 MB body of nothing but `[]` blocked all streams for 200 ms.
# The cost depends on the number of values, not of bytes. Measured with msgspec 0.20 on one core, parsing and
# checking takes 40 to 130 ns for each unit of the weights below, so that MAX_JSON_WEIGHT units are about 10 ms. Every
# parser calls `check_weight`, so that no body is parsed unchecked. Code that receives a body on the event loop calls
# `weighed` first, which counts it in slices, once.


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
_ALIKE_DIGITS = bytes.maketrans(b"123456789", b"000000000")


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


def _weigh(body: bytes | bytearray) -> Iterator[None]:
    """Count the weight of the bytes outside strings, slice by slice. Raises ApiError (400)."""
    weight = escapes = start = 0
    in_string = False
    while start < len(body):
        part = bytes(body[start : start + SLICE_BYTES])
        backslashes = len(part) - len(part.rstrip(BACKSLASH))
        start += len(part) + backslashes % 2  # no slice begins with the byte that a backslash escapes
        part += body[start - backslashes % 2 : start]
        if BACKSLASH in part:
            escapes += part.count(BACKSLASH)
            part = part.replace(BACKSLASH * 2, b"").replace(BACKSLASH + QUOTE, b"")
        pieces = part.split(QUOTE)
        outside = b"".join(pieces[1 if in_string else 0 :: 2])
        in_string ^= len(pieces) % 2 == 0
        weight += CONTAINER_WEIGHT * (outside.count(b"[") + outside.count(b"{"))
        weight += KEY_WEIGHT * outside.count(b":") + COMMA_WEIGHT * outside.count(b",")
        weight += LONG_NUMBER_WEIGHT * outside.translate(_ALIKE_DIGITS).count(LONG_NUMBER)
        if weight + escapes // BACKSLASHES_PER_UNIT > MAX_JSON_WEIGHT:
            raise errors.body_too_complex(MAX_JSON_WEIGHT)
        yield


LARGE_BYTES = 2 << 20
"""A longer body is mostly media: to look at its few values takes less time than at its bytes."""
MAX_DEPTH = 128
"""Levels of nested JSON: a schema of ten levels of objects, in lists of alternatives, has some 60."""


def read_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object of bounded weight and depth, whose numbers the log and answers can hold: they are finite, and
    have at most 64 bits if they are whole. Raises ApiError (400)."""
    check_weight(body)
    is_large = len(body) > LARGE_BYTES
    try:
        fields = msgspec.json.decode(without_mark(body))
        if not is_large:
            msgspec.msgpack.encode(fields)
    except RecursionError:
        raise _too_deep() from None
    except (ValueError, OverflowError) as error:  # its text says less than that of the slower parser
        field, said = number_fault(body)
        if field:
            raise invalid_request(f"{field} {NUMBER}.", field) from None
        fault = fault_of(body)
        raise invalid_request(f"The body is not valid JSON: {f'it is {fault}' if fault else said or error}.") from None
    if not isinstance(fields, dict):
        raise invalid_request("The body must be a JSON object.")
    if (is_large or body.count(b"[") + body.count(b"{") > MAX_DEPTH) and nested_beyond(fields, MAX_DEPTH):
        raise _too_deep()
    if is_large and (field := _bad_number(fields, "")):
        raise invalid_request(f"{field} {NUMBER}.", field)
    return fields


def _too_deep() -> ApiError:
    return invalid_request(f"The body is nested more than {MAX_DEPTH} levels deep.")


NUMBER = "must be a finite number, of at most 64 bits if it is whole"


def number_fault(body: bytes) -> tuple[str, str]:
    """The path of the first number that is not finite, or beyond 64 bits; else "", and what is no JSON, and where."""
    try:
        return _bad_number(pydantic_core.from_json(without_mark(body)), ""), ""
    except ValueError as error:
        return "", str(error)


def _bad_number(value: Any, path: str) -> str:
    if (isinstance(value, float) and not math.isfinite(value)) or (
        isinstance(value, int) and not -(2**63) <= value < 2**64
    ):
        return path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    steps = (
        ((f"{path}[{step}]" if isinstance(step, int) else f"{path}.{step}".lstrip("."))[:128], each)
        for step, each in inner
    )
    return next(filter(None, (_bad_number(each, at) for at, each in steps)), "")


def nested_beyond(value: Any, levels: int) -> bool:
    """Whether lists and objects in a value are nested more than `levels` deep."""
    layer = [value]
    for _ in range(levels):
        lists = [each.values() if isinstance(each, dict) else each for each in layer if isinstance(each, dict | list)]
        layer = [inner for each in lists for inner in each]
    return any(isinstance(each, dict | list) for each in layer)


_WORDS = {
    "missing": "is required",
    "string_type": "must be a string",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "must be an object"),
    "literal_error": "must be {expected}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    **dict.fromkeys(("too_short", "string_too_short"), "must not be empty"),
    "too_long": "may have at most {max_length} entries",
    "string_too_long": "may have at most {max_length} characters",
    "string_pattern_mismatch": "must match the pattern {pattern}",
}
_OURS = ("refused", "shape")
"""Kinds of errors whose text is ours. Any other kind without words above is said to be a value of the wrong kind."""


Body = TypeVar("Body", bound=BaseModel)


def validated(model: type[Body], fields: dict[str, Any]) -> Body:
    """Validate a body. JSON has one type of number, so whole floats (8.0) pass for integers. Raises ApiError (400)."""
    try:
        return model.model_validate(fields)
    except ValidationError:
        fields = with_integers(fields)
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise explained(error, model) from None


def with_integers(value: Any) -> Any:
    """Return the value with its whole floats as integers, but for those beyond 64 bits."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    if isinstance(value, dict):
        return {name: with_integers(each) for name, each in value.items()}
    return [with_integers(each) for each in value] if isinstance(value, list) else value


def explained(error: ValidationError, model: type[BaseModel]) -> ApiError:
    """Return the first error as a 400 with the path of the field.

    It never quotes the value, which may be a prompt.
    """
    first = error.errors(include_input=False, include_url=False)[0]
    *above, last = loc = first["loc"]
    pattern = _WORDS.get(first["type"], "has a value of the wrong kind")
    words = first["msg"] if first["type"] in _OURS else pattern.format_map(first.get("ctx", {}))
    if first["type"] == "extra_forbidden":
        known = (QueueOptions if above == ["queue"] else model).model_fields
        hint = f" ({nearest(str(last)[:64], known)})" if above in ([], ["queue"]) else ""
        words = f"is no known field{hint}"
    elif last == "[key]" and len(above) > 1:  # pydantic's marker for an object's key, here of metadata
        param = _path(above[:-1])
        return invalid_request(f"{param}: a key {words}.", param)
    param = _path(loc)
    return invalid_request(f"{param} {words}.", param)


def _path(loc: Iterable[int | str]) -> str:
    """Render a path such as messages[0].content, without the internal tags of unions."""
    path = ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith("<"):
            name = step.removesuffix("_")  # of a field whose name would hide one of the library's
            path += f".{name}" if path else name
    return path[:128]
