"""Cases of vLLM's entrypoints: requests that its documentation describes, and what Penstock answers to each.

Written by https://docs.vllm.ai (0.32). `pytest tests/bench/test_entrypoints.py` sends each to a real Penstock with the
simulated engine; docs/clients.md shows those that differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.conformance.answer_checks import (
    NoField,
    adds_up,
    best_first,
    columns_with_alternatives,
    counts_at_the_end,
    counts_its_tokens,
    json_object,
    numbers_in_base64,
    of_length,
    of_schema,
    one_finish_reason,
    one_role,
    other_than,
    streams,
    tokens_with_alternatives,
)

MODEL, REAL = "sim", "small"
"""Simulated, and of llama.cpp: for what the simulated engine does not do."""


IGNORED = "ignored, and named in `X-Ignored-Fields`: "


PLAIN_FIELDS = frozenset({"model", "messages", "prompt", "max_tokens", "input", "query", "documents", "tokens"})
"""Fields that are in each request to a route: no row is about one of them alone."""


@dataclass(frozen=True, slots=True)
class EntrypointCase:
    """One request and its answer."""

    what: str
    """What vLLM does."""
    path: str
    body: Any = None
    """None: a GET."""
    status: int = 200
    has: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the answer by their paths, each with its value, its type or a check (`answer_checks`); of a stream
    below `chunks`, and "" is the whole answer."""
    instead: str = ""
    """What Penstock does instead, and why; `status` and `has` are then of that. "": the same."""

    @property
    def ignored(self) -> str:
        """The field that Penstock ignores and names in `X-Ignored-Fields`; "" if there is none."""
        return self.instead.removeprefix(IGNORED) if self.instead.startswith(IGNORED) else ""

    @property
    def without(self) -> tuple[Mapping[str, Any], ...]:
        """The request without one of the fields that the row is about, for each of them. To at least one, a row with
        the same answer as vLLM must not fit: else it would say nothing about these fields."""
        if self.instead or not isinstance(self.body, Mapping):
            return ()
        names = [name for name, value in self.body.items() if name not in PLAIN_FIELDS and value is not None]
        return tuple({key: value for key, value in self.body.items() if key != name} for name in names)


def _chat(what: str, body: dict[str, Any], has: dict[str, Any], status: int = 200, instead: str = "") -> EntrypointCase:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "What is 1+1?"}], "max_tokens": 5} | body
    return EntrypointCase(what, "/v1/chat/completions", asked, status, has, instead)


def _text(what: str, body: dict[str, Any], has: dict[str, Any], status: int = 200, instead: str = "") -> EntrypointCase:
    asked = {"model": MODEL, "prompt": "Hello, my name is", "max_tokens": 5} | body
    return EntrypointCase(what, "/v1/completions", asked, status, has, instead)


def _missing(path: str, what: str, instead: str) -> EntrypointCase:
    return EntrypointCase(what, path, {"model": MODEL}, 404, {"error.message": str}, instead)


FUNCTION = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
OTHER = {"type": "function", "function": {"name": "subtract", "parameters": {"type": "object", "properties": {}}}}
NAMED = {"type": "function", "function": {"name": "add"}}
CALLED = [{"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
AFTER_A_CALL = [{"role": "user", "content": "What is 1+1?"}, {"role": "assistant", "tool_calls": CALLED},
                {"role": "tool", "tool_call_id": "call_1", "content": "2"}]  # fmt: skip
"""A conversation that the simulated engine ends with a text, unless it must call."""
SUM = {"type": "object", "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["sum"],
       "additionalProperties": False}  # fmt: skip
SCHEMA = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM}}
USAGE = {"usage.completion_tokens": 5, "usage": adds_up}
SAID, GONE_ON = "grove0 quarry1 kelp2 drift3 gate4", "fjord0 tide1 jetty2 gate3 drift4"
"""What the simulated engine answers to the chat and to the prompt of these tables."""

CHATS = (
    _chat(
        "A whole answer has one choice with role, text and finish reason, and counts that add up",
        {},
        {"object": "chat.completion", "id": str, "created": int, "choices.0.index": 0, "choices.1": NoField,
         "choices.0.message.role": "assistant", "choices.0.message.content": SAID, "choices.0.finish_reason": "length",
         "choices.0.logprobs": NoField} | USAGE,
    ),
    _chat("`max_completion_tokens` limits like `max_tokens`", {"max_tokens": None, "max_completion_tokens": 5}, USAGE),
    _chat("`n: 2` gives two choices", {"n": 2},
          {"choices": of_length(2), "choices.1.index": 1, "choices.1.message.content": SAID,
           "usage.completion_tokens": 10, "usage": adds_up}),
    _chat("`logprobs` with `top_logprobs: 0` gives no alternatives",
          {"model": REAL, "logprobs": True, "top_logprobs": 0},
          {"choices.0.logprobs.content": tokens_with_alternatives(5, 0)}),
    _chat("`top_logprobs: 5` gives five", {"model": REAL, "logprobs": True, "top_logprobs": 5},
          {"choices.0.logprobs.content": tokens_with_alternatives(5, 5)}),
    _chat("`top_logprobs: 21` is a 400", {"logprobs": True, "top_logprobs": 21}, {"error.param": "top_logprobs"}, 400),
    _chat("A stream begins with the role and ends with the finish reason, without counts", {"stream": True},
          {"chunks.0.object": "chat.completion.chunk", "chunks.0.choices.0.delta.role": "assistant",
           "chunks.-1.choices.0.finish_reason": "length", "chunks.-1.usage": NoField, "chunks": streams(SAID)}),
    _chat("A stream says its role once", {"stream": True}, {"chunks": one_role}),
    _chat("A stream has one finish reason", {"stream": True}, {"chunks": one_finish_reason}),
    _chat("`include_usage` adds a last chunk with the counts and no choices",
          {"stream": True, "stream_options": {"include_usage": True}},
          {"chunks": counts_at_the_end, "chunks.-1.usage.completion_tokens": 5, "chunks.-1.usage": adds_up}),
    _chat("`continuous_usage_stats` adds counts to every chunk",
          {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
          {"chunks.1.usage": NoField, "chunks.-1.usage.completion_tokens": 5}, 200,
          IGNORED + "stream_options.continuous_usage_stats"),
    _chat("`stream_options` without `stream` is a 400", {"stream_options": {"include_usage": True}}, USAGE, 200,
          "accepted: a whole answer has its counts"),
    _chat("`response_format` of type `json_object`",
          {"model": REAL, "response_format": {"type": "json_object"}, "max_tokens": 60, "temperature": 0},
          {"choices.0.message.content": json_object}),
    _chat("`response_format` of type `json_schema`", {"model": REAL, "response_format": SCHEMA, "max_tokens": 60},
          {"choices.0.message.content": of_schema(SUM), "choices.0.finish_reason": "stop"}),
    _chat("`structured_outputs` holds the answer to choices, a pattern or a grammar",
          {"structured_outputs": {"choice": ["a", "b"]}}, {"error.param": "structured_outputs"}, 400,
          "400 that names `response_format`"),
    _chat("`tool_choice: required` gives a call, and finish reason `tool_calls`",
          {"messages": AFTER_A_CALL, "tools": [FUNCTION, OTHER], "tool_choice": "required", "max_tokens": 60},
          {"choices.0.message.tool_calls.0.function.name": "add", "choices.0.finish_reason": "tool_calls"}),
    _chat("A named function is called", {"tools": [OTHER, FUNCTION], "tool_choice": NAMED, "max_tokens": 60},
          {"choices.0.message.tool_calls": of_length(1), "choices.0.message.tool_calls.0.function.name": "add",
           "choices.0.message.tool_calls.0.function.arguments": json_object,
           "choices.0.message.tool_calls.0.id": str}),
    _chat("`tool_choice: none` gives text", {"tools": [FUNCTION], "tool_choice": "none"},
          {"choices.0.message.content": SAID, "choices.0.message.tool_calls": NoField}),
    _chat("`tool_choice: null` is `auto`", {"tools": [FUNCTION], "tool_choice": None, "max_tokens": 60},
          {"choices.0.message.tool_calls.0.function.name": "add", "choices.0.finish_reason": "tool_calls"}),
    _chat("A choice of a function that is not offered is a 400",
          {"tools": [OTHER], "tool_choice": NAMED}, {"error.param": "tool_choice"}, 400),
    _chat("`top_k`", {"top_k": 20}, {"choices.0.message.content": other_than(SAID)}),
    _chat("`min_p`", {"min_p": 0.1}, {"choices.0.message.content": other_than(SAID)}),
    _chat("`repetition_penalty`", {"repetition_penalty": 1.1}, {"choices.0.message.content": other_than(SAID)}),
    _chat("`logit_bias`", {"logit_bias": {"7": -5}}, {"choices.0.message.content": other_than(SAID)}),
    _chat("`ignore_eos` goes on to the limit",
          {"model": REAL, "messages": [{"role": "user", "content": "Say only: yes"}], "temperature": 0,
           "max_tokens": 60, "ignore_eos": True},
          {"choices.0.finish_reason": "length", "usage.completion_tokens": 60}),
    _chat("`stop` ends the text before it", {"stop": [" drift3"]},
          {"choices.0.message.content": "grove0 quarry1 kelp2", "choices.0.finish_reason": "stop"}),
    _chat("`min_tokens` below the limit", {"min_tokens": 2}, {"error.param": "min_tokens"}, 400,
          "400: it may be 0 or the token limit, because not every engine has it"),
    _chat("`stop_token_ids`", {"stop_token_ids": [7]}, USAGE, 200,
          IGNORED + "stop_token_ids"),
    _chat("`prompt_logprobs`", {"prompt_logprobs": 1}, USAGE, 200,
          IGNORED + "prompt_logprobs"),
    _chat("`return_token_ids` adds the ids of prompt and answer", {"return_token_ids": True}, USAGE, 200,
          IGNORED + "return_token_ids"),
    _chat("`echo` repeats the last message", {"echo": True}, {"error.param": "echo"}, 400,
          "400: put it in front of the answer yourself"),
    _chat("`continue_final_message` continues an assistant's message", {"continue_final_message": True}, USAGE, 200,
          IGNORED + "continue_final_message"),
    _chat("`chat_template` replaces the template", {"chat_template": "x"}, USAGE, 200,
          IGNORED + "chat_template"),
    _chat("`priority` orders requests", {"priority": 1}, {"error.param": "priority"}, 400,
          "400 that names `queue.priority`, a lane"),
    _chat("An unknown field is accepted", {"no_such_field": 1}, USAGE, 200, IGNORED + "no_such_field"),
    _chat("An image for a text model is a 400",
          {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/"}}]}]},
          {"error.message": str}, 400),
    _chat("No message is a 400", {"messages": []}, {"error.param": "messages"}, 400),
    _chat("A temperature below 0 is a 400", {"temperature": -1}, {"error.param": "temperature"}, 400),
    _chat("An unknown model is a 404", {"model": "no-such"}, {"error.message": str, "error.param": "model"}, 404),
    EntrypointCase("A body that is no object is a 400", "/v1/chat/completions", [1], 400, {"error.message": str}),
)  # fmt: skip

TEXTS = (
    _text("A whole answer", {}, {"object": "text_completion", "choices.0.text": GONE_ON,
          "choices.0.finish_reason": "length", "choices.0.logprobs": NoField} | USAGE),
    _text("A prompt of token ids", {"model": REAL, "prompt": [1, 2, 3]},
          {"choices.0.text": str, "usage.prompt_tokens": 3} | USAGE),
    _text("Several prompts give a choice each", {"prompt": ["a", "b"]},
          {"choices": of_length(2), "choices.1.index": 1, "choices.0.text": "valve0 delta1 zephyr2 pier3 mill4",
           "choices.1.text": "weir0 amber1 basin2 mill3 pier4"}),
    _text("Several prompts of token ids, each `n` times", {"prompt": [[1], [2, 3]], "n": 2},
          {"choices": of_length(4), "choices.3.index": 3, "usage.completion_tokens": 20, "usage": adds_up}),
    _text("No prompt in the list is a 400", {"prompt": []}, {"error.param": "prompt"}, 400),
    _text("`logprobs: 5` gives five alternatives", {"model": REAL, "logprobs": 5, "temperature": 0},
          {"choices.0.logprobs": columns_with_alternatives(5, 5), "choices.0.logprobs.token_logprobs.4": float,
           "choices.0.logprobs.text_offset.0": 0}),
    _text("`logprobs: 0` gives the tokens' own", {"model": REAL, "logprobs": 0},
          {"choices.0.logprobs": columns_with_alternatives(5, 0), "choices.0.logprobs.token_logprobs.4": float}),
    _text("`logprobs: 21` is a 400", {"logprobs": 21}, {"error.param": "logprobs"}, 400),
    _text("A stream ends with one finish reason", {"stream": True},
          {"chunks.0.object": "text_completion", "chunks.-1.choices.0.finish_reason": "length",
           "chunks": one_finish_reason}),
    _text("A stream has the text of the whole answer", {"stream": True}, {"chunks": streams(GONE_ON)}),
    _text("`include_usage`", {"stream": True, "stream_options": {"include_usage": True}},
          {"chunks": counts_at_the_end, "chunks.-1.usage.completion_tokens": 5, "chunks.-1.usage": adds_up}),
    _text("Without `max_tokens`, an answer has 16 tokens", {"max_tokens": None}, {"usage.completion_tokens": int}, 200,
          "as many as the engine's default says, or as fit: `usage` tells"),
    _text("`echo` puts the prompt in front", {"echo": True}, {"choices.0.text": "Hello, my name is" + GONE_ON}),
    _text("`suffix` is a 400", {"suffix": "x"}, {"error.param": "suffix"}, 400),
    _text("`best_of` above `n`", {"best_of": 2}, {"error.param": "best_of"}, 400,
          "400: ask for `n` answers, and choose among them"),
    _text("`stop` ends the text before it", {"stop": [" gate3"]},
          {"choices.0.text": "fjord0 tide1 jetty2", "choices.0.finish_reason": "stop"}),
    _text("`response_format`", {"model": REAL, "response_format": SCHEMA, "max_tokens": 60},
          {"choices.0.text": of_schema(SUM), "choices.0.finish_reason": "stop"}),
    _text("`truncate_prompt_tokens`", {"truncate_prompt_tokens": 2}, USAGE, 200,
          IGNORED + "truncate_prompt_tokens"),
    _text("`prompt_embeds`", {"prompt_embeds": "AAAA"}, USAGE, 200,
          IGNORED + "prompt_embeds"),
)  # fmt: skip

OTHERS = (
    EntrypointCase("The list of models", "/v1/models", None, 200,
          {"object": "list", "data.0.id": MODEL, "data.0.object": "model", "data.0.created": int,
           "data.0.owned_by": str}),
    EntrypointCase("A model says `max_model_len`", "/v1/models", None, 200, {"data.0.context_length": int},
          "`context_length`; and `/tokenize` has `max_model_len`"),
    EntrypointCase("`/health` is 200 with an empty body", "/health", None, 200, {"status": "ready"},
          "200 with `status`, and 503 where no worker could serve"),
    EntrypointCase("`/version`", "/version", None, 200, {"version": str}),
    EntrypointCase("`/ping`", "/ping", None, 404, {"error.code": "not_found"}, "404: `/healthz`, `/readyz`"),
    EntrypointCase("`/load`", "/load", None, 404, {"error.code": "not_found"}, "404: `/metrics` has the running texts"),
    EntrypointCase("`/tokenize` of a text", "/tokenize", {"model": MODEL, "prompt": "one two"}, 200,
          {"": counts_its_tokens, "max_model_len": int, "tokens.0": int}),
    EntrypointCase("`/tokenize` of a conversation", "/tokenize",
          {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}, 200,
          {"": counts_its_tokens, "tokens.0": int}),
    EntrypointCase("`/tokenize` with `return_token_strs`", "/tokenize",
          {"model": MODEL, "prompt": "one two", "return_token_strs": True}, 400, {"error.param": "return_token_strs"},
          "400: `/detokenize` has the text of each token"),
    EntrypointCase("`/detokenize`", "/detokenize", {"model": MODEL, "tokens": [1, 2]}, 200,
          {"prompt": " brook1 cedar2"}),
    EntrypointCase("`/v1/embeddings` as floats", "/v1/embeddings", {"model": MODEL, "input": ["a", "b"]}, 200,
          {"object": "list", "data": of_length(2), "data.1.index": 1, "data.0.embedding": of_length(64),
           "data.0.embedding.0": float, "usage": adds_up}),
    EntrypointCase("`/v1/embeddings` as base64", "/v1/embeddings",
          {"model": MODEL, "input": "a", "encoding_format": "base64"}, 200,
          {"data.0.embedding": numbers_in_base64(64)}),
    EntrypointCase("`/v1/embeddings` of token ids", "/v1/embeddings", {"model": MODEL, "input": [[1, 2], [3]]}, 200,
          {"data": of_length(2), "data.1.embedding": of_length(64), "usage.prompt_tokens": 3}),
    EntrypointCase("`/v1/embeddings` with `dimensions`", "/v1/embeddings",
          {"model": MODEL, "input": "a", "dimensions": 3}, 200,
          {"data.0.embedding.2": float, "data.0.embedding": of_length(3)}),
    EntrypointCase("`/v1/embeddings` of `messages`", "/v1/embeddings",
          {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}, 400, {"error.param": "input"},
          "400: send the text"),
    EntrypointCase("`/v1/rerank` scores documents, the best first", "/v1/rerank",
          {"model": MODEL, "query": "river", "documents": ["a tax form", "a river"], "return_documents": True}, 200,
          {"results": best_first, "results.0.index": 1, "results.0.document.text": "a river", "usage": adds_up}),
    EntrypointCase("`/v1/rerank` with `top_n`", "/v1/rerank",
          {"model": MODEL, "query": "river", "documents": ["a tax form", "a river"], "top_n": 1}, 200,
          {"results": of_length(1), "results.0.index": 1}),
    EntrypointCase("`/v1/responses`", "/v1/responses", {"model": MODEL, "input": "hi", "max_output_tokens": 5}, 200,
          {"object": "response", "output.0.type": "message", "usage.output_tokens": 5, "usage": adds_up}),
    EntrypointCase("`background` without `store` is a 400", "/v1/responses",
          {"model": MODEL, "input": "hi", "background": True, "store": False}, 400, {"error.message": str}),
    EntrypointCase("An unknown response is a 404", "/v1/responses/resp_no", None, 404, {"error.message": str}),
    _missing("/v1/chat/completions/batch", "Several chats in one request",
             "404: [batches](batches.md), or several requests"),
    _missing("/v1/messages", "Anthropic's API", "404: its clients need a gateway that translates"),
    _missing("/v2/embed", "Cohere's API for vectors", "404: `/v1/embeddings`"),
    _missing("/score", "Scores of pairs of texts", "404: `/v1/rerank` with one query"),
    _missing("/pooling", "Hidden states", "404: `/v1/embeddings`"),
    _missing("/classify", "Classes of texts", "404: ask for an enum with `response_format`"),
    _missing("/inference/v1/generate", "Token ids in and out",
             "404: `/v1/completions` takes ids, and `/tokenize` tells them"),
    _missing("/v1/audio/transcriptions", "Speech", "404: models of Penstock write text"),
)  # fmt: skip

GROUPS: Mapping[str, tuple[EntrypointCase, ...]] = {"chats": CHATS, "completions": TEXTS, "others": OTHERS}


def as_table(group: str) -> str:
    """The rows of one group that differ, as markdown."""
    rows = [f"| {each.what} | {each.instead} |" for each in GROUPS[group] if each.instead]
    every = len(GROUPS[group])
    head = f"{every - len(rows)} of {every} requests have the same answer. These do not:"
    return "\n".join([head, "", "| vLLM | Penstock |", "| --- | --- |", *rows])
