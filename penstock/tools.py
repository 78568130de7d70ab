"""Tools: functions that a chat may call, the model's calls of them, and how calls are written in a generated text.

An engine writes a call into its text with control characters, which JSON and names cannot contain:

    text CALL name ARGUMENTS arguments CALL name ARGUMENTS arguments TEXT text

Reasoning that comes before an answer is marked likewise, and ends with the next mark:

    REASONING reasoning TEXT text

So a call is text like any other: the log keeps it, a replay compares it, and every reader derives the same calls, names
and numbers from it. The arguments are JSON. Text that an engine passes on has no such characters (`without_marks`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from penstock.extras import Extras

CALL, ARGUMENTS, TEXT, REASONING = "\x1e", "\x1f", "\x1d", "\x1c"
_MARK = re.compile("([\x1c-\x1f])")
_WITHOUT_MARKS = dict.fromkeys(map(ord, (CALL, ARGUMENTS, TEXT, REASONING)))

SAID, REASONED, REFUSED = -1, -2, -3
"""The `call` of a part that is text, of one that is reasoning, and of one that is a refusal."""

CallChoice: TypeAlias = Literal["auto", "required"]


class Tool(msgspec.Struct, frozen=True, array_like=True):
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments, an object; None: it takes none."""
    strict: bool = False
    """Whether the arguments are checked against the schema."""
    extras: Extras = {}
    """Further fields of the tool; its `function` holds those of the function."""

    @property
    def schema(self) -> dict[str, Any]:
        parameters = {"properties": {}} if self.parameters is None else self.parameters
        return {"type": "object", **parameters, **({"type": "object"} if "type" in parameters else {})}

    @property
    def shown(self) -> dict[str, Any]:
        """As chat templates and OpenAI's chats have it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        function["parameters"] = self.schema if self.parameters is None else self.parameters
        if self.strict:
            function["strict"] = True
        return shown_function(function, self.extras)


class Tools(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The functions of one chat, and whether the model must call one of them."""

    offered: tuple[Tool, ...]
    choice: CallChoice = "auto"
    """auto: the model answers with text or with calls; required: it must call."""
    named: str = ""
    """The one function that it must call; the choice is then `required`."""
    parallel: bool = True
    """Whether one answer may hold several calls."""

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The functions that may be called."""
        return tuple(tool for tool in self.offered if not self.named or tool.name == self.named)

    @property
    def forced(self) -> bool:
        return self.choice == "required"


class ToolCall(msgspec.Struct, frozen=True, array_like=True):
    """A call in the history of a chat."""

    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it."""
    extras: Extras = {}
    """Further fields of the call; its `function` holds those of the function."""

    @property
    def shown(self) -> dict[str, Any]:
        """As OpenAI's chats have it."""
        return {"id": self.id} | shown_function({"name": self.name, "arguments": self.arguments}, self.extras)


def shown_function(function: dict[str, Any], extras: Extras) -> dict[str, Any]:
    """A tool or a call of OpenAI's chats, with further fields of it and of its function."""
    if not extras:
        return {"type": "function", "function": function}
    return {**extras, "type": "function", "function": {**extras.get("function", {}), **function}}


class AnswerPart(NamedTuple):
    """A part of an answer: text, reasoning, a refusal, or a fragment of one call's arguments."""

    call: int
    """The call's number in the answer, from 0; SAID: text; REASONED: reasoning; REFUSED: a refusal."""
    name: str | None
    """The function's name, in the first part of a call; else None."""
    text: str
    extras: Extras = {}  # noqa: RUF012 - nobody writes to it
    """The extras of a call (penstock/extras.py)."""


class CallReader:
    """Reads the text of one answer as it comes, in parts."""

    def __init__(self) -> None:
        self.calls = 0
        """Calls that have begun."""
        self._name: str | None = None
        """The begin of a name that is not complete yet."""
        self._called = False
        """Whether what comes next are arguments."""
        self.reasons = False
        """Whether what comes next is reasoning."""
        self._fresh = False
        """Whether white space comes next that only separates reasoning from text."""

    def feed(self, text: str) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for piece in _MARK.split(text):
            if piece == CALL:
                self._name, self.reasons, self._fresh = "", False, False
            elif piece == REASONING:
                self.reasons, self._called, self._fresh = True, False, True
            elif piece == ARGUMENTS:
                parts.append(AnswerPart(self.calls, self._name or "", ""))
                self.calls += 1
                self._name, self._called = None, True
            elif piece == TEXT:
                self._fresh, self.reasons, self._called = self.reasons, False, False
            elif piece:
                self._add(parts, piece)
        return parts

    def _add(self, parts: list[AnswerPart], piece: str) -> None:
        if self._fresh:
            piece = piece.lstrip()
            self._fresh = not piece
        if not piece:
            return
        if self._name is not None:
            self._name += piece
        elif not self._called:
            parts.append(AnswerPart(REASONED if self.reasons else SAID, None, piece))
        elif parts and parts[-1].call == self.calls - 1:
            last = parts.pop()
            parts.append(AnswerPart(last.call, last.name, last.text + piece))
        else:
            parts.append(AnswerPart(self.calls - 1, None, piece))


class Call(NamedTuple):
    """A whole call of an answer."""

    name: str
    arguments: str


class Answer(NamedTuple):
    """A whole answer: its text, its calls in order, and the reasoning before it."""

    text: str
    calls: list[Call]
    reasoning: str


def read_answer(texts: Iterable[str]) -> Answer:
    """Read a whole answer, given in pieces."""
    reader, said, names, arguments = CallReader(), list[str](), list[str](), list[list[str]]()
    reasoned: list[str] = []
    for part in (part for text in texts for part in reader.feed(text)):
        if part.call < 0:
            (said if part.call == SAID else reasoned).append(part.text)
            continue
        if part.name is not None:
            names.append(part.name)
            arguments.append([])
        arguments[part.call].append(part.text)
    calls = [Call(name, "".join(pieces)) for name, pieces in zip(names, arguments, strict=True)]
    return Answer("".join(said), calls, "".join(reasoned))


def without_marks(text: str) -> str:
    """Text as it may stand in an answer."""
    return text if _MARK.search(text) is None else text.translate(_WITHOUT_MARKS)


def opened(name: str) -> str:
    """The begin of a call; its arguments follow."""
    return f"{CALL}{without_marks(name)}{ARGUMENTS}"
