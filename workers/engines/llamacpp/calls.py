"""Tool calls on llama.cpp: the schema that forces a call, what a prompt says of it, and who reads it out of the text.

A forced call is held to a JSON schema of our own: the arguments of the one function, or an object with the name and the
arguments of one of several. A model that may choose marks its calls with tags, if its template teaches it to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from penstock.tools import Tools
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
    schemas = [tool.schema for tool in tools.callable]
    documents = {str(number): _document(schemas[:number], schema) for number, schema in enumerate(schemas)}
    calls = [
        _call_schema(tool.name, each["$id"]) for tool, each in zip(tools.callable, documents.values(), strict=True)
    ]
    return {"anyOf": calls, "$defs": documents}


def _document(before: Sequence[Mapping[str, Any]], schema: dict[str, Any]) -> dict[str, Any]:
    """A function's schema as a document of its own within another one, by an `$id`: so its local references keep their
    meaning. `before`: those of the functions before it, of which none may have the same."""
    named = schema.get("$id")
    if isinstance(named, str) and named not in [each.get("$id") for each in before]:
        return schema
    return schema | {"$id": f"https://penstock.invalid/{len(before)}"}


def _call_schema(name: str, arguments: str) -> dict[str, Any]:
    """The schema of a call of this function. `arguments`: the `$id` of their schema."""
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": arguments}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


_LOOK_AROUND = re.compile(r"\(\?<?[=!]|\\[1-9]|\\k<")


def as_grammar(schema: Any, *, root: bool = True) -> Any:
    """A schema as llama.cpp's grammar takes it: it holds what it knows of it, and the finished answer is checked
    against all of it. Patterns with look-around or back-references are left out: no grammar can hold them."""
    if isinstance(schema, list):
        return [as_grammar(each, root=False) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {
        name: value if name in ("const", "enum") else as_grammar(value, root=False)
        for name, value in schema.items()
        if not (name == "pattern" and isinstance(value, str) and _LOOK_AROUND.search(value))
    }
    return kept | {"x-guidance": {"lenient": True}} if root else kept


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
