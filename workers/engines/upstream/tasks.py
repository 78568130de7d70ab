"""Task calls: what a server is asked for a task, and how its reply is read. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.engine import Failure, Refused, Request, Task
from workers.engines.task_answers import check_task_answer, joined_vectors, told_scores, told_tokens
from workers.engines.upstream.places import ServerEndpoint
from workers.engines.upstream.reply import Count, TokenId
from workers.engines.upstream.server import DEFAULT_CONTEXT, ServerFacts

BASE64 = ("openai", "vllm", "sglang", "llama-server")
"""Kinds that give vectors as base64."""
TOO_LARGE = b"is too large to process"
"""llama-server says so with 500, although the text is at fault."""


class Vector(msgspec.Struct):
    embedding: str | list[float]
    index: int = 0


class EmbeddingReply(msgspec.Struct):
    data: list[Vector]


class Score(msgspec.Struct):
    index: int
    relevance_score: float


class RankingReply(msgspec.Struct):
    results: list[Score]


class TaskUsage(msgspec.Struct):
    prompt_tokens: Count | None = None
    total_tokens: Count | None = None


def path_of(task: Task) -> str:
    """The server's endpoint for vectors and scores, behind its base."""
    return "/embeddings" if task.kind == "embed" else "/rerank"


def body_of(facts: ServerFacts, request: Request, task: Task) -> dict[str, Any]:
    """The body for vectors or scores."""
    body: dict[str, Any] = {"model": facts.model}
    if task.kind == "rerank":
        query, *documents = request.inputs
        return body | {"query": query, "documents": documents, "top_n": len(documents)}
    body["input"] = list(request.inputs)
    if facts.kind in BASE64:
        body["encoding_format"] = "base64"
    return body if task.dimensions is None else body | {"dimensions": task.dimensions}


def read_reply(facts: ServerFacts, request: Request, task: Task, found: Mapping[str, Any]) -> tuple[str, int | None]:
    """The text of the answer, and the tokens of its inputs: 0 if the server counts none, None if its count cannot be
    true. Raises ValueError for a reply that does not answer, also for vectors of another length than those of the
    server's probe."""
    if task.kind == "embed":
        data = msgspec.convert(found, EmbeddingReply).data
        if any(each.index for each in data):  # else the server leaves them out
            data.sort(key=lambda each: each.index)
            if [each.index for each in data] != list(range(len(data))):
                raise ValueError("vectors of other inputs")
        vectors = [each.embedding for each in data]
        text = ",".join([each if isinstance(each, str) else joined_vectors([each]) for each in vectors])
    else:
        scores = {each.index: each.relevance_score for each in msgspec.convert(found, RankingReply).results}
        if sorted(scores) != list(range(len(request.inputs) - 1)):
            raise ValueError("scores of other documents")
        text = told_scores([scores[index] for index in range(len(scores))])
    check_task_answer(task, request.inputs, text, facts.embedding_size)
    return text, _count_of(found)


def _count_of(found: Mapping[str, Any]) -> int | None:
    try:
        usage = msgspec.convert(found.get("usage") or {}, TaskUsage)
    except msgspec.ValidationError:
        return None
    return usage.prompt_tokens or usage.total_tokens or 0


def tokenize_body(facts: ServerFacts, request: Request, task: Task) -> dict[str, Any]:
    """The body of /tokenize; of a conversation only where the server renders it there."""
    body: dict[str, Any] = {"model": facts.model}
    if isinstance(request.prompt, str):
        special = task.special_tokens
        if facts.kind == "llama-server":
            return {"content": request.prompt, "add_special": special, "parse_special": True}
        return body | {"prompt": request.prompt, "add_special_tokens": special}
    return body | {"messages": [turn.shown for turn in request.turns], "add_generation_prompt": task.generation_prompt}


def rendered_body(prompt: str) -> dict[str, Any]:
    """The body of llama-server's /tokenize for a conversation that it has rendered."""
    return {"content": prompt, "add_special": True, "parse_special": True}


def read_tokens(facts: ServerFacts, found: Mapping[str, Any]) -> str:
    """The text of the answer. Raises ValueError."""
    return told_tokens(msgspec.convert(found.get("tokens"), list[TokenId]), facts.context or DEFAULT_CONTEXT)


def detokenize_body(facts: ServerFacts, request: Request) -> dict[str, Any]:
    ids = list(request.ids)
    return {"tokens": ids} if facts.kind == "llama-server" else {"model": facts.model, "tokens": ids}


def read_text(found: Mapping[str, Any]) -> str:
    """The text of token ids. Raises ValueError."""
    text = found.get("content", found.get("prompt", found.get("text")))
    if not isinstance(text, str):
        raise ValueError("no text")
    return text


def refuse(request: Request, context: int, endpoints: Sequence[ServerEndpoint]) -> None:
    """Raises Refused. `context`: tokens of prompt and answer."""
    if request.task is not None:
        return
    _refuse_biases(request.sampling.logit_bias, endpoints)
    if not request.prompt:
        raise Refused(Failure("invalid_request_error", "the prompt is empty", 400, "prompt"))
    size, wanted = len(request.ids), request.sampling.max_tokens or 1
    if size and size + wanted > context:
        message = f"the prompt has {size} tokens and {wanted} more are asked for, but the context is {context}"
        raise Refused(Failure("context_length_exceeded", message, 400, "prompt"))


def _refuse_biases(biases: Mapping[int, float], endpoints: Sequence[ServerEndpoint]) -> None:
    """Raises Refused for a token that a server is known to lack: llama-server would ignore it."""
    known = [each.facts.vocabulary for each in endpoints if each.facts is not None and each.facts.vocabulary]
    if biases and known and max(biases) >= min(known):
        message = f"logit_bias: token {max(biases)} is not one of this model's {min(known)}"
        raise Refused(Failure("invalid_request_error", message, 400, "logit_bias"))
