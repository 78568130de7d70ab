"""Audit log: writes one line for each admin action, done or refused: who, what, when, from where, with which outcome.

Its logger ignores `[telemetry] log_level`. Lines hold names, ids and addresses, never a key or its hash.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from api.auth.keys import Caller, Keyring
from api.openai.errors import ApiError

if TYPE_CHECKING:
    from api.routes import RouteMatch

AUDIT = "penstock.audit"
MAX_TEXT = 256
"""Characters of an id that are logged."""
UNKNOWN = "admin.unknown"
"""Action of a refused request for which the access table has no row."""
REFUSED = (401, 403, 421)

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


def acted(scope: Scope, found: RouteMatch) -> None:
    """Log an admin action, after it was answered."""
    state = scope["state"]
    target = ", ".join(found.params.values())[:MAX_TEXT]
    _write(scope, found.route.action, state.get("status", 500), state.get("audit", {}), target)


def refused(scope: Scope, found: RouteMatch | None, error: ApiError) -> None:
    """Log a refused call of an admin route. Its path is untrusted, so the target is left out."""
    if error.status in REFUSED:
        action = UNKNOWN if found is None else found.route.action or "admin.read"
        _write(scope, action, error.status, {"code": error.code})


def logged_in(scope: Scope, error: ApiError | None) -> None:
    """Log that somebody opened a session of the console, or why they may not (`error`)."""
    status, more = (200, {}) if error is None else (error.status, {"code": error.code})
    _write(scope, "console.login", status, more)


def detail(scope: Scope, **fields: Any) -> None:
    """Add fields to the audit line of this request."""
    scope["state"].setdefault("audit", {}).update(fields)


def _write(scope: Scope, action: str, status: int, more: Mapping[str, Any], target: str = "") -> None:
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
        "client": f"{client[0]}:{client[1]}" if client else None,
        "address": state["address"],
        "request_id": state["request_id"],
        "method": scope["method"],
    }
    level = logging.INFO if outcome == "done" else logging.WARNING
    log.log(level, "%s: %s", action, outcome, extra=fields | dict(more))
