"""Calls of the simulated engine: chooses functions and invents arguments, both as a function of the prompt alone.

It calls a function whenever it may, except after the result of a call: so an agent's loop ends.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

from penstock.engine import CHARACTERS_PER_TOKEN, ChatTurn, Request
from penstock.tools import Tool, Tools, opened
from workers.engines.sim.text import prompt_text, token_text

WORDS_PER_STRING = 6
MAX_DEPTH = 16


def call_tokens(request: Request) -> tuple[str, ...]:
    """The tokens of the calls that answer a request; () if text does."""
    tools, turns = request.tools, [turn for turn in request.prompt if isinstance(turn, ChatTurn)]
    if tools is None or not turns or (turns[-1].role == "tool" and not tools.forced):
        return ()
    prompt = prompt_text(request.prompt)
    tokens: list[str] = []
    for tool in _called(tools, turns[-1].content):
        arguments = json.dumps(_instance(tool.schema, tool.schema, prompt, 0), ensure_ascii=False)
        pieces = [arguments[at : at + CHARACTERS_PER_TOKEN] for at in range(0, len(arguments), CHARACTERS_PER_TOKEN)]
        tokens += [opened(tool.name) + pieces[0], *pieces[1:]]
    return tuple(tokens)


def _called(tools: Tools, asked: str) -> list[Tool]:
    """The functions that the last turn names, or else the first one."""
    named = [tool for tool in tools.callable if tool.name in asked] or [tools.callable[0]]
    return named if tools.parallel else named[:1]


def _instance(schema: Any, root: Mapping[str, Any], prompt: str, level: int) -> Any:
    """A value of a JSON schema, as far as its usual words say."""
    if not isinstance(schema, Mapping) or level > MAX_DEPTH:
        return None
    if isinstance(name := schema.get("$ref"), str):
        return _instance(_resolved(root, name), root, prompt, level + 1)
    if "const" in schema:
        return schema["const"]
    for several in ("enum", "examples"):
        if isinstance(values := schema.get(several), list) and values:
            return values[zlib.crc32(prompt.encode()) % len(values)]
    for several in ("anyOf", "oneOf", "allOf"):
        if isinstance(values := schema.get(several), list) and values:
            return _instance(values[0], root, prompt, level + 1)
    return _of_type(schema, root, prompt, level)


def _of_type(schema: Mapping[str, Any], root: Mapping[str, Any], prompt: str, level: int) -> Any:
    kind = schema.get("type", "object" if "properties" in schema else "string")
    match kind[0] if isinstance(kind, list) and kind else kind:
        case "object":
            fields = schema.get("properties")
            named = fields.items() if isinstance(fields, Mapping) else ()
            return {name: _instance(each, root, f"{prompt}/{name}", level + 1) for name, each in named}
        case "array":
            least = schema.get("minItems")
            count = min(8, max(1, least if isinstance(least, int) else 1))
            return [_instance(schema.get("items"), root, f"{prompt}/{at}", level + 1) for at in range(count)]
        case "integer" | "number":
            least = schema.get("minimum")
            return least if isinstance(least, int | float) else zlib.crc32(prompt.encode()) % 100
        case "boolean":
            return True
        case "null":
            return None
        case _:
            return "".join([token_text(prompt, index) for index in range(WORDS_PER_STRING)])


def _resolved(root: Mapping[str, Any], name: str) -> Any:
    """What a reference inside the schema refers to; None if there is no such place."""
    found: Any = root
    for step in name.removeprefix("#").strip("/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found
