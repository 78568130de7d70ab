"""JSON body of a request: a JSON object, parsed within bounds of weight and depth."""

from __future__ import annotations

import math
from typing import Any

import pydantic_core

from api.openai.errors import invalid_request
from api.openai.fields import depth
from api.openai.json_weight import check_weight
from penstock.text import fault_of, without_mark

MAX_DEPTH = 128
"""Levels of nested JSON: a schema of ten levels of objects, in lists of alternatives, has some 60."""
MAX_PATH = 128
FINITE = "must be a finite number: JSON has no NaN and no Infinity"


def read_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object of bounded weight and depth. Raises ApiError (400)."""
    check_weight(body)
    try:
        fields = pydantic_core.from_json(without_mark(body), allow_inf_nan=False)
    except ValueError as error:  # its text says what was expected, at which line and column
        if fault := fault_of(body):
            raise invalid_request(f"The body is not valid JSON: it is {fault}.") from None
        if field := non_finite_field(body):
            raise invalid_request(f"{field} {FINITE}.", field) from None
        raise invalid_request(f"The body is not valid JSON: {error}.") from None
    if not isinstance(fields, dict):
        raise invalid_request("The body must be a JSON object.")
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH and depth(fields) > MAX_DEPTH:  # cheap check first
        raise invalid_request(f"The body is nested more than {MAX_DEPTH} levels deep.")
    return fields


def non_finite_field(body: bytes) -> str:
    """Return the path of the first field that is NaN or Infinity; "" if there is none, or if more is wrong."""
    try:
        layer = [("", pydantic_core.from_json(without_mark(body)))]
    except ValueError:
        return ""
    while layer:
        inner = []
        for path, value in layer:
            if isinstance(value, float) and not math.isfinite(value):
                return path[:MAX_PATH]
            if isinstance(value, list):
                inner += [(f"{path}[{at}]", each) for at, each in enumerate(value)]
            elif isinstance(value, dict):
                inner += [(f"{path}.{name}" if path else name, each) for name, each in value.items()]
        layer = inner
    return ""
