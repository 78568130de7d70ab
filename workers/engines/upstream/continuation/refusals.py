"""Refused rungs: remembers which ways of continuing an answer the servers have refused, so that each is tried once."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from penstock.engine import Request
from workers.engines.upstream.continuation.ladder import Rung

MAX_KNOWN = 1024


class RefusedRungs:
    """By prompt and text so far. It forgets the oldest."""

    def __init__(self) -> None:
        self._known: dict[int, frozenset[Rung]] = {}

    def note(self, request: Request, text: str, rungs: Collection[Rung]) -> None:
        """The servers have refused these rungs for the answer that begins with `text`."""
        if rungs and text:
            self._known[_digest(request, text)] = frozenset(rungs)
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]

    def of(self, request: Request, text: str) -> frozenset[Rung]:
        """The rungs that were refused."""
        return self._known.get(_digest(request, text), frozenset()) if self._known else frozenset()


def _digest(request: Request, text: str) -> int:
    return hash((msgspec.msgpack.encode(request.prompt), text))
