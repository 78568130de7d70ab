"""Tool calls on llama.cpp: the schema that forces a call, what a prompt says of it, and who reads it out of the text.

A forced call is held to a JSON schema of our own: the arguments of the one function, or an object with the name and the
arguments of one of several. A model that may choose marks its calls with tags, if its template teaches it to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from penstock.tools import Tool, Tools
from workers.engines.call_writer import NamedWriter, ObjectWriter, TagWriter

BEGIN_TAG = "<tool_call>"
OTHER_FORM = "<function="
"""In a template: its calls have the tags, but are no JSON between them."""


class CallWriter(Protocol):
    """Turns the text of an answer into the form that penstock/tools.py describes."""

    def write(self, text: str) -> str: ...

    def end(self, *, whole: bool) -> str:
        """The rest. `whole`: the text was not cut by a length limit."""
        ...


def writer_of(tools: Tools | None) -> CallWriter | None:
    """The writer of an answer; None: it has no calls."""
    if tools is None:
        return None
    if not tools.forced:
        return TagWriter()
    callable_ = tools.callable
    return NamedWriter(callable_[0].name) if len(callable_) == 1 else ObjectWriter()


def forced_schema(tools: Tools) -> dict[str, Any] | None:
    """The schema of the text of a forced call; None: the model may choose."""
    if not tools.forced:
        return None
    if len(tools.callable) == 1:
        return tools.callable[0].schema
    definitions: dict[str, Any] = {}
    calls = [_call_schema(tool, f"{number}_", definitions) for number, tool in enumerate(tools.callable)]
    return {"anyOf": calls, "$defs": definitions} if definitions else {"anyOf": calls}


def _call_schema(tool: Tool, prefix: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a call of this function. The function's own definitions move to the root, under other names."""
    arguments = _moved(tool.schema, prefix)
    for section in ("$defs", "definitions"):
        if isinstance(found := arguments.pop(section, None), dict):
            definitions |= {prefix + name: each for name, each in found.items()}
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(value: Any, prefix: str) -> Any:
    """A schema whose references are to definitions that got this prefix."""
    if isinstance(value, list):
        return [_moved(each, prefix) for each in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: _reference(each, prefix) if key == "$ref" and isinstance(each, str) else _moved(each, prefix)
        for key, each in value.items()
    }


def _reference(name: str, prefix: str) -> str:
    for section in ("#/$defs/", "#/definitions/"):
        if name.startswith(section):
            return f"#/$defs/{prefix}{name.removeprefix(section)}"
    return name


def instruction(tools: Tools) -> str:
    """What a prompt says of a forced call, for a template that knows no tools."""
    functions = "\n".join(json.dumps(tool.shown["function"], ensure_ascii=False) for tool in tools.callable)
    if len(tools.callable) == 1:
        return f"Call this function. Reply with its arguments as JSON, and with nothing else.\n{functions}"
    form = '{"name": ..., "arguments": {...}}'
    return f"Call one of these functions. Reply with {form} as JSON, and with nothing else.\n{functions}"


def answer_begin(tools: Tools) -> str:
    """How a forced call begins, behind a prompt whose template marks calls with tags."""
    if len(tools.callable) > 1:
        return f"{BEGIN_TAG}\n"
    return f'{BEGIN_TAG}\n{{"name": {json.dumps(tools.callable[0].name)}, "arguments": '
