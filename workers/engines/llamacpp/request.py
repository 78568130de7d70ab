"""One llama.cpp request: builds the body of its completion call and converts the streamed chunks into pieces.

It knows the format of llama.cpp's completion messages, not how they are exchanged.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Protocol

from penstock.engine import EngineTimes, Failure, Logprob, Piece, Request, token_text
from penstock.tools import Tools
from workers.engines.calls import NamedWriter, ObjectWriter, TagWriter
from workers.engines.llamacpp.settings import LlamacppSettings
from workers.engines.reasoning import ReasoningMarker
from workers.engines.schema import mapped, plain
from workers.engines.text import TokenGate, joined, too_long

UNUSABLE_SCHEMA = (
    "llama.cpp cannot hold its output to this JSON schema: each `type` and `pattern` must be valid, some value must "
    "follow it, and one object may have some 100 optional properties. Correct or simplify it."
)

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
    """The writer of an answer; None: it has no calls. A model that may choose marks its calls with tags."""
    if tools is None:
        return None
    if not tools.forced:
        return TagWriter()
    callable_ = tools.callable
    return NamedWriter(callable_[0].name) if len(callable_) == 1 else ObjectWriter()


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
        calls.append(_call_schema(tool.name, arguments))
    return {"anyOf": calls, "$defs": defs}


def _call_schema(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


_UNHELD = re.compile(r"\(\?<?[=!]|\\[1-9bB]|\\k<")
"""Look-around, back-references and bounds of words, which no grammar can hold."""

MAX_COUNT = 1000
"""Items and characters that a grammar counts; and items of all arrays together a hundred times as many. llama.cpp
writes each of them out."""

_COUNTS = ("Items", "Length", "Properties")


def as_grammar(schema: dict[str, Any]) -> dict[str, Any]:
    """A plain schema as llama.cpp's grammar takes it: it holds what it knows of it, and the finished answer is checked
    against all of it. Patterns and counts that no grammar can hold are left out."""
    arrays = json.dumps(schema).count('Items"')
    limit = min(MAX_COUNT, 100 * MAX_COUNT // max(1, arrays))
    return {**mapped(schema, lambda each: _held(each, limit)), "x-guidance": {"lenient": True}}


def _held(schema: dict[str, Any], limit: int) -> dict[str, Any]:
    if isinstance(pattern := schema.get("pattern"), str) and _UNHELD.search(pattern):
        del schema["pattern"]
    if isinstance(named := schema.get("patternProperties"), Mapping):
        schema["patternProperties"] = {name: each for name, each in named.items() if not _UNHELD.search(name)}
    for counted in _COUNTS:
        if _number(schema.get(f"min{counted}")) > limit:
            schema[f"min{counted}"] = limit
        if _number(schema.get(f"max{counted}")) > limit:
            del schema[f"max{counted}"]
    return schema


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else 0


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


class Generation:
    """One request from submit to its last piece. `take` runs on the thread of its slot."""

    def __init__(self, request: Request, prompt: list[str | int], context: int, *, opened: bool = False) -> None:
        """
        Args:
            prompt: rendered texts and token ids, followed by what earlier attempts generated.
            context: maximum of prompt + completion in tokens.
            opened: the prompt ends with the tag that begins reasoning.
        """
        self.id, self.tenant, self.prompt = request.id, request.tenant, prompt
        self.cancelled = False
        self.prompt_tokens = 0
        """Prompt of this attempt, which includes what earlier ones generated. 0: not known yet."""
        self.generated = 0
        """Tokens generated by this attempt."""
        self.scheduled = 0.0
        """When a slot took it, by `time.monotonic`; llama.cpp begins its prefill at once."""
        self._first = 0.0
        self._request, self._context = request, context
        self._gate = TokenGate(request.sampling.stop, request.past_text)
        self._writer = writer_of(request.tools)
        plain = request.tools is None and request.sampling.json_schema is None
        self._reasoning = ReasoningMarker(request.past_text, opened=opened) if request.reasoning and plain else None
        self._cached = 0
        self._finish = "stop" if self._gate.hit else "length" if self.remaining == 0 else ""
        self._failure: Failure | None = None

    @property
    def done(self) -> bool:
        """Whether llama.cpp need not generate any more."""
        return self.cancelled or bool(self._finish) or self._failure is not None

    @property
    def remaining(self) -> int | None:
        """`max_tokens` minus what earlier attempts generated; None: as many as fit."""
        limit = self._request.sampling.max_tokens
        return None if limit is None else max(0, limit - self._request.past_tokens)

    @cached_property
    def schema(self) -> dict[str, Any] | None:
        """The JSON schema that the text must follow, as llama.cpp understands it. Raises UnusableSchemaError."""
        if self._request.tools is not None:
            schema = forced_schema(self._request.tools)
        else:
            asked = self._request.sampling.json_schema
            schema = None if asked is None else plain(asked or {"type": "object"})
        return None if schema is None else as_grammar(schema)

    @property
    def schema_field(self) -> str:
        """The field of the request that the schema is from."""
        return "response_format" if self._request.tools is None else "tools"

    @property
    def held_tokens(self) -> int:
        """Tokens that it holds in the KV cache."""
        return self.prompt_tokens + self.generated

    def body(self, settings: LlamacppSettings, slot: int, *, reuse: bool) -> dict[str, Any]:
        """The body of the call for one slot. `reuse`: it may use the slot's cached prompt.

        Stop strings are matched here: llama.cpp loses the text it holds back for one when a length limit ends it.
        """
        sampling, remaining = self._request.sampling, self.remaining
        body: dict[str, Any] = {
            "prompt": self.prompt,
            "id_slot": slot,
            "cache_prompt": reuse,
            "n_predict": -1 if remaining is None else remaining,
            "presence_penalty": sampling.presence_penalty or 0.0,
            "frequency_penalty": sampling.frequency_penalty or 0.0,
            "stream": True,
            "verbose": True,  # token ids and counts in each chunk
            "return_tokens": True,
            "return_progress": True,  # a callback per prompt batch, to notice a cancel
        }
        for name in ("temperature", "top_p", "top_k", "min_p"):
            asked = getattr(sampling, name)
            body[name] = getattr(settings, name) if asked is None else asked
        repeats = sampling.repetition_penalty
        body["repeat_penalty"] = settings.repeat_penalty if repeats is None else repeats
        if sampling.seed is not None:
            body["seed"] = sampling.seed % 2**31  # llama.cpp takes 32 bits, and the largest value means "random"
        if sampling.logit_bias:
            body["logit_bias"] = [[token, bias] for token, bias in sampling.logit_bias.items()]
        if sampling.ignore_eos:
            body["ignore_eos"] = True
        if sampling.logprobs is not None:
            body["logprobs"] = max(1, sampling.logprobs)
        if self.schema is not None:
            body["json_schema"] = self.schema
        return body

    def take(self, chunk: Mapping[str, Any]) -> Piece:
        """Convert a chunk into a piece, which may be empty."""
        if self.cancelled:
            return Piece(self.id)
        if error := chunk.get("error"):
            self.fail(self._refusal(error))
            return Piece(self.id)
        if progress := chunk.get("prompt_progress"):
            self._admit(progress["total"], progress["cache"])
            return Piece(self.id)
        return self._tokens(chunk["choices"][0], chunk["__verbose"])

    def fail(self, failure: Failure) -> None:
        """End the request with a failure; the first reason stands."""
        self._failure = self._failure or failure

    def last(self) -> Piece:
        """The piece that ends the request, once it is done."""
        held = Piece(self.id) if self.cancelled or self._failure else self._rest()
        prompt, cached = self._prompt_size()
        return Piece(
            self.id,
            held.text,
            held.ids,
            held.n,
            finish="" if self._failure else "cancelled" if self.cancelled else self._finish,
            prompt_tokens=prompt,
            cached_tokens=cached,
            logprobs=held.logprobs,
            failure=self._failure,
            times=EngineTimes(self.scheduled, self._first, time.monotonic()),
        )

    def _rest(self) -> Piece:
        """What was held back, once the generation ended."""
        if self._gate.hit:
            return self._gate.flush(self.id)
        if self._reasoning is not None:
            rest = self._gate.feed(self._reasoning.flush(self.id))
        elif self._writer is not None:
            rest = self._gate.feed(Piece(self.id, self._writer.end(whole=self._finish == "stop")))
        else:
            return self._gate.flush(self.id)
        return joined(self.id, (rest, self._gate.flush(self.id)))

    def _prompt_size(self) -> tuple[int, int]:
        """Tokens of the prompt, and how many of them were cached; llama.cpp's counts without what earlier attempts
        generated."""
        tokens = max(0, self.prompt_tokens - self._request.past_tokens)
        return tokens, min(self._cached, tokens)

    def _admit(self, prompt_tokens: int, cached: int) -> None:
        """Record the prompt's length when it first becomes known; fail a prompt that is too long."""
        self.prompt_tokens, self._cached = prompt_tokens, cached
        if not self._request.past and prompt_tokens + (self.remaining or 1) > self._context:
            self.fail(over_context(self._request, prompt_tokens, self._context))

    def _refusal(self, error: Mapping[str, Any]) -> Failure:
        if error.get("type") == "exceed_context_size_error":
            return over_context(self._request, error["n_prompt_tokens"], self._context)
        message = f"llama.cpp refused the request: {error.get('message')}"
        return invalid(message) if error.get("code") == 400 else engine_error(message)

    def _tokens(self, choice: Mapping[str, Any], verbose: Mapping[str, Any]) -> Piece:
        count, text = verbose["tokens_predicted"] - self.generated, choice["text"]
        self.generated += count
        prompt, cached = (0, 0) if self._first else self._prompt_size()
        self._first = self._first or time.monotonic()
        # A token without text ends the generation and is not part of the answer.
        rows = self._logprobs(choice) if text else ()
        if self._writer is not None:
            text = self._writer.write(text)
        piece = Piece(self.id, text, tuple(verbose["tokens"]), count, "", prompt, cached, rows)
        if self._reasoning is not None:
            piece = self._reasoning.feed(piece)
        if piece.n or piece.text:
            piece = self._gate.feed(piece)
        if self._gate.hit:
            self._finish = "stop"
        elif choice["finish_reason"]:
            self._finish = choice["finish_reason"]
        elif self.held_tokens >= self._context:
            self._finish = "length"
        return piece

    def _logprobs(self, choice: Mapping[str, Any]) -> tuple[Logprob, ...]:
        """One row for each token; one for all tokens of a character of several tokens."""
        asked = self._request.sampling.logprobs
        if asked is None or not choice["logprobs"]:
            return ()
        return tuple(
            Logprob(
                token_text(bytes(row["bytes"])),
                row["logprob"],
                tuple((token_text(bytes(other["bytes"])), other["logprob"]) for other in row["top_logprobs"][:asked]),
            )
            for row in choice["logprobs"]["content"]
        )


def invalid(message: str, param: str | None = None) -> Failure:
    """A failure caused by the request: status 400."""
    return Failure(code="invalid_request_error", message=message, status=400, param=param)


def engine_error(message: str) -> Failure:
    """A failure caused by the engine: status 500."""
    return Failure(code="engine_error", message=message, status=500)


def over_context(request: Request, prompt_tokens: int, context: int) -> Failure:
    """The failure of a request whose prompt, or prompt and completion together, exceed the context."""
    return too_long("messages" if request.turns else "prompt", prompt_tokens, request.sampling.max_tokens, context)
