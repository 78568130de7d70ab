"""Audit log: one line for each change an operator made, or was refused: who, what, when, from where, and its outcome.

Its logger is heard whatever `[telemetry] log_level` says. Lines hold names, ids and addresses, never a key or its hash.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from starlette.types import Scope

from api.auth.access import RouteMatch
from api.auth.keys import Caller, Keyring
from api.openai.errors import ApiError

AUDIT = "penstock.audit"
MAX_TEXT = 256
"""Characters of an id that are logged."""
UNKNOWN = "admin.unknown"
"""What was refused at an address or with a method that no row of the access table has."""
REFUSED = (401, 403, 421)

log = logging.getLogger(AUDIT)


def begin(keyring: Keyring) -> None:
    """Say once, at the start of a process, which keys it knows."""
    log.setLevel(logging.INFO)
    known = [
        {"name": caller.name, "tenant": caller.tenant, "priority": caller.ceiling.value, "admin": caller.admin}
        for caller in keyring.callers
    ]
    admin = "keys" if known else "token" if keyring.has_admin_token else "nobody"
    log.info("keys known to this process", extra={"action": "keys.known", "known": known, "admin_by": admin})


def acted(scope: Scope, found: RouteMatch) -> None:
    """What an admin did, once it was answered."""
    state = scope["state"]
    status = state.get("status", 500)
    outcome = "done" if status < 400 else "refused" if status in REFUSED else "failed"
    _write(scope, found.rule.action, _target(found.params), outcome, status, state.get("audit", {}))


def refused(scope: Scope, found: RouteMatch | None, error: ApiError) -> None:
    """A call of an admin's route by somebody who may not. What its address holds may be anything, and is left out."""
    if error.status in REFUSED:
        action = UNKNOWN if found is None else found.rule.action or "admin.read"
        _write(scope, action, "", "refused", error.status, {"code": error.code})


def detail(scope: Scope, **fields: Any) -> None:
    """What else the line of this request is to say."""
    scope["state"].setdefault("audit", {}).update(fields)


def _write(scope: Scope, action: str, target: str, outcome: str, status: int, more: Mapping[str, Any]) -> None:
    state, client = scope["state"], scope.get("client")
    caller: Caller | None = state.get("caller")
    fields = {
        "action": action,
        "target": target,
        "outcome": outcome,
        "status": status,
        "who": (caller.name or caller.tenant) if caller else None,
        "tenant": caller.tenant if caller else None,
        "client": f"{client[0]}:{client[1]}" if client else None,
        "request_id": state["request_id"],
        "method": scope["method"],
    }
    level = logging.INFO if outcome == "done" else logging.WARNING
    log.log(level, "%s: %s", action, outcome, extra=fields | dict(more))


def _target(params: Mapping[str, str]) -> str:
    return ", ".join(params.values())[:MAX_TEXT]
