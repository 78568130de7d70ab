"""Tool calls in text: the writer that finds them, and the checks of what was found."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import pydantic_core

from penstock.engine import Failure
from penstock.extras import Extras, is_deep, joined_fields
from penstock.tools import TEXT, Call, Tools, opened, read_answer, without_marks
from workers.engines.constraint import FILTERED, begins_json
from workers.engines.text import begun_length, mended


class FoundCalls(NamedTuple):
    """The calls of a job's answers."""

    choices: frozenset[int]
    """Choices whose answer holds a call, and ended with it."""
    arguments: dict[str, list[str]]
    """By name of a strict function: the arguments of its calls, which must follow its schema."""


def check_calls(
    texts: Sequence[str], finishes: Sequence[str], tools: Tools, *, stops: bool = False
) -> FoundCalls | Failure:
    """Read the answers of a job that is over.

    Args:
        finishes: the finish reason of each; FILTERED and "length" mean that it was cut.
        stops: the request has stop strings, which may have cut it too.
    """
    strict = {tool.name for tool in tools.offered if tool.strict}
    found = FoundCalls(frozenset(), {})
    choices = set[int]()
    for index, (text, finish) in enumerate(zip(texts, finishes, strict=True)):
        calls = read_answer((text,)).calls
        stopped = stops and finish == "stop" and not (calls and _is_object(calls[-1].arguments))
        cut = stopped or finish in ("length", FILTERED)
        if problem := _problem(calls, tools, cut=cut):
            return violated(problem)
        if calls and not stopped:
            choices.add(index)
        for call in calls[:-1] if cut else calls:
            if call.name in strict:
                found.arguments.setdefault(call.name, []).append(call.arguments)
    return FoundCalls(frozenset(choices), found.arguments)


def _problem(calls: Sequence[Call], tools: Tools, *, cut: bool) -> str:
    """What is wrong with the calls of one answer; "" if nothing is."""
    if not calls and tools.forced and not cut:
        return "the answer calls no function"
    if len(calls) > 1 and not tools.parallel:
        return "the answer holds several calls"
    names = {tool.name for tool in tools.callable}
    for call in calls:
        if call.name not in names:
            return "the answer calls a function that was not offered"
        last_cut = cut and call is calls[-1]
        if not (begins_json(call.arguments) if last_cut else _is_object(call.arguments)):
            return f"the arguments of a call of {call.name} are no JSON object"
    return ""


def _is_object(text: str) -> bool:
    try:
        return isinstance(pydantic_core.from_json(text, allow_inf_nan=False), dict)
    except ValueError:
        return False


def violated(problem: str) -> Failure:
    """The failure of a job whose calls cannot be used."""
    message = f"The model did not call a tool as it was asked to: {problem}. Send the request again, or simplify tools."
    return Failure("constraint_violated", message, 500, "tools")


READ = frozenset({"id", "index", "type", "function", "name", "arguments"})
"""Fields of a call and of its function that are no extras."""
CALL_ID = re.compile(r"[\x21-\x7e]{1,128}")
"""An id of a server that a client can send back."""
NOTHING = "{}"
"""The arguments of a call that gives none."""


class DeltaWriter:
    """Writes the calls that OpenAI-compatible servers stream as `delta.tool_calls`.

    A server may give calls whole or in fragments, with an index or (some) only with ids. Fragments of one call must
    come before the next call begins.
    """

    def __init__(self) -> None:
        self._open = self._called = False
        """Whether a call is open; and whether the text is still in it."""
        self._argued = False
        """Whether the open call has arguments."""
        self._index: Any = None
        self._id = ""
        self._ids = set[str]()
        """The ids of all calls."""
        self._count = 0
        """Calls that have begun."""
        self.extras: Extras = {}
        """Of the calls of the last `write` (penstock/extras.py), with the ids that the server gave them."""

    def text(self, content: str) -> str:
        """The text of a chunk's content."""
        if not self._called:
            return without_marks(content)
        self._called = False
        return self.end() + TEXT + without_marks(content)

    def write(self, calls: Any) -> str:
        """The text of a chunk's calls. Raises ValueError if it is malformed or goes back to an earlier call."""
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise ValueError("tool_calls is no list")
        self.extras = {}
        return "".join([self._write(call) for call in calls])

    def end(self) -> str:
        """What completes the calls, once the server gave its finish reason."""
        missing = NOTHING if self._open and not self._argued else ""
        self._open, self._argued = False, False
        return missing

    def _write(self, call: Any) -> str:
        if not isinstance(call, dict) or not isinstance(function := call.get("function") or {}, dict):
            raise ValueError("a call is no object")
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        if isinstance(arguments, dict):  # whole, as some servers give it
            arguments = json.dumps(arguments, ensure_ascii=False)
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise ValueError("a call's name or its arguments are no text")
        text = ""
        if self._begins(call, name):
            text = self.end() + opened(name)
            self._open = self._called = True
            self._index, self._id = call.get("index"), call.get("id") or ""
            self._count += 1
        elif not self._open or call.get("index", self._index) != self._index:
            raise ValueError("a fragment of a call that is not open")
        self._argued = self._argued or bool(arguments)
        self._note_extras(call, function, begun=bool(text))
        return text + without_marks(arguments)

    def _note_extras(self, call: dict[str, Any], function: dict[str, Any], *, begun: bool) -> None:
        found = {name: value for name, value in call.items() if name not in READ and value is not None}
        of_function = {name: value for name, value in function.items() if name not in READ and value is not None}
        if of_function:
            found["function"] = of_function
        if is_deep(found):
            found = {}
        own = call.get("id")
        if begun and isinstance(own, str) and CALL_ID.fullmatch(own) and own not in self._ids:
            self._ids.add(own)
            found["id"] = own
        if found:
            number = str(self._count - 1)
            self.extras[number] = joined_fields(self.extras.get(number, {}), found)

    def _begins(self, call: dict[str, Any], name: str) -> bool:
        if not name:
            return False
        other_id = bool(call.get("id")) and call["id"] != self._id
        return not self._open or call.get("index") != self._index or other_id


BEGIN_TAG, END_TAG = "<tool_call>", "</tool_call>"


class TagWriter:
    """Writes the calls that a model marks with tags, as Hermes and Qwen do.

    A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. What is between the tags is written once it is
    complete.
    """

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._called = False

    def write(self, text: str) -> str:
        """The text that is now certain."""
        self._held += text
        out = ""
        while True:
            mark = END_TAG if self._inside else BEGIN_TAG
            before, found, after = self._held.partition(mark)
            if not found:
                break
            out += self._call(before) if self._inside else self._text(before)
            self._inside, self._held = not self._inside, after
        if not self._inside:
            keep = begun_length(self._held, BEGIN_TAG)
            ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
            out += self._text(ready)
        return out

    def end(self, *, whole: bool) -> str:
        """The rest, once the model has ended. A call without its end tag is left out, unless its JSON is whole."""
        rest, self._held = self._held, ""
        written = self._call(rest) if self._inside else self._text(rest)
        return "" if self._inside and not whole and written.startswith(opened("")) else written

    def _text(self, text: str) -> str:
        if self._called and not text.strip():
            return ""  # between two calls
        mark = TEXT if self._called and text else ""
        self._called = self._called and not text
        return mark + without_marks(text)

    def _call(self, text: str) -> str:
        self._called = True
        try:
            call = json.loads(text)
            name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
            written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return opened("") + without_marks(text)  # the check of the answer fails the job
        return mended(opened(str(name)) + without_marks(written))


class NamedWriter:
    """Writes the call of an answer that a grammar holds to the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._begin = opened(name)

    def write(self, text: str) -> str:
        begin, self._begin = self._begin, ""
        return begin + text

    def end(self, *, whole: bool) -> str:
        return ""


class ObjectWriter:
    """Writes the one call of an answer that a grammar holds to `{"name": "…", "arguments": {…}}`, as it comes."""

    _HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*')

    def __init__(self) -> None:
        self._head = ""
        self._open = False
        self._arguments = ""
        self._held = ""
        """The end of what came: its last brace closes the outer object."""

    def write(self, text: str) -> str:
        begin = ""
        if not self._open:
            self._head += text
            if (found := self._HEAD.match(self._head)) is None:
                return ""
            self._open, text = True, self._head[found.end() :]
            begin = mended(opened(str(json.loads(found[1]))))
        joined = self._held + text
        body = joined.rstrip()
        cut = len(body) - 1 if body.endswith("}") else len(joined)
        self._held = joined[cut:]
        self._arguments += joined[:cut]
        return begin + joined[:cut]

    def end(self, *, whole: bool) -> str:
        """The rest. `whole`: nothing cut the object. Then, and behind whole arguments, its last brace is not theirs."""
        if not self._open:  # a call that was cut before its arguments is left out
            return opened("") + without_marks(self._head) if self._head and whole else ""
        return "" if whole or _is_object(self._arguments) else self._held
