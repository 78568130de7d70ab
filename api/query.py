"""Query parameters: strict parsing of whole numbers from query strings and forms."""

from __future__ import annotations

from starlette.datastructures import QueryParams

from api.openai import errors

MAX_PER_PAGE = 100
"""Rows on one page of a list; a list of files has its own bound."""
MAX_DIGITS = 15
"""int() raises on thousands of digits, and a URL may hold that many."""


def whole_number(text: str, param: str, minimum: int, maximum: int) -> int:
    """Return the value of parameter `param`. Raises ApiError (400)."""
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS and minimum <= int(text) <= maximum):
        raise errors.invalid_request(f"{param} must be a whole number from {minimum} to {maximum}.", param)
    return int(text)


def page_limit(query: QueryParams, default: int, most: int) -> int:
    """The rows on a page, as `limit` asks. Raises ApiError (400)."""
    text = query.get("limit")
    return default if text is None else whole_number(text, "limit", 1, most)
