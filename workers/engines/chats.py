"""Chats of engines that render a model's own chat template: the prompt, the schema of a forced call, and the answer.

A template marks roles with control tokens; those that a message spells are cut in two (workers/engines/text.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

from msgspec.structs import replace

from penstock.engine import ChatTurn, Failure, Piece, Refused, Request
from penstock.tools import TEXT, Tool, Tools
from workers.engines.calls import BEGIN_TAG, NamedWriter, ObjectWriter, TagWriter
from workers.engines.reasoning import BEGIN, EFFORT_NAMES, END, ReasoningMarker
from workers.engines.schema import mapped, plain
from workers.engines.text import ControlTokens, TokenGate, joined, mended


def refused(message: str, param: str) -> Refused:
    """The refusal of a request by its own fault."""
    return Refused(Failure("invalid_request_error", message, 400, param))


def check_ids(ids: Iterable[int], vocabulary: int, param: str) -> None:
    """Raises Refused for a token that the model does not have. `vocabulary`: 0: unknown."""
    for each in ids if vocabulary else ():
        if not 0 <= each < vocabulary:
            raise refused(f"token {each} is not one of this model's {vocabulary}", param)


OTHER_FORM = "<function="
"""In a template: its calls have the tags, but are no JSON between them."""

PROBE = Tool("probe", "A function.")
"""Shown to a template, to find out whether it knows tools."""

Shown: TypeAlias = Sequence[Mapping[str, Any]]
"""Messages or tools as a chat template takes them."""
Variables: TypeAlias = Mapping[str, Any]
"""What a template is told beside them, by name."""
NONE: Variables = MappingProxyType({})
OF_TEMPLATE = "chat_template_kwargs"
"""The field of a request with the variables of its template."""


class Render(Protocol):
    """Renders a model's chat template, with `begins` up to where the assistant's answer begins. Raises Refused if the
    template rejects the conversation."""

    def __call__(
        self, messages: Shown, tools: Shown | None = None, variables: Variables = NONE, *, begins: bool = True
    ) -> str: ...


class ChatFormat:
    """Conversations of one model, and what its template knows."""

    def __init__(self, source: str, render: Render, control: ControlTokens) -> None:
        """`source`: of the template; "": the model has none."""
        self._source, self._render, self._control = source, render, control
        self.chat = bool(source)
        self.tools = self._knows_tools()
        """Whether the template shows tools to the model, and has it mark its calls in a way that TagWriter reads."""
        self.reasoning = END in source
        """Whether the template knows reasoning between tags."""
        self.reasoning_effort = any(name in source for name in EFFORT_NAMES)
        """Whether the template can be told how much the model shall reason, or whether at all."""

    @property
    def capabilities(self) -> dict[str, bool]:
        """Those of the model's card that follow from the template."""
        told = {"reasoning": self.reasoning, "reasoning_effort": self.reasoning_effort, "tools": self.tools}
        return told | {"chat": self.chat, "tokenize_chats": self.chat, "passes_fields": self.chat}

    def _knows_tools(self) -> bool:
        if BEGIN_TAG not in self._source or OTHER_FORM in self._source:
            return False
        asked = [{"role": "user", "content": "a"}]
        try:
            return self._render(asked, [PROBE.shown]) != self._render(asked)
        except Refused:
            return False

    def conversation(self, request: Request, *, begins: bool = True) -> list[str]:
        """The prompt of a conversation as texts that must be tokenised separately. Raises Refused."""
        turns, tools = request.turns, request.tools
        if not self.chat:
            raise refused("this model has no chat template: use /v1/completions", "messages")
        offered = None if tools is None else [tool.shown for tool in tools.callable]
        if tools is not None and not self.tools:
            before = turns[0].content + "\n\n" if turns[0].role == "system" else ""
            told = ChatTurn("system", before + instruction(tools))
            turns, offered = [told, *(turns[1:] if before else turns)], None
        (messages, shown, variables), mark = self._control.mark((messages_of(turns), offered, variables_of(request)))
        text = mended(self._render(messages, shown, variables, begins=begins))
        if tools is not None and tools.forced and self.tools:
            # How a forced call begins, whose template marks calls with tags.
            text += call_begin(tools.callable[0]) if len(tools.callable) == 1 else f"{BEGIN_TAG}\n"
        return text.split(mark) if mark else [text]


def opens_reasoning(prompt: str) -> bool:
    """Whether a prompt ends with the tag that begins reasoning."""
    return prompt.rstrip().endswith(BEGIN)


def variables_of(request: Request) -> dict[str, Any]:
    """The variables of the template that the request sets: its own, and how much the model shall reason. Raises
    Refused."""
    found = {} if (asked := request.passed.get(OF_TEMPLATE)) is None else asked
    if not isinstance(found, Mapping):
        raise refused(f"{OF_TEMPLATE} must be an object", OF_TEMPLATE)
    if (effort := request.reasoning) in ("", "default"):
        return dict(found)
    return {"enable_thinking": effort != "none", **({"reasoning_effort": effort} if effort != "none" else {}), **found}


def messages_of(turns: Sequence[ChatTurn]) -> list[dict[str, Any]]:
    """Turns as templates take them: with the arguments of calls as objects, and the names of the functions in the
    turns that hold their results."""
    names = {call.id: call.name for turn in turns for call in turn.calls}
    messages = []
    for turn in turns:
        message: dict[str, Any] = {"role": turn.role, "content": turn.content}
        if turn.calls:
            calls = [{"name": call.name, "arguments": _arguments(call.arguments)} for call in turn.calls]
            message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        if turn.call_id:
            message |= {"tool_call_id": turn.call_id, "name": names.get(turn.call_id, "")}
        messages.append(message)
    return messages


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def instruction(tools: Tools) -> str:
    """What a prompt says of a forced call, for a template that knows no tools."""
    functions = "\n".join(json.dumps(tool.shown["function"], ensure_ascii=False) for tool in tools.callable)
    if len(tools.callable) == 1:
        return f"Call this function. Reply with its arguments as JSON, and with nothing else.\n{functions}"
    form = '{"name": ..., "arguments": {...}}'
    return f"Call one of these functions. Reply with {form} as JSON, and with nothing else.\n{functions}"


def call_begin(tool: Tool) -> str:
    """How a call that is marked with tags begins, up to its arguments."""
    return f'{BEGIN_TAG}\n{{"name": {json.dumps(tool.name)}, "arguments": '


def answer_schema(request: Request) -> dict[str, Any] | None:
    """The plain schema that the text of the answer must follow, that of a forced call included; None: it is free.
    Raises UnusableSchemaError."""
    if request.tools is not None:
        return forced_schema(request.tools)
    asked = request.sampling.json_schema
    return None if asked is None else plain(asked or {"type": "object"})


def forced_schema(tools: Tools) -> dict[str, Any] | None:
    """The plain schema of the text of a forced call: the arguments of the one function, or an object with the name and
    the arguments of one of several. None: the model may choose. Raises UnusableSchemaError."""
    if not tools.forced:
        return None
    if len(tools.callable) == 1:
        return plain(tools.callable[0].schema)
    calls, defs = [], dict[str, Any]()
    for tool in tools.callable:
        arguments = plain(tool.schema, len(defs))
        defs |= arguments.pop("$defs", {})
        call = {"name": {"const": tool.name}, "arguments": arguments}
        calls.append({"type": "object", "properties": call, "required": [*call], "additionalProperties": False})
    return {"anyOf": calls, "$defs": defs}


_UNHELD = re.compile(r"\(\?<?[=!]|\\[1-9bB]|\\k<")
"""Look-around, back-references and bounds of words, which no grammar can hold."""

MAX_COUNT = 1000
"""Items and characters that a grammar counts; and those of all arrays and texts together a hundred times as many.
llama.cpp writes each of them out."""

MAX_PATTERNS = 3000
"""Characters of all patterns of a schema together, each as often as its pattern repeats it. A grammar library takes
about 0.3 ms and 10 kB for each."""

_COUNTS = ("Items", "Length", "Properties")
_NAMING = ("properties", "patternProperties", "unevaluatedProperties")


def as_grammar(schema: dict[str, Any]) -> dict[str, Any]:
    """A plain schema as an engine's grammar takes it: it holds what it knows of it, and the finished answer is checked
    against all of it. Patterns and counts that no grammar can hold are left out."""
    text = json.dumps(schema)
    limit = min(MAX_COUNT, 100 * MAX_COUNT // max(1, text.count('Items"') + text.count('Length"')))
    patterns = [*_patterns(schema)]
    sizes = sorted([(pattern_size(each), each) for each in patterns])
    ends = accumulate([size for size, _ in sizes])
    left = {each for (_, each), end in zip(sizes, ends, strict=True) if end > MAX_PATTERNS}
    left |= {each for each in patterns if _UNHELD.search(each)}
    return {**mapped(schema, lambda each: _held(each, limit, left)), "x-guidance": {"lenient": True}}


def _patterns(schema: Any) -> Iterator[str]:
    """Every pattern in a schema, as often as it stands there."""
    if isinstance(schema, Mapping):
        if isinstance(pattern := schema.get("pattern"), str):
            yield pattern
        yield from schema["patternProperties"] if isinstance(schema.get("patternProperties"), Mapping) else ()
    for each in schema.values() if isinstance(schema, Mapping) else schema if isinstance(schema, list) else ():
        yield from _patterns(each)


_PATTERN_PART = re.compile(r"\\.|\[(?:\\.|[^\]])*\]|\(|\)|\{(\d+)(?:,(\d*))?\}|.", re.DOTALL)


def pattern_size(pattern: str) -> int:
    """The characters of a pattern, each as often as the pattern repeats it. A range counts twice where what it repeats
    holds repetitions: there are many ways then to read one text."""
    groups = [[0, 0]]
    """Size and repetitions of each open group."""
    last = [0, 0]
    for part in _PATTERN_PART.finditer(pattern):
        if part[0] == "(":
            groups.append([0, 0])
        elif part[1] is not None:
            times = max(1, int(part[2] or part[1]))
            grown = last[0] * (times * times if part[2] is not None and last[1] else times) - last[0]
            last = [last[0] + grown, 1]
            groups[-1] = [groups[-1][0] + grown, 1]
        else:
            last = groups.pop() if part[0] == ")" and len(groups) > 1 else [1, 0]
            groups[-1] = [groups[-1][0] + last[0], groups[-1][1] or last[1]]
    return sum([size for size, _ in groups])


def _held(schema: dict[str, Any], limit: int, left: Collection[str]) -> dict[str, Any]:
    if isinstance(pattern := schema.get("pattern"), str) and pattern in left:
        del schema["pattern"]
    if isinstance(named := schema.get("patternProperties"), Mapping):
        schema["patternProperties"] = {name: each for name, each in named.items() if name not in left}
    if schema.get("type") == "object" and schema.keys().isdisjoint(_NAMING):
        schema.setdefault("additionalProperties", True)  # xgrammar would let it have no property
    for counted in _COUNTS:
        if _number(schema.get(f"min{counted}")) > limit:
            schema[f"min{counted}"] = limit
        if _number(schema.get(f"max{counted}")) > limit:
            del schema[f"max{counted}"]
    return schema


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else 0


Writer: TypeAlias = TagWriter | NamedWriter | ObjectWriter


def writer_of(tools: Tools | None) -> Writer | None:
    """The writer of an answer; None: it has no calls. A model that may choose marks its calls with tags."""
    if tools is None:
        return None
    if not tools.forced:
        return TagWriter()
    callable_ = tools.callable
    return NamedWriter(callable_[0].name) if len(callable_) == 1 else ObjectWriter()


class AnswerText:
    """The text of one answer as its readers get it: with marks for reasoning and calls, up to its stop strings.

    The tokens that have passed are always a prefix of those generated, so another attempt can continue after them.
    """

    def __init__(self, request: Request, *, opened: bool = False) -> None:
        """`opened`: the prompt ends with the tag that begins reasoning."""
        self._id = request.id
        self._gate = TokenGate(request.sampling.stop, request.past_text)
        self._writer = writer_of(request.tools)
        free = request.sampling.json_schema is None and not (request.tools is not None and request.tools.forced)
        self._reasoning = ReasoningMarker(request.past_text, opened=opened) if request.reasoning and free else None

    @property
    def hit(self) -> bool:
        """Whether a stop string has ended it."""
        return self._gate.hit

    def feed(self, piece: Piece) -> Piece:
        """What may pass now of what the model wrote, as one piece, which may be empty."""
        if self._reasoning is not None:
            piece = self._reasoning.feed(piece)
        if self._writer is not None:
            piece = replace(piece, text=self._called(self._writer, piece.text))
        return self._gate.feed(piece) if piece.n or piece.text else piece

    def rest(self, *, whole: bool) -> Piece:
        """What was held back, once the generation ended. `whole`: nothing cut the answer."""
        rest = Piece(self._id) if self._reasoning is None else self._reasoning.flush(self._id)
        if self._writer is not None:
            rest = replace(rest, text=self._called(self._writer, rest.text) + self._writer.end(whole=whole))
        return joined(self._id, (self._gate.feed(rest), self._gate.flush(self._id)))

    def _called(self, writer: Writer, text: str) -> str:
        """The text with marks for the calls behind its reasoning."""
        thought, mark, said = text.rpartition(TEXT) if self._reasoning is not None else ("", "", text)
        if not said or (not mark and self._reasoning is not None and self._reasoning.inside):
            return text
        return thought + mark + writer.write(said)
