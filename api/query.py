"""Query parameters: one table, by which they are read here and described in the OpenAPI document (api/openapi.py)."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from starlette.datastructures import QueryParams

from api.openai.errors import invalid_request, refuse_if
from streaming.jobs.job import JobState
from streaming.order import Priority

Schema = dict[str, Any]
STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}

NUMERAL = re.compile(r"[0-9]{1,15}(?:\.[0-9]{0,15})?|\.[0-9]{1,15}")
WHOLE = re.compile(r"([0-9]{1,15})(?:\.0{1,15})?")
"""With a bound, because int() raises on thousands of digits, and a URL may hold that many."""


class Param(NamedTuple):
    """A parameter: its name, the JSON schema of its value, and its meaning."""

    name: str
    schema: Schema
    meaning: str


_MOMENT: Schema = NUMBER | {"minimum": 0, "maximum": 1e11}
_DAY: Schema = STRING | {"format": "date", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"}
_STATES: Schema = {"enum": [state.value for state in JobState]}
_LANES: Schema = STRING | {"enum": [lane.value for lane in Priority]}

PARAMS = {
    "purpose": Param("purpose", STRING, "Only files of this purpose: batch or batch_output."),
    "order": Param("order", {"enum": ["asc", "desc"]}, "By the time of creation."),
    "status": Param("status", _STATES, "Only jobs in this state. A page reads some 1,000 jobs: it may be short, or "
                    "empty, with has_more true."),
    "cursor": Param("cursor", STRING | {"pattern": "^[0-9]{1,15}-job_[0-9a-f]{32}$"}, "`next_cursor` of the page "
                    "before."),
    "limit": Param("limit", INTEGER | {"minimum": 1, "maximum": 100}, "Rows on a page."),
    "wait": Param("wait", NUMBER | {"minimum": 0, "maximum": 600}, "Seconds to wait for the job's end."),
    "include": Param("include", STRING | {"enum": ["input"]}, "`input`: show the request, too."),
    "batch_limit": Param("limit", INTEGER | {"minimum": 1, "maximum": 1000}, "Rows on a page."),
    "after_id": Param("after_id", STRING, "Only batches that are older than this one."),
    "before_id": Param("before_id", STRING, "The ones that are newer than this batch, and next to it."),
    "after": Param("after", STRING, "Continue after this: events as Last-Event-ID, lists after this id, also if it was "
                   "deleted today."),
    "stream": Param("stream", {"enum": ["true", "false"]}, "`true`: stream the events, from the first one on."),
    "starting_after": Param("starting_after", INTEGER | {"minimum": 0, "maximum": 10**15 - 1}, "Stream only the events "
                            "after this number."),
    "offset": Param("offset", STRING, "Only messages after it: `Stream-Next-Offset`, `-1` (all), or `now` (none yet)."),
    "live": Param("live", {"enum": ["long-poll", "sse"]}, "Wait for the next messages, or stream them."),
    "file_limit": Param("limit", INTEGER | {"minimum": 1, "maximum": 10_000}, "Rows on a page."),
    "response_include": Param("include", STRING, "Without effect: a response shows what it was created with."),
    "stream_cursor": Param("cursor", INTEGER | {"minimum": 0, "maximum": 10**12}, "Of a live read: the last "
                           "`Stream-Cursor`."),
    "since": Param("since", _MOMENT, "Only jobs accepted at this time or later, in Unix seconds."),
    "until": Param("until", _MOMENT, "Only jobs accepted at this time or earlier, in Unix seconds."),
    "audit_since": Param("since", _MOMENT, "Only what was noted at this time or later, in Unix seconds."),
    "audit_after": Param("after", STRING | {"pattern": "^[01]-[0-9]{1,15}-[0-9]{1,10}$"}, "`last_id` of the page "
                         "before."),
    "named_model": Param("model", STRING, "The model, or an alias of it; without it, the default or first one."),
    "job_model": Param("model", STRING, "Only jobs of this model."),
    "lane": Param("lane", _LANES, "Only jobs of this lane."),
    "search": Param("search", STRING | {"maxLength": 64}, "Only jobs whose id begins so, or that have it in their "
                    "metadata or first words."),
    "from": Param("from", _DAY, "first day, in UTC, such as 2026-11-01: at most 99 days before `to`; without it: 29."),
    "to": Param("to", _DAY, "last day, in UTC, such as 2026-11-30; without it: today."),
    "by": Param("by", STRING | {"pattern": "^(day|tenant|key|model)(,(day|tenant|key|model)){0,3}$"}, "columns that "
                "tell rows apart, of day, tenant, key and model, with commas between them; without it: day."),
    "usage_tenant": Param("tenant", STRING, "Whose usage; without it: that of all tenants."),
    "usage_format": Param("format", {"enum": ["json", "csv"]}, "`csv`: as with `Accept: text/csv`."),
    "job_tenant": Param("tenant", STRING, "Whose jobs; `*`: of all keys, at most 20. Without it: your tenant's."),
}  # fmt: skip
"""By the name that a route has for it (api/routes.py)."""
MAY_BE_EMPTY = frozenset(("status", "lane", "since", "audit_since", "until", "search", "wait", "include"))
"""As if they were left out. An empty place (`cursor`, `starting_after`) is refused: as the beginning, it would show its
client the same again, without end."""


def value_of(query: QueryParams, key: str) -> Any:
    """Return the value of a parameter of the table, of the type that its schema names; None: it was left out. Raises
    ApiError (400)."""
    name, schema, meaning = PARAMS[key]
    text = query.get(name)
    if text is None or (not text and key in MAY_BE_EMPTY):
        return None
    if schema.get("type") == "integer":
        return whole_number(text, name, schema["minimum"], schema["maximum"])
    if schema.get("type") == "number":
        number = float(text) if NUMERAL.fullmatch(text) else math.nan
        what = f"must be a number from {schema['minimum']:,} to {schema['maximum']:,.0f}"
        refuse_if(not schema["minimum"] <= number <= schema["maximum"], name, what)
        return number
    if "enum" in schema:
        refuse_if(text not in schema["enum"], name, f"must be one of {', '.join(schema['enum'])}, or left out")
    if "pattern" in schema:
        refuse_if(not re.fullmatch(schema["pattern"], text), name, f"must be the {meaning.rstrip('.')}")
    longest = schema.get("maxLength", len(text))
    refuse_if(len(text) > longest, name, f"may have at most {longest} characters")
    return text


def whole_number(text: str, param: str, minimum: int, maximum: int) -> int:
    """Return the value of parameter `param`. Raises ApiError (400)."""
    match = WHOLE.fullmatch(text)
    if match is None or not minimum <= int(match[1]) <= maximum:
        raise invalid_request(f"{param} must be a whole number from {minimum} to {maximum}.", param)
    return int(match[1])
