"""Floods of refused requests: whoever sends too many is answered 429, without a line in the log or a byte of the body.

A refusal takes a token from a bucket: from that of the key, or without a valid key from that of the address. A bucket
holds what a minute brings. While it is empty, a request with a valid key is served as long as its head shows that its
body is no larger than a body may be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from starlette.types import Scope

from api.auth.hosts import Addresses
from api.auth.keys import Caller
from api.openai.errors import ApiError, retry_after
from api.settings import ApiSettings

FLOODED = "too_many_refusals"
REFUSED = frozenset((401, 403, 413, 421))
"""Statuses that take a token, whoever answers with them. Those of the guard take one whatever they are."""
BUCKET_S = 60.0
LOGIN = "/console/session"
MAX_SENDERS = 10_000
"""Buckets that are kept; beyond them, those that were used longest ago are forgotten."""


class Buckets:
    """Token buckets by sender, each full at first. `per_minute`: tokens that one holds, and gets in a minute."""

    def __init__(self, per_minute: int, now_s: Callable[[], float] = time.monotonic) -> None:
        self._token_s, self._now_s = BUCKET_S / per_minute, now_s
        self.full_at: dict[str, float] = {}
        """When each bucket will be full again; those that are full are left out, but for some."""

    def wait_s(self, sender: str) -> float:
        """Return how long the sender's bucket is empty; 0.0 if it holds a token."""
        now = self._now_s()
        return max(0.0, self.full_at.get(sender, now) - now - BUCKET_S + self._token_s)

    def take(self, sender: str) -> float:
        """Take a token, and return 0.0; of an empty bucket return how long it is empty."""
        if wait_s := self.wait_s(sender):
            return wait_s
        now = self._now_s()
        self.full_at[sender] = max(now, self.full_at.pop(sender, now)) + self._token_s
        while (oldest := next(iter(self.full_at))) != sender and (
            self.full_at[oldest] <= now or len(self.full_at) > MAX_SENDERS
        ):
            del self.full_at[oldest]
        return 0.0


class Floods:
    """Counts the refusals of one API process by sender: by key, or by address. Loopback and proxies, from where anybody
    may send, have no bucket of their own."""

    def __init__(self, settings: ApiSettings, addresses: Addresses) -> None:
        self._limit, self._body_limit, self._addresses = settings.refusals_per_minute, settings.body_limit, addresses
        self.buckets = Buckets(self._limit or 1)

    def check(self, scope: Scope) -> None:
        """Refuse at once what may cost something, of a sender whose bucket is empty: a login, and a body that may be
        too large. Raises ApiError (429)."""
        state = scope["state"]
        if scope["method"] not in ("POST", "PUT") or (state.get("caller") and self._is_small(state["headers"])):
            return
        if wait_s := self.buckets.wait_s(self._sender(scope)):
            raise self._flooded(wait_s)

    def count(self, scope: Scope) -> ApiError | None:
        """Count a refusal. Returns what the sender is told instead (429) if its bucket is empty."""
        if not self._limit or not (sender := self._sender(scope)):
            return None
        wait_s = self.buckets.take(sender)
        return self._flooded(wait_s) if wait_s else None

    def _flooded(self, wait_s: float) -> ApiError:
        message = (
            f"More than {self._limit} requests of this key or address were refused in a minute "
            "([api] refusals_per_minute). Correct the key, the address or the size of what is sent."
        )
        return ApiError(429, FLOODED, message, headers={**retry_after(wait_s), "Connection": "close"})

    def _sender(self, scope: Scope) -> str:
        """Return the name of a request's bucket; "" if it has none. Logins have one of their own: others of an address
        must not keep its admin out."""
        state = scope["state"]
        caller: Caller | None = state.get("caller")
        if caller and caller.name:
            return f"key {caller.name}"
        address = self._addresses.client_of(state["address"])
        return f"login {address}" if address and scope["path"] == LOGIN else address

    def _is_small(self, headers: Mapping[bytes, bytes]) -> bool:
        length = headers.get(b"content-length", b"")
        return length.isdigit() and int(length) <= self._body_limit and b"content-encoding" not in headers
