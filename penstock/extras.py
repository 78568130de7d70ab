"""Extra fields of an answer: what a model's server says beside text, calls and counts, kept for readers who know it.

Extras are a map of up to four maps: `chunk`, `choice` and `delta` hold the fields of these parts of a streamed chunk of
OpenAI's, and `calls` those of each call by its number in the answer, as text. Those of `chunk` and `choice` are states:
the last one counts. Those of `delta` and `calls` are parts that are joined, as OpenAI's clients join them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

Extras: TypeAlias = dict[str, Any]

STATES = ("chunk", "choice")
NAMES = frozenset({"id", "index", "type", "format", "name", "role", "model", "object"})
"""Texts that are repeated and not continued."""
MAX_LEVELS = 32


def is_deep(value: Any, levels: int = MAX_LEVELS) -> bool:
    """Whether a value has more levels than extras may have."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(levels == 0 or is_deep(each, levels - 1) for each in inner)


def merged(parts: Iterable[Extras]) -> Extras:
    """The extras of consecutive parts of one answer, as one."""
    found: Extras = {}
    for part in parts:
        for place, fields in part.items():
            before = found.get(place)
            if before is None:
                found[place] = fields
            else:
                found[place] = {**before, **fields} if place in STATES else joined_fields(before, fields)
    return found


def joined_fields(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The fields of two consecutive deltas as those of one message."""
    found = dict(before)
    for name, value in after.items():
        found[name] = value if name in NAMES or name not in before else _joined(before[name], value)
    return found


def _joined(before: Any, after: Any) -> Any:
    match before, after:
        case str(), str():
            return before + after
        case dict(), dict():
            return joined_fields(before, after)
        case list(), list():
            return _joined_lists(before, after)
        case _:
            return before if after is None else after


def _joined_lists(before: list[Any], after: list[Any]) -> list[Any]:
    """Entries with the same `index` are parts of one entry."""
    found = list(before)
    places = {each["index"]: place for place, each in enumerate(found) if _is_indexed(each)}
    for each in after:
        place = places.get(each["index"]) if _is_indexed(each) else None
        if place is None:
            found.append(each)
        else:
            found[place] = joined_fields(found[place], each)
    return found


def _is_indexed(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("index"), int)
