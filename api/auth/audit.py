"""Audit log: a line for each admin action, done or refused, and an entry in the store: who, what, when, from where,
with which outcome.

Its logger ignores `[telemetry] log_level`. Lines and entries hold names, ids and addresses, never a key or its hash.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.types import Scope

from api.auth.keys import Caller, Keyring
from api.openai.errors import ApiError
from streaming.fleet.audit import KEPT, AuditLog
from telemetry.redaction import clean

if TYPE_CHECKING:
    from api.routes import RouteMatch

AUDIT = "penstock.audit"
MAX_TEXT = 256
"""Characters of an id that are logged."""
UNKNOWN = "admin.unknown"
"""Action of a refused request for which the access table has no row."""
REFUSED = (401, 403, 421)
MAX_WAITING = 1_000
"""Entries of a kind that one process holds while the store is away; beyond them, the oldest have their line alone."""
MAX_AT_ONCE = 100
"""Entries of a kind that one call stores, in one round trip."""
MAX_ENTRY_BYTES = 4096

log = logging.getLogger(AUDIT)


def begin(keyring: Keyring) -> None:
    """Log the keys that this process knows; call it once at the start."""
    log.setLevel(logging.INFO)
    known = [
        {"name": caller.name, "tenant": caller.tenant, "priority": caller.ceiling.value, "admin": caller.admin}
        for caller in keyring.callers
    ]
    admin = "keys" if known else "token" if keyring.has_admin_token else "nobody"
    log.info("keys known to this process", extra={"action": "keys.known", "known": known, "admin_by": admin})


def detail(scope: Scope, **fields: Any) -> None:
    """Add fields to what the audit log has of this request."""
    scope["state"].setdefault("audit", {}).update(fields)


class Audit:
    """Writes the audit log of one API process: lines at once, entries whenever `store` is called."""

    def __init__(self, entries: AuditLog) -> None:
        self._entries = entries
        self._waiting: dict[str, deque[bytes]] = {kind: deque(maxlen=MAX_WAITING) for kind in KEPT}
        self.noted = asyncio.Event()
        """Whether entries wait to be stored."""

    def acted(self, scope: Scope, found: RouteMatch) -> None:
        """Note an admin action, after it was answered."""
        state = scope["state"]
        more = state.get("audit", {})
        target = ", ".join(found.params.values())[:MAX_TEXT] or more.get("key", "")
        self._note(scope, found.route.action, state.get("status", 500), more, target)

    def refused(self, scope: Scope, found: RouteMatch | None, error: ApiError) -> None:
        """Note a refused call of an admin route. Its path is untrusted, so the target is left out."""
        if error.status in REFUSED:
            action = UNKNOWN if found is None else found.route.action or "admin.read"
            self._note(scope, action, error.status, {"code": error.code})

    def logged_in(self, scope: Scope, error: ApiError | None) -> None:
        """Note that somebody opened a session of the console, or why they may not (`error`)."""
        status, more = (200, {}) if error is None else (error.status, {"code": error.code})
        self._note(scope, "console.login", status, more)

    async def store(self) -> None:
        """Store the oldest that wait, so many that no flood keeps this going. Raises Unavailable; the rest waits on."""
        found = [(kind, each) for kind, waiting in self._waiting.items() for each in islice(waiting, MAX_AT_ONCE)]
        self.noted.clear()
        try:
            await self._entries.add(sorted(found, key=lambda pair: pair[1]))  # each begins with its time
            for kind, each in found:
                if (waiting := self._waiting[kind]) and waiting[0] is each:  # else it had to make room
                    waiting.popleft()
        finally:
            if any(self._waiting.values()):
                self.noted.set()

    def _note(self, scope: Scope, action: str, status: int, more: Mapping[str, Any], target: str = "") -> None:
        state, client = scope["state"], scope.get("client")
        outcome = "done" if status < 400 else "refused" if status in REFUSED else "failed"
        caller: Caller | None = state.get("caller")
        fields = {
            "action": action,
            "target": target,
            "outcome": outcome,
            "status": status,
            "who": (caller.name or caller.tenant) if caller else None,
            "tenant": caller.tenant if caller else None,
            "address": state["address"],
            "request_id": state["request_id"],
        }
        level = logging.INFO if outcome == "done" else logging.WARNING
        line = {"client": f"{client[0]}:{client[1]}" if client else None, "method": scope["method"], **more}
        log.log(level, "%s: %s", action, outcome, extra=fields | line)
        fields = clean({"at": time.time(), **fields})
        data = msgspec.json.encode(fields | {"detail": clean(more)})
        if len(data) > MAX_ENTRY_BYTES:
            data = msgspec.json.encode(fields | {"detail": {"left_out": f"{len(data)} bytes: see the log's line"}})
        # Whoever was not let in decides how many of these there are.
        self._waiting["acts" if caller and (caller.admin or outcome != "refused") else "refusals"].append(data)
        self.noted.set()
