"""Refused fields: known fields of chats and completions that are refused, each with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api.openai.errors import invalid_request
from api.openai.fields import OTHERS_PRIORITY, QueueOptions

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "suffix": ("",),
    "best_of": (),
    "webhook": (),
}
"""Known fields that are not supported, each with its neutral values, which are accepted (like null)."""

CHAT_ONLY: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "reasoning_effort": ("none",),
}
"""Fields of a chat that have no place in a completion, with their neutral values."""

COMPLETION_ONLY: Mapping[str, tuple[Any, ...]] = {"echo": (False,)}
"""Fields of a completion that have no place in a chat, with their neutral values."""

REMEDIES: Mapping[str, str] = {
    "functions": "Use tools, its newer name.",
    "function_call": "Use tool_choice, its newer name.",
    "suffix": "Put it into the prompt, between the fill-in-the-middle tokens of the model, if it has any.",
    "echo": "Put the last message in front of the answer yourself; completions have it.",
    "best_of": "Ask for n answers and choose among them.",
    "webhook": "Use queue.webhook, which names a webhook of the settings.",
}
"""What to do instead of using a field; for all others, leave it out."""

_AS_SCHEMA = "Use response_format with type 'json_schema' and "

CONSTRAINTS: Mapping[str, str] = {
    "guided_json": _AS_SCHEMA + "the schema in json_schema.schema.",
    "guided_regex": _AS_SCHEMA + 'the schema {"type": "string", "pattern": ...}.',
    "guided_choice": _AS_SCHEMA + 'the schema {"enum": [...]}.',
    "guided_grammar": _AS_SCHEMA + "a schema instead of a grammar.",
    "structured_outputs": _AS_SCHEMA + "the schema in json_schema.schema.",
    "structural_tag": _AS_SCHEMA + "a schema instead of tags.",
    "json_schema": _AS_SCHEMA + "the schema in json_schema.schema.",
    "regex": _AS_SCHEMA + 'the schema {"type": "string", "pattern": ...}.',
    "grammar": _AS_SCHEMA + "a schema instead of a grammar.",
    "ebnf": _AS_SCHEMA + "a schema instead of a grammar.",
}
"""Fields by which other servers constrain the output, with the supported alternative. Null is accepted."""


_QUEUE_FIELDS = frozenset(QueueOptions.model_fields)
_LOOKED_AT = frozenset({*UNSUPPORTED, *CHAT_ONLY, *COMPLETION_ONLY, *CONSTRAINTS, *_QUEUE_FIELDS})


def refuse_fields(fields: Mapping[str, Any], *, chat: bool) -> None:
    """Refuse the known fields of a chat (`chat`) or completion that nothing here honours. Raises ApiError (400)."""
    if _LOOKED_AT.isdisjoint(fields):
        return
    unsupported = {**UNSUPPORTED, **(COMPLETION_ONLY if chat else CHAT_ONLY)}
    for name, value in fields.items():
        if value is None:
            continue
        if name in CONSTRAINTS:
            raise invalid_request(f"{name} is not supported here. {CONSTRAINTS[name]}", name)
        if name in _QUEUE_FIELDS and value != OTHERS_PRIORITY:
            raise invalid_request(f"{name} has no effect there (did you mean queue.{name}?).", name)
        if name not in unsupported:
            continue
        neutral = (fields.get("n") or 1,) if name == "best_of" else unsupported[name]
        if value not in neutral:
            raise invalid_request(f"{name} is not supported here. {REMEDIES.get(name, 'Leave it out.')}", name)
