"""Calls of the simulated engine: chooses functions and invents arguments, both as a function of the prompt alone.

It calls a function whenever it may, except after the result of a call: so an agent's loop ends.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from penstock.engine import CHARACTERS_PER_TOKEN, ChatTurn, Request
from penstock.tools import Tool, Tools, opened
from workers.engines.sim.text import prompt_text, token_text

WORDS_PER_STRING = 6
MAX_REFERENCES = 100
"""One after the other: they may lead in a circle."""


def call_tokens(request: Request) -> tuple[str, ...]:
    """The tokens of the calls that answer a request; () if text does."""
    tools, turns = request.tools, [turn for turn in request.prompt if isinstance(turn, ChatTurn)]
    if tools is None or not turns or (turns[-1].role == "tool" and not tools.forced):
        return ()
    prompt = prompt_text(request.prompt)
    tokens: list[str] = []
    for tool in _called(tools, turns[-1].content):
        arguments = json.dumps(_instance(tool.schema, tool.schema, prompt), ensure_ascii=False)
        pieces = [arguments[at : at + CHARACTERS_PER_TOKEN] for at in range(0, len(arguments), CHARACTERS_PER_TOKEN)]
        tokens += [opened(tool.name) + pieces[0], *pieces[1:]]
    return tuple(tokens)


def _called(tools: Tools, asked: str) -> list[Tool]:
    """The functions that the last turn names, or else the first one."""
    named = [tool for tool in tools.callable if tool.name in asked] or [tools.callable[0]]
    return named if tools.parallel else named[:1]


def _instance(schema: Any, root: Any, prompt: str, refs: tuple[str, ...] = ()) -> Any:
    """A value of a JSON schema, as far as its usual words say. `refs`: the references that led to it; once one of them
    has come twice, the value is as small as the schema allows."""
    if not isinstance(schema, Mapping) or len(refs) > MAX_REFERENCES:
        return None
    if isinstance(name := schema.get("$ref"), str):
        target, document = _resolved(root, name)
        return _instance(target, document, prompt, (*refs, name))
    if "const" in schema:
        return schema["const"]
    for several in ("enum", "examples"):
        if isinstance(values := schema.get(several), list) and values:
            return values[zlib.crc32(prompt.encode()) % len(values)]
    for several in ("anyOf", "oneOf", "allOf"):
        if isinstance(values := schema.get(several), list) and values:
            chosen = min(values, key=_is_nested) if _recurs(refs) else values[0]
            return _instance(chosen, root, prompt, refs)
    return _of_type(schema, root, prompt, refs)


def _recurs(refs: Sequence[str]) -> bool:
    return len(set(refs)) < len(refs)


def _is_nested(schema: Any) -> bool:
    return isinstance(schema, Mapping) and ("$ref" in schema or schema.get("type") in ("object", "array"))


def _of_type(schema: Mapping[str, Any], root: Any, prompt: str, refs: tuple[str, ...]) -> Any:
    kind = schema.get("type", "object" if "properties" in schema else "string")
    match kind[0] if isinstance(kind, list) and kind else kind:
        case "object":
            fields = schema.get("properties")
            named = fields if isinstance(fields, Mapping) else {}
            needed = schema.get("required", ()) if _recurs(refs) else named
            return {name: _instance(named.get(name), root, f"{prompt}/{name}", refs) for name in needed}
        case "array":
            least = schema.get("minItems")
            count = min(8, least if isinstance(least, int) else 0 if _recurs(refs) else 1)
            return [_instance(schema.get("items"), root, f"{prompt}/{at}", refs) for at in range(count)]
        case "integer" | "number":
            least = schema.get("minimum")
            return least if isinstance(least, int | float) else zlib.crc32(prompt.encode()) % 100
        case "boolean":
            return True
        case "null":
            return None
        case _:
            return "".join([token_text(prompt, index) for index in range(WORDS_PER_STRING)])


def _resolved(root: Any, name: str) -> tuple[Any, Any]:
    """What a reference refers to, and the document that it is in; (None, root) if there is no such place."""
    base, _, fragment = name.partition("#")
    document = _found(root, "$id", base.rpartition("/")[2]) if base else root
    if fragment and not fragment.startswith("/"):
        return _found(document, "$anchor", fragment), document
    found = document
    for word in unquote(fragment).split("/")[1:]:
        step = word.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(step)] if step.isdecimal() and int(step) < len(found) else None
        else:
            found = found.get(step) if isinstance(found, Mapping) else None
    return found, document


def _found(schema: Any, keyword: str, name: str) -> Any:
    """The first schema in a document whose `$id` or `$anchor` ends with this name."""
    if isinstance(schema, Mapping):
        if isinstance(value := schema.get(keyword), str) and value.rpartition("/")[2] == name:
            return schema
        schema = list(schema.values())
    found = (_found(each, keyword, name) for each in schema) if isinstance(schema, list) else ()
    return next((each for each in found if each is not None), None)
