"""The tables of docs/api.md show what the schemas say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from api.routes import ROUTES
from bench.document import MARKED
from bench.reference import CALLERS, WRITERS, endpoints, fields, headers, values

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 1024}, "whole number (1 to 1,024)"),
        ({"type": "integer", "minimum": -(2**63), "exclusiveMaximum": 2**63}, "whole number (-2^63 to 2^63 - 1)"),
        ({"type": "string", "maxLength": 8}, "text (at most 8 characters)"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "text"),
        ({"oneOf": [{"type": "string"}, {"type": "array", "items": {}}]}, "text, or list of anything"),
        ({"type": "array", "items": {"type": "boolean"}, "maxItems": 4}, "list (at most 4) of true or false"),
        ({"enum": ["a", "b"]}, "`a`, `b`"),
        ({"const": "text", "type": "string"}, "`text`"),
        ({"type": "object", "additionalProperties": {"type": "string"}}, "object of text"),
        ({"$ref": "#/components/schemas/QueueOptions"}, "[object](#queue)"),
        ({"$ref": "#/components/schemas/Usage"}, "Usage object"),
    ],
)  # fmt: skip
def test_a_schema_in_words(schema: dict[str, Any], words: str) -> None:
    assert values(schema) == words


def test_what_two_bodies_share_and_what_they_do_not() -> None:
    shared, chat = fields("ChatRequest/CompletionRequest"), fields("ChatRequest-CompletionRequest")
    assert "| `max_tokens` |" in shared and "| `messages` |" in chat and "| `logprobs` | true or false |" in chat
    both = shared.splitlines()[2:] + chat.splitlines()[2:]
    assert sorted(both) == sorted(fields("ChatRequest").splitlines()[2:])


def test_every_route_and_header_is_shown() -> None:
    page = PAGE.read_text(encoding="utf-8")
    marked = {(kind, name) for _, kind, name, _ in MARKED.findall(page)}
    shown = {who for kind, names in marked if kind == "endpoints" for who in names.split("/")}
    assert shown == set(CALLERS.values())
    for route in ROUTES:
        assert not route.summary or f"| `{route.method} {route.described_path}` |" in page
    assert {kind for kind, _ in marked} == set(WRITERS) - {"metrics"}
    assert "| `x-request-id` |" in headers("") and headers("").count("| all |") == 2
    assert "| 202 [Job](#the-job-object) |" in endpoints("caller")
