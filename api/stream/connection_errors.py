"""Connection errors: the answers to requests that the server refuses before any endpoint sees them."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from api.error_answers import error_body
from api.openai.errors import ApiError, retry_after

CONNECTION_RETRY_S = 5
"""Retry-After for a client that was refused a connection."""


def invalid_http(reason: str) -> ApiError:
    return ApiError(400, "invalid_http", f"The request is not valid HTTP: {reason}.")


def headers_too_large(max_bytes: int, max_fields: int) -> ApiError:
    message = (
        f"The request line and header fields have more than {max_bytes} bytes or {max_fields} fields "
        "([api] max_header_bytes, max_headers). Large cookies of other local sites are a common cause; send fewer."
    )
    return ApiError(431, "headers_too_large", message)


def request_timeout(what: str, setting: str) -> ApiError:
    """`what` did not arrive in the time that a setting of [api] gives it."""
    message = f"The request's {what} did not arrive in time ([api] {setting}). Nothing was accepted."
    return ApiError(408, "request_timeout", message)


def too_many_connections(most: int) -> ApiError:
    message = f"This server has the {most} connections it takes in all ([api] max_connections). Try later."
    return _no_connection(message)


def too_many_connections_of_a_client(most: int) -> ApiError:
    message = (
        f"Your address has the {most} connections that this server takes from one ([api] max_connections_per_client). "
        "Close some; if it is a proxy's, add it to [api] trusted_proxies."
    )
    return _no_connection(message)


def _no_connection(message: str) -> ApiError:
    return ApiError(503, "too_many_connections", message, headers=retry_after(CONNECTION_RETRY_S))


def answer_of(error: ApiError, count: Callable[[str], object]) -> bytes:
    """A whole HTTP answer, the last one of its connection, which `count` counts."""
    body = error_body(error, count)
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in (headers | error.headers).items())
    head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n{lines}\r\n"
    return head.encode("latin-1") + body
