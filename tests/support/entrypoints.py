"""Cases of vLLM's entrypoints, of bench/conformance/entrypoints.toml: documented requests and Penstock's answers."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import answer_checks

from bench.document import ENTRYPOINTS

MODEL, REAL = "sim", "small"
"""Simulated, and of llama.cpp: for what the simulated engine does not do."""
IGNORED = "ignored, and named in `X-Ignored-Fields`: "
PLAIN_FIELDS = frozenset({"model", "messages", "prompt", "max_tokens", "input", "query", "documents", "tokens"})
"""Fields that are in each request to a route: no row is about one of them alone."""
USUAL: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "chats": (
        "/v1/chat/completions",
        {"model": MODEL, "messages": [{"role": "user", "content": "What is 1+1?"}], "max_tokens": 5},
    ),
    "completions": ("/v1/completions", {"model": MODEL, "prompt": "Hello, my name is", "max_tokens": 5}),
}
"""Route and body of a group's cases; a row that names a route has its own body alone."""
TYPES = {"str": str, "int": int, "float": float, "list": list, "dict": dict, "bool": bool}


@dataclass(frozen=True, slots=True)
class EntrypointCase:
    """One request and its answer."""

    what: str
    """What vLLM does."""
    path: str
    body: Any = None
    """None: a GET."""
    status: int = 200
    has: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the answer by their paths, each with its value, its type or a check (`answer_checks`); of a stream
    below `chunks`, and "" is the whole answer."""
    instead: str = ""
    """What Penstock does instead, and why; `status` and `has` are then of that. "": the same."""

    @property
    def ignored(self) -> str:
        """The field that Penstock ignores and names in `X-Ignored-Fields`; "" if there is none."""
        return self.instead.removeprefix(IGNORED) if self.instead.startswith(IGNORED) else ""

    @property
    def without(self) -> tuple[Mapping[str, Any], ...]:
        """The request without one of the fields that the row is about, for each of them. To at least one, a row with
        the same answer as vLLM must not fit: else it would say nothing about these fields."""
        if self.instead or not isinstance(self.body, Mapping):
            return ()
        names = [name for name, value in self.body.items() if name not in PLAIN_FIELDS and value is not None]
        return tuple({key: value for key, value in self.body.items() if key != name} for name in names)


def _wanted(given: Any) -> Any:
    """A value, a type or a check."""
    if not isinstance(given, dict):
        return given
    if "type" in given:
        return TYPES[given["type"]]
    check = getattr(answer_checks, given["check"])
    return check(*given["of"]) if "of" in given else check


def _case(group: str, row: Mapping[str, Any]) -> EntrypointCase:
    path, usual = (row["path"], {}) if "path" in row else USUAL[group]
    body: Any = json.loads(row["body"]) if "body" in row else {} if usual else None
    return EntrypointCase(
        what=row["what"],
        path=path,
        body={**usual, **body} if usual else body,
        status=row.get("status", 200),
        has={at: _wanted(given) for at, given in row["has"].items()},
        instead=row.get("instead", ""),
    )


GROUPS: Mapping[str, tuple[EntrypointCase, ...]] = {
    group: tuple(_case(group, row) for row in rows)
    for group, rows in tomllib.loads(ENTRYPOINTS.read_text("utf-8")).items()
}
