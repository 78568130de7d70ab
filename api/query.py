"""Query parameters: strict parsing of whole numbers from query strings and forms."""

from __future__ import annotations

import re

from starlette.datastructures import QueryParams

from api.openai import errors

MAX_PER_PAGE = 100
"""Rows on one page of a list; a list of files has its own bound."""
WHOLE = re.compile(r"([0-9]{1,15})(?:\.0{1,15})?")
"""With a bound, because int() raises on thousands of digits, and a URL may hold that many."""


def whole_number(text: str, param: str, minimum: int, maximum: int) -> int:
    """Return the value of parameter `param`. Raises ApiError (400)."""
    match = WHOLE.fullmatch(text)
    if match is None or not minimum <= int(match[1]) <= maximum:
        raise errors.invalid_request(f"{param} must be a whole number from {minimum} to {maximum}.", param)
    return int(match[1])


def page_limit(query: QueryParams, default: int, most: int) -> int:
    """The rows on a page, as `limit` asks. Raises ApiError (400)."""
    text = query.get("limit")
    return default if text is None else whole_number(text, "limit", 1, most)
