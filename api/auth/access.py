"""Access table: who may call each route. The guard (api/auth/guard.py) refuses every route that is not in it.

Its rows are those of api/routes.py. Method and `scope["path"]` alone select the row: no header can change which row
applies.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from starlette.routing import compile_path

if TYPE_CHECKING:
    from api.routes import Route

CONSOLE = "/console/"
"""Every address below it is the console's page."""
CLOSE = 0.85
"""Likeness of a path that is spelt wrongly; 1 is the same."""
MAX_MEANT = 256
"""Characters of a path for which the right one is searched."""
MAX_EXTRA_WORDS = 4


class Access(Enum):
    """Who may call a route."""

    ANYONE = "anyone"
    CALLER = "caller"
    """The holder of any API key; without keys, anyone on this machine."""
    ADMIN = "admin"
    """The holder of an admin key; without keys, of the admin token."""
    METRICS = "metrics"
    """Anyone or an admin, as `[api] metrics` says."""


class RouteMatch(NamedTuple):
    """The row that applies to a request, and the parameters in its path."""

    route: Route
    params: Mapping[str, str]


class AccessTable:
    """Finds the row of a request, and with it the endpoint: no path is one route to the guard and another behind it."""

    def __init__(self, routes: Iterable[Route]) -> None:
        by_path: dict[str, dict[str, Route]] = {}
        for route in routes:
            by_path.setdefault(route.path, {})[route.method] = route
        self._fixed = {path: rows for path, rows in by_path.items() if "{" not in path}
        self._patterns = [(compile_path(path)[0], rows) for path, rows in by_path.items() if "{" in path]
        # Nearly all requests have a fixed path: one dictionary look-up.
        self._exact = {
            (route.method, path): RouteMatch(route, {}) for path, rows in self._fixed.items() for route in rows.values()
        }

    def methods(self, path: str) -> Mapping[str, Route]:
        """Return the rows of a path, by method; empty for an unknown path."""
        return self._rows(path)[0]

    def meant(self, method: str, path: str) -> str:
        """Return the path, with this method, that a path without a route probably means: without repeated or other
        words at its front, with /v1, in lower case, or spelt a little otherwise; "" if there is none."""
        if len(path) > MAX_MEANT or self.methods(re.sub("(?<=/)(?=/[^/])", "-", path)):
            return ""  # too long, or an id was left out: no slash was written twice
        words = posixpath.normpath(f"/{path.strip()}").strip("/").split("/")
        for start in range(min(len(words), MAX_EXTRA_WORDS + 1)):
            rest = "/".join(words[start:])
            for found in (f"/{rest}", f"/v1/{rest}", f"/{rest}".lower(), f"/v1/{rest}".lower()):
                if self.find(method, found) is not None:
                    return found
        known = [each for each in self._fixed if self.find(method, each) is not None]
        return next(iter(get_close_matches(f"/{'/'.join(words)}".lower(), known, 1, CLOSE)), "")

    def find(self, method: str, path: str) -> RouteMatch | None:
        """Return the row of a request; None if there is none. HEAD has the row of GET."""
        if (found := self._exact.get((method, path))) is not None:
            return found
        rows, params = self._rows(path)
        route = rows.get("GET" if method == "HEAD" else method)
        return None if route is None else RouteMatch(route, params)

    def _rows(self, path: str) -> tuple[Mapping[str, Route], Mapping[str, str]]:
        if (rows := self._fixed.get(path)) is not None:
            return rows, {}
        for pattern, rows in self._patterns:
            if (match := pattern.match(path)) and ("" not in match.groups() or path.startswith(CONSOLE)):
                return rows, match.groupdict()
        return {}, {}
