"""JSON body of a request: a JSON object, parsed within bounds of weight and depth."""

from __future__ import annotations

from typing import Any

import pydantic_core

from api.openai.errors import invalid_request
from api.openai.fields import depth
from api.openai.json_weight import check_weight

MAX_DEPTH = 32
"""Levels of nested JSON."""


def read_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object of bounded weight and depth. Raises ApiError (400)."""
    check_weight(body)
    try:
        fields = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:  # its text says what was expected, at which line and column
        raise invalid_request(f"The body is not valid JSON: {error}.") from None
    if not isinstance(fields, dict):
        raise invalid_request("The body must be a JSON object.")
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH and depth(fields) > MAX_DEPTH:  # cheap check first
        raise invalid_request(f"The body is nested more than {MAX_DEPTH} levels deep.")
    return fields
