"""Checks of what the client sends: addresses of servers, values of headers, and bodies, which become JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from penstock.client_messages import InvalidRequest

VALUE = re.compile(r"([!-~]([ -~]*[!-~])?)?")
ARGUMENTS = {"Authorization": "key", "Idempotency-Key": "idempotency_key", "Last-Event-ID": "after"}
"""The argument of the client that becomes a header."""


def is_address(url: str) -> bool:
    """Whether this can be the address of a server."""
    try:
        parts = urlsplit(url)
        return url.startswith(("http://", "https://")) and bool(parts.hostname) and parts.port != 0
    except ValueError:  # half an IPv6 address, or a port that is none
        return False


def check_headers(headers: Mapping[str, str]) -> None:
    """Raises InvalidRequest, which does not show the value: it may be the API key."""
    for name, value in headers.items():
        if not VALUE.fullmatch(value):
            argument = ARGUMENTS.get(name, f"the header {name}")
            raise InvalidRequest(f"{argument} must be printable ASCII, without spaces around it")


def json_bytes(body: Any) -> bytes:
    """Raises InvalidRequest."""
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:  # an object of another type; NaN, or half a surrogate pair
        raise InvalidRequest(f"the body is no JSON: {error}") from None
