"""Access table: who may call each route. The guard (api/auth/guard.py) refuses every route that is not in it.

A new route is refused until it has a row here. Method and `scope["path"]` alone select the row: no header can change
which row applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from starlette.routing import compile_path


class Access(Enum):
    """Who may call a route."""

    ANYONE = "anyone"
    CALLER = "caller"
    """The holder of any API key; without keys, anyone on this machine."""
    ADMIN = "admin"
    """The holder of an admin key; without keys, of the admin token."""
    METRICS = "metrics"
    """Anyone or an admin, as `[api] metrics` says."""


class Rule(NamedTuple):
    """One row of the table."""

    access: Access
    action: str = ""
    """Name of the action in the audit log; "" for a call that is not audited."""


class RouteMatch(NamedTuple):
    """The row that applies to a request, and the parameters in its path."""

    rule: Rule
    params: Mapping[str, str]


ANYONE, CALLER = Rule(Access.ANYONE), Rule(Access.CALLER)
ADMIN, METRICS = Rule(Access.ADMIN), Rule(Access.METRICS)

RULES: Mapping[str, Mapping[str, Rule]] = {
    "/v1/chat/completions": {"POST": CALLER},
    "/v1/completions": {"POST": CALLER},
    "/v1/models": {"GET": CALLER},
    "/v1/models/{model:path}": {"GET": CALLER},
    "/v1/jobs": {"POST": CALLER, "GET": CALLER},
    "/v1/jobs/{job_id}": {"GET": CALLER},
    "/v1/jobs/{job_id}/result": {"GET": CALLER},
    "/v1/jobs/{job_id}/events": {"GET": CALLER},
    "/v1/jobs/{job_id}/timing": {"GET": CALLER},
    "/v1/jobs/{job_id}/cancel": {"POST": CALLER},
    "/v1/files": {"POST": CALLER, "GET": CALLER},
    "/v1/files/{file_id}": {"GET": CALLER, "DELETE": CALLER},
    "/v1/files/{file_id}/content": {"GET": CALLER},
    "/v1/batches": {"POST": CALLER, "GET": CALLER},
    "/v1/batches/{batch_id}": {"GET": CALLER},
    "/v1/batches/{batch_id}/output": {"GET": CALLER},
    "/v1/batches/{batch_id}/errors": {"GET": CALLER},
    "/v1/batches/{batch_id}/cancel": {"POST": CALLER},
    "/v1/batches/{batch_id}/pause": {"POST": CALLER},
    "/v1/batches/{batch_id}/resume": {"POST": CALLER},
    "/admin/dlq": {"GET": ADMIN},
    "/admin/tenants": {"GET": ADMIN},
    "/admin/tenants/{tenant:path}": {"GET": ADMIN},
    "/admin/dlq/{letter_id}": {"GET": ADMIN, "DELETE": Rule(Access.ADMIN, "dead_letter.drop")},
    "/admin/dlq/{letter_id}/replay": {"POST": Rule(Access.ADMIN, "dead_letter.replay")},
    "/admin/webhooks": {"GET": ADMIN},
    "/admin/webhooks/{message_id}": {"GET": ADMIN},
    "/admin/webhooks/{message_id}/replay": {"POST": Rule(Access.ADMIN, "webhook.replay")},
    "/admin/pools": {"GET": ADMIN},
    "/admin/pools/{model:path}": {
        "GET": ADMIN,
        "PUT": Rule(Access.ADMIN, "pool.override"),
        "DELETE": Rule(Access.ADMIN, "pool.resume"),
    },
    "/healthz": {"GET": ANYONE},
    "/readyz": {"GET": ANYONE},
    "/version": {"GET": ANYONE},
    "/metrics": {"GET": METRICS},
    "/openapi.json": {"GET": ANYONE},
    "/": {"GET": ANYONE},
}


class AccessTable:
    """Finds the row of a request. It matches paths by the same patterns as the router."""

    def __init__(self) -> None:
        self._fixed = {path: rows for path, rows in RULES.items() if "{" not in path}
        self._patterns = [(compile_path(path)[0], rows) for path, rows in RULES.items() if "{" in path]
        # Nearly all requests have a fixed path: one dictionary look-up.
        self._exact = {
            (method, path): RouteMatch(rule, {}) for path in self._fixed for method, rule in RULES[path].items()
        }

    def methods(self, path: str) -> Mapping[str, Rule]:
        """Return the rows of a path, by method; empty for an unknown path."""
        return self._rows(path)[0]

    def find(self, method: str, path: str) -> RouteMatch | None:
        """Return the row of a request; None if there is none. HEAD has the row of GET."""
        if (found := self._exact.get((method, path))) is not None:
            return found
        rows, params = self._rows(path)
        rule = rows.get("GET" if method == "HEAD" else method)
        return None if rule is None else RouteMatch(rule, params)

    def _rows(self, path: str) -> tuple[Mapping[str, Rule], Mapping[str, str]]:
        if (rows := self._fixed.get(path)) is not None:
            return rows, {}
        for pattern, rows in self._patterns:
            if match := pattern.match(path):
                return rows, match.groupdict()
        return {}, {}
