"""Answers of the simulated engine: texts, token counts, results of tasks, and calls, as functions of the prompt alone.

It calls a function whenever it may, except after the result of a call: so an agent's loop ends.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engine import CHARACTERS_PER_TOKEN, ChatTurn, Input, Logprob, Request, Sampling, Task
from penstock.tools import Tool, Tools, opened
from workers.engines.schema import UnusableSchemaError, plain
from workers.engines.task_answers import joined_vectors, reported_tokens

WORDS_PER_STRING = 6
MAX_VALUES, MAX_DEPTH = 10_000, 200
"""Of the arguments of a call: references may double them with each step."""


def call_tokens(request: Request) -> tuple[str, ...]:
    """The tokens of the calls that answer a request; () if text does."""
    tools, turns = request.tools, request.turns
    if tools is None or not turns or (turns[-1].role == "tool" and not tools.forced):
        return ()
    prompt = prompt_text(request.prompt)
    tokens: list[str] = []
    for tool in _called(tools, turns[-1].content):
        arguments = json.dumps(_arguments(tool.schema, prompt), ensure_ascii=False)
        pieces = [arguments[at : at + CHARACTERS_PER_TOKEN] for at in range(0, len(arguments), CHARACTERS_PER_TOKEN)]
        tokens += [opened(tool.name) + pieces[0], *pieces[1:]]
    return tuple(tokens)


def _called(tools: Tools, asked: str) -> list[Tool]:
    """The functions that the last turn names, or else the first one."""
    named = [tool for tool in tools.callable if tool.name in asked] or [tools.callable[0]]
    return named if tools.parallel else named[:1]


def _arguments(schema: Mapping[str, Any], prompt: str) -> Any:
    """Arguments that follow a schema, as far as its usual words say; {} if it cannot be used or asks for too much."""
    try:
        root = plain(schema)
        return _Values(root.get("$defs", {})).of(root, prompt)
    except UnusableSchemaError:
        return {}


class _Values:
    """Values of the schemas in one plain schema."""

    def __init__(self, defs: Mapping[str, Any]) -> None:
        self._defs, self._left = defs, MAX_VALUES

    def of(self, schema: Any, prompt: str, refs: tuple[str, ...] = (), depth: int = 0) -> Any:
        """A value of a schema. `refs`: the references that led to it; once one of them has come twice, the value is as
        small as the schema allows. Raises UnusableSchemaError."""
        self._left -= 1
        if self._left < 0 or depth > MAX_DEPTH:
            raise UnusableSchemaError("it has too many values")
        if not isinstance(schema, Mapping):
            return None
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            return self.of(self._defs[name], prompt, (*refs, name), depth + 1)
        if "const" in schema:
            return schema["const"]
        for several in ("enum", "examples"):
            if isinstance(values := schema.get(several), list) and values:
                return values[zlib.crc32(prompt.encode()) % len(values)]
        for several in ("anyOf", "oneOf", "allOf"):
            if values := schema.get(several):
                chosen = min(values, key=_is_nested) if _recurs(refs) else values[0]
                return self.of(chosen, prompt, refs, depth + 1)
        return self._of_type(schema, prompt, refs, depth + 1)

    def _of_type(self, schema: Mapping[str, Any], prompt: str, refs: tuple[str, ...], depth: int) -> Any:
        kind = schema.get("type", "object" if "properties" in schema else "string")
        match kind[0] if isinstance(kind, list) and kind else kind:
            case "object":
                named = schema.get("properties", {})
                needed = schema.get("required", ()) if _recurs(refs) else named
                return {name: self.of(named.get(name), f"{prompt}/{name}", refs, depth) for name in needed}
            case "array":
                least = schema.get("minItems")
                count = min(8, least if isinstance(least, int) else 0 if _recurs(refs) else 1)
                return [self.of(schema.get("items"), f"{prompt}/{at}", refs, depth) for at in range(count)]
            case "integer" | "number":
                least = schema.get("minimum")
                return least if isinstance(least, int | float) else zlib.crc32(prompt.encode()) % 100
            case "boolean":
                return True
            case "null":
                return None
            case _:
                return "".join([token_text(prompt, index) for index in range(WORDS_PER_STRING)])


def _recurs(refs: Sequence[str]) -> bool:
    return len(set(refs)) < len(refs)


def _is_nested(schema: Any) -> bool:
    return isinstance(schema, Mapping) and ("$ref" in schema or schema.get("type") in ("object", "array"))


SIZE = 64
"""Numbers of a vector, unless a request asks for others."""
MAX_SIZE = 4096
WORD = re.compile(r"\w+")


def input_tokens(each: Input) -> int:
    return count_tokens(each) if isinstance(each, str) else len(each)


def task_answer(request: Request, task: Task, context: int) -> str:
    """The text of the piece that answers a task. `context`: of the model, in tokens."""
    match task.kind:
        case "embed":
            return joined_vectors([vector(prompt_text(each), task.dimensions or SIZE) for each in request.inputs])
        case "rerank":
            query, *documents = [prompt_text(each) for each in request.inputs]
            return json.dumps([score(query, document) for document in documents])
        case "tokenize":
            return reported_tokens(token_ids(prompt_text(request.prompt)), context)
        case _:
            return "".join([f"{INNER[number % len(INNER)]}{number}" for number in request.ids])


def vector(text: str, size: int) -> array[float]:
    """A vector of length 1: each word adds its own direction, so that texts with the same words are close."""
    total = [0.0] * size
    for word in WORD.findall(text.lower()) or [text]:
        for at in range(size):
            total[at] += zlib.crc32(f"{word}/{at}".encode()) / 2**31 - 1
    length = math.sqrt(sum(each * each for each in total)) or 1.0
    return array("f", [each / length for each in total])


def score(query: str, document: str) -> float:
    """The share of the query's words that the document has, and a little less the longer it is."""
    asked, found = set(WORD.findall(query.lower())), set(WORD.findall(document.lower()))
    return round(len(asked & found) / max(1, len(asked)) - len(document) / 1e6, 6)


def row(text: str, number: int, alternatives: int) -> Logprob:
    """The log-probability of a token, which is the likeliest of all; `number`: its checksum."""
    value = -(number % 1000) / 250
    others = [(INNER[(number + place) % len(INNER)], value - place) for place in range(1, alternatives)]
    return Logprob(text, value, tuple([(text, value), *others][:alternatives]))


def prompt_rows(prompt: Sequence[ChatTurn] | str | Sequence[int], alternatives: int) -> tuple[Logprob, ...]:
    """Those of a prompt's tokens, as `token_ids` has them; each depends on the token and its place alone."""
    if isinstance(prompt, str):
        texts = pieces_of(prompt)
    else:
        texts = [f"{INNER[each % len(INNER)]}{each}" for each in prompt if isinstance(each, int)]
    rows = [row(text, zlib.crc32(f"{text}{place}".encode()), alternatives) for place, text in enumerate(texts)]
    return (Logprob(texts[0], math.nan), *rows[1:])


def pieces_of(text: str) -> list[str]:
    """The text of each token: CHARACTERS_PER_TOKEN characters, the last one with the rest."""
    starts = range(0, count_tokens(text) * CHARACTERS_PER_TOKEN, CHARACTERS_PER_TOKEN)
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


def token_ids(text: str) -> list[int]:
    """As many as the engine counts."""
    return [zlib.crc32(piece.encode()) & 0x7FFFFFFF for piece in pieces_of(text)]


WORDS = tuple(
    "amber brook cedar delta ember fjord grove haven inlet jetty kelp lagoon mill north ocean pier quarry river sluice "  # noqa: SIM905
    "tide upland valve weir xylem yarrow zephyr basin canal drift eddy ford gate".split()
)


INNER = tuple(f" {word}" for word in WORDS)
"""The words as they follow another token."""


def prompt_text(prompt: Sequence[ChatTurn] | str | Sequence[int]) -> str:
    """Render a prompt as text."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join([_line(item) if isinstance(item, ChatTurn) else str(item) for item in prompt])


def _line(turn: ChatTurn) -> str:
    calls = "".join([f" {call.name}({call.arguments})" for call in turn.calls]) if turn.calls else ""
    return f"{turn.role}: {turn.content}{calls}"


def sampling_text(sampling: Sampling) -> str:
    """The sampling fields that change the answer, as a text that counts like an end of the prompt; "" if none is set.

    So a test sees from the answer whether the fields have reached the engine."""
    asked = ("top_k", sampling.top_k), ("min_p", sampling.min_p), ("repetition_penalty", sampling.repetition_penalty)
    bias = ("logit_bias", dict(sorted(sampling.logit_bias.items())) if sampling.logit_bias else None)
    return "".join([f"\n{name}={value}" for name, value in (*asked, bias) if value is not None])


def token_text(prompt: str, index: int) -> str:
    """The text of token `index` (from 0) of the answer to `prompt`."""
    number = zlib.crc32(f"{prompt}{index}".encode())
    return f"{(INNER if index else WORDS)[number % len(WORDS)]}{index}"


def count_tokens(prompt: str) -> int:
    """At least one, by the estimate."""
    return max(1, len(prompt) // CHARACTERS_PER_TOKEN)
