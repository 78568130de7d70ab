"""Numbers in a query string or a form, read strictly."""

from __future__ import annotations

from starlette.datastructures import QueryParams

from api.openai import errors

MAX_DIGITS = 15
"""Python refuses to read a number of some thousand digits, and a URL has room for them."""


def whole_number(text: str, param: str, least: int, most: int) -> int:
    """The value of `param`. Raises ApiError (400)."""
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS and least <= int(text) <= most):
        raise errors.invalid_request(f"{param} must be a whole number from {least} to {most}.", param)
    return int(text)


def page_limit(query: QueryParams, default: int, most: int) -> int:
    """The rows on a page, as `limit` asks. Raises ApiError (400)."""
    text = query.get("limit")
    return default if text is None else whole_number(text, "limit", 1, most)
