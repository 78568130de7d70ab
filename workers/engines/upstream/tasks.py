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


PATHS = {"embed": "/embeddings", "rerank": "/rerank", "tokenize": "/tokenize", "detokenize": "/detokenize"}


def body_of(facts: ServerFacts, request: Request, task: Task) -> dict[str, Any]:
    """The body for the endpoint; of a conversation only where the server renders it there."""
    body: dict[str, Any] = {"model": facts.model}
    is_llama = facts.kind == "llama-server"
    match task.kind:
        case "embed":
            base64 = {"encoding_format": "base64"} if facts.kind in BASE64 else {}
            sizes = {} if task.dimensions is None else {"dimensions": task.dimensions}
            return body | {"input": list(request.inputs)} | base64 | sizes
        case "rerank":
            query, *documents = request.inputs
            return body | {"query": query, "documents": documents, "top_n": len(documents)}
        case "detokenize":
            return ({} if is_llama else body) | {"tokens": list(request.ids)}
    if not isinstance(request.prompt, str):
        turns = [turn.shown for turn in request.turns]
        return body | {"messages": turns, "add_generation_prompt": task.generation_prompt}
    if is_llama:
        return text_body(request.prompt, special=task.special_tokens)
    return body | {"prompt": request.prompt, "add_special_tokens": task.special_tokens}


def text_body(prompt: str, *, special: bool) -> dict[str, Any]:
    """The body of llama-server's /tokenize for a text."""
    return {"content": prompt, "add_special": special, "parse_special": True}


def read_reply(facts: ServerFacts, request: Request, task: Task, found: Mapping[str, Any]) -> tuple[str, int | None]:
    """The text of the answer, and the tokens of its inputs: 0 if the server counts none, None if its count cannot be
    true. Raises ValueError for a reply that does not answer, also for vectors of another length than those of the
    server's probe."""
    match task.kind:
        case "tokenize":
            ids = msgspec.convert(found.get("tokens"), list[TokenId])
            return told_tokens(ids, facts.context or DEFAULT_CONTEXT), 0
        case "detokenize":
            return read_text(found), 0
        case "embed":
            data = msgspec.convert(found, EmbeddingReply).data
            if any(each.index for each in data):  # else the server leaves them out
                data.sort(key=lambda each: each.index)
                if [each.index for each in data] != list(range(len(data))):
                    raise ValueError("vectors of other inputs")
            vectors = [each.embedding for each in data]
            text = ",".join([each if isinstance(each, str) else joined_vectors([each]) for each in vectors])
        case _:
            scores = {each.index: each.relevance_score for each in msgspec.convert(found, RankingReply).results}
            if sorted(scores) != list(range(len(request.inputs) - 1)):
                raise ValueError("scores of other documents")
            text = told_scores([scores[index] for index in range(len(scores))])
    check_task_answer(task, request.inputs, text, facts.embedding_size)
    try:
        usage = msgspec.convert(found.get("usage") or {}, TaskUsage)
    except msgspec.ValidationError:
        return text, None
    return text, usage.prompt_tokens or usage.total_tokens or 0


def read_text(found: Mapping[str, Any]) -> str:
    """The text of token ids. Raises ValueError."""
    text = found.get("content", found.get("prompt", found.get("text")))  # of llama-server, vLLM, SGLang
    if not isinstance(text, str):
        raise ValueError("no text")
    return text


def refuse(request: Request, context: int, endpoints: Sequence[ServerEndpoint]) -> None:
    """Raises Refused. `context`: tokens of prompt and answer."""
    if request.task is not None:
        return
    biases, size, wanted = request.sampling.logit_bias, len(request.ids), request.sampling.max_tokens or 1
    known = [each.facts.vocabulary for each in endpoints if each.facts is not None and each.facts.vocabulary]
    code, param = "invalid_request_error", "prompt"
    if biases and known and max(biases) >= min(known):  # llama-server would ignore it
        param, message = "logit_bias", f"logit_bias: token {max(biases)} is not one of this model's {min(known)}"
    elif not request.prompt:
        message = "the prompt is empty"
    elif size and size + wanted > context:
        code = "context_length_exceeded"
        message = f"the prompt has {size} tokens and {wanted} more are asked for, but the context is {context}"
    else:
        return
    raise Refused(Failure(code, message, 400, param))
