"""One request of TensorRT-LLM: its prompt, the form that its answer is held to, and the pieces of the answer.

Pure: it needs the tokenizer alone, not the engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Sequence
from typing import Any

from msgspec.structs import replace

from penstock.engine import Piece, Request, Task
from workers.engines.calls import BEGIN_TAG, END_TAG
from workers.engines.chats import AnswerText, answer_schema, as_grammar, call_begin, check_ids, refused
from workers.engines.reasoning import BEGIN, END, as_written
from workers.engines.schema import UnusableSchemaError, plain
from workers.engines.task_answers import max_told_bytes, reported_tokens
from workers.engines.text import RowGate, joined
from workers.engines.trtllm.library import Library
from workers.engines.trtllm.text import Codec, TextStream, logprob

BUDGET = "thinking_token_budget"
"""The field of a request with the most tokens of reasoning."""


class Generation:
    """One request from its prompt to its last piece."""

    def __init__(
        self,
        codec: Codec,
        request: Request,
        vocabulary: int = 0,
        *,
        logits: int = 0,
        tags: bool = False,
        zeros: Callable[[int], Any] = [0.0].__mul__,
    ) -> None:
        """Tokenises, which takes a while for a long prompt. Raises Refused.

        Args:
            vocabulary: number of token ids; 0: unknown.
            logits: numbers in the output of a step.
            tags: guided decoding can begin at a tag.
            zeros: makes a tensor of so many.
        """
        self._codec, self._request = codec, request
        self._guide, self._bias, self._budget = guide(request, tags=tags), bias(request, logits, zeros), budget(request)
        self._tags = [] if self._budget is None else [codec.ids([tag]) for tag in (BEGIN, END)]
        check_ids(request.ids, vocabulary, "prompt")
        self.prompt, opened = codec.prompt(request)
        past = request.past
        if request.reasoning:
            past = [(as_written(text, opened=opened), ids, count) for text, ids, count in past]
        self.past = codec.past_ids(past)
        """What earlier attempts generated."""
        self._stream = TextStream(codec.decode, self.prompt, self.past, "".join([text for text, _, _ in past]))
        self._text = AnswerText(request, opened=opened)
        self._rows = RowGate()

    def keywords(self, library: Library) -> dict[str, Any]:
        """Those of SamplingParams that only some requests have."""
        found: dict[str, Any] = {}
        if self._guide:
            found["guided_decoding"] = library.guided(**self._guide)
        if self._bias is not None:
            found["embedding_bias"], self._bias = self._bias, None  # it is as long as the vocabulary
        if self._request.sampling.ignore_eos:
            found |= {"ignore_eos": True, "stop_token_ids": None}
        if self._budget is not None and library.thinking is not None:
            found["logits_processor"] = library.thinking(self._budget, *self._tags)
        return found

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the answer."""
        return self._text.hit

    def feed(
        self, ids: Sequence[int], entries: Sequence[Any] = (), *, reason: str = "", ends: Container[int] = ()
    ) -> Piece:
        """What these tokens add, as one piece, which may be empty.

        Args:
            entries: their log-probabilities.
            reason: why nothing follows; "": more may.
            ends: tokens without text.
        """
        request, wanted = self._request, self._request.sampling.logprobs
        text = self._stream.feed(ids, last=bool(reason))
        piece = Piece(request.id, text, tuple(ids), len(ids))
        if wanted is not None:
            shown = [pair for pair in zip(ids, entries, strict=False) if pair[0] not in ends]
            rows = [logprob(token, entry, wanted, self._codec.name) for token, entry in shown]
            piece = replace(piece, logprobs=self._rows.feed(text, rows, last=bool(reason)))
        piece = self._text.feed(piece)
        return joined(request.id, (piece, self._text.rest(whole=reason == "stop"))) if reason else piece


def guide(request: Request, *, tags: bool) -> dict[str, Any]:
    """The GuidedDecodingParams that hold an answer to its schema or to the functions that it may call; {}: none do.
    `tags`: the engine can begin at a tag. Raises Refused."""
    tools = request.tools
    try:
        schema = answer_schema(request)
        if schema is not None:
            return {"json": json.dumps(as_grammar(schema))}
        if tools is None or not tags:
            return {}
        found = []
        for tool in tools.callable:
            arguments = as_grammar(plain(tool.schema)) if tool.strict else {"type": "object"}
            content = {"type": "json_schema", "json_schema": arguments}
            found.append({"type": "tag", "begin": call_begin(tool), "content": content, "end": f"}}\n{END_TAG}"})
    except UnusableSchemaError as error:
        field = "response_format" if tools is None else "tools"
        raise refused(f"this JSON schema cannot be used: {error}. Correct or simplify it.", field) from error
    form = {"type": "triggered_tags", "triggers": [BEGIN_TAG], "tags": found, "stop_after_first": not tools.parallel}
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": form})}


def bias(request: Request, logits: int, zeros: Callable[[int], Any]) -> Any:
    """What is added to the logits of all tokens, as a tensor; None: nothing. Raises Refused for a token that the model
    does not have."""
    asked = request.sampling.logit_bias
    check_ids(asked, logits, "logit_bias")
    found: Any = zeros(logits) if asked else None
    for token, value in asked.items():
        found[token] = value
    return found


def budget(request: Request) -> int | None:
    """The most tokens of reasoning; None: no limit. Raises Refused."""
    found = request.passed.get(BUDGET)
    if found is not None and (not isinstance(found, int) or isinstance(found, bool) or found < 0):
        raise refused(f"{BUDGET} must be a number of tokens, 0 or more", BUDGET)
    return found


def task_text(codec: Codec, request: Request, task: Task, context: int, vocabulary: int) -> str:
    """The answer to a task of the tokenizer. Raises Refused."""
    check_ids(request.ids, vocabulary, "tokens")
    if task.kind == "detokenize":
        return codec.text(request.ids) if request.ids else ""
    if not request.prompt:
        return reported_tokens([], context)
    most = max_told_bytes(context)
    prompt = codec.prompt(request, begins=task.generation_prompt, special=task.special_tokens, most=most)
    return reported_tokens(prompt.ids, context)
