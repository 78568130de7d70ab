"""Request bodies: the path and the body by which a request is sent to a server of each kind. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from penstock.engine import ChatTurn, Request, Sampling
from penstock.tools import Tools
from streaming.jobs.job import HINTS
from workers.engines.upstream.continuation.ladder import Row, Rung, is_chat
from workers.engines.upstream.server.kinds import ServerFacts

CHAT, TEXT = "/chat/completions", "/completions"
ALL = "*"
"""In the names of withheld fields: every field."""
BUILT = frozenset({"max_completion_tokens", "response_format"})
"""Passed fields that stand for a part of what is built here."""
OF_TEMPLATES = frozenset({"chat_template_kwargs", "chat_template", "documents"})
OLDER_LIMIT = ("llama-server", "tgi", "ollama", "mistral", "deepseek")
"""Kinds that may know a chat's limit by its older name alone."""
GRACE_S = 60
"""A job of another Penstock goes on for so long without a reader, and is then cancelled."""
Prompt = str | list[int] | list[str | int]


def is_prompted(facts: ServerFacts, request: Request, rung: Rung) -> bool:
    """Whether the request goes to /completions, also if it is a conversation."""
    return not is_chat(request) or rung is Rung.IDS or (facts.template_chat and request.tools is None)


def build(
    facts: ServerFacts,
    request: Request,
    rung: Rung,
    rows: Sequence[Row],
    prompt: Prompt | None,
    *,
    cache_prompt: bool = True,
    send_priority: bool = False,
    limit: int | None = None,
    salt: str = "",
    withheld: Collection[str] = (),
) -> tuple[str, dict[str, Any]]:
    """The path behind the base address, and the body.

    Args:
        withheld: fields of the request that are not passed on.
        rows: all of the answer so far.
        prompt: rendered or tokenised by the server, without the rows; None: the request's own.
        limit: tokens still to generate; None: as many as fit.
        salt: of the request's tenant, for the server's prefix cache.
    """
    prompted = is_prompted(facts, request, rung)
    body: dict[str, Any] = passed(facts, request, withheld, prompted=prompted)
    body |= {"model": facts.model, "stream": True}
    if prompted:
        own = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
        body["prompt"] = continued(own if prompt is None else prompt, rung, rows)  # type: ignore[arg-type]
    else:
        body |= _messages(facts, request, rung, rows)
    body |= _sampling(request.sampling) | _further_sampling(facts, request.sampling)
    if limit is not None:
        newer = facts.completion_limit or ("max_completion_tokens" in request.passed and facts.kind not in OLDER_LIMIT)
        body["max_completion_tokens" if newer and not prompted else "max_tokens"] = limit
    if request.sampling.logprobs is not None:
        body |= _logprobs(facts, request.sampling.logprobs, prompted=prompted)
    if request.sampling.json_schema is not None:
        body |= _schema(facts, request.sampling.json_schema, request.passed.get("response_format", {}))
    body |= _extras(facts, request, prompted=prompted, cache_prompt=cache_prompt, salt=salt)
    if request.reasoning not in ("", "default") and facts.reasoning_effort and not prompted:
        body = with_effort(body, facts, request.reasoning)
    if request.tools is not None:
        body |= _tools(facts, request.tools)
    if facts.reattach == "key" and rung in (Rung.FRESH, Rung.REATTACH):
        body["queue"] = {"on_disconnect": f"grace:{GRACE_S}"}
    if send_priority and facts.priority:
        urgency = request.priority if facts.priority > 0 else 1 - request.priority
        body["priority"] = round(100 * urgency)
    return (TEXT if prompted else CHAT), body


def passed(
    facts: ServerFacts, request: Request, withheld: Collection[str] = (), *, prompted: bool = False
) -> dict[str, Any]:
    """The fields of the request that a server of this kind gets as they are."""
    if ALL in withheld:
        return {}
    found = {name: value for name, value in request.passed.items() if name not in BUILT and name not in withheld}
    if prompted or facts.kind == "llama-server":
        found.pop("reasoning_effort", None)  # a template's variable, or nothing
    if facts.strict and facts.kind != "openai":
        found = {name: value for name, value in found.items() if name not in HINTS}
    if facts.kind == "openai" and not found.get("store"):
        found.pop("metadata", None)  # which it takes only with what it stores
    return found


def rendering(facts: ServerFacts, request: Request) -> dict[str, Any]:
    """Those of them that decide how a conversation is rendered."""
    return {name: value for name, value in passed(facts, request).items() if name in OF_TEMPLATES}


def effort(facts: ServerFacts, reasoning: str) -> dict[str, Any]:
    """The fields by which a server is told how much to reason."""
    if facts.kind != "llama-server":
        return {"reasoning_effort": reasoning}
    named = {} if reasoning == "none" else {"reasoning_effort": reasoning}
    return {"chat_template_kwargs": {"enable_thinking": reasoning != "none"} | named}


def with_effort(body: dict[str, Any], facts: ServerFacts, reasoning: str) -> dict[str, Any]:
    """The body with these fields, besides other variables of the template that it has."""
    found = effort(facts, reasoning)
    own = body.get("chat_template_kwargs")
    if isinstance(own, dict) and "chat_template_kwargs" in found:
        found = {"chat_template_kwargs": found["chat_template_kwargs"] | own}
    return body | found


def continued(prompt: Prompt, rung: Rung, rows: Sequence[Row]) -> Prompt:
    """The prompt followed by the answer so far: as ids where all of a row's are known, else as text."""
    if rung not in (Rung.IDS, Rung.TEXT) or not rows:
        return prompt
    if rung is Rung.TEXT:
        return str(prompt) + "".join(text for text, _, _ in rows)
    parts: list[str | int] = [prompt] if isinstance(prompt, str) else list(prompt)
    for text, ids, count in rows:
        if count and len(ids) == count:
            parts += ids
        elif parts and isinstance(parts[-1], str):
            parts[-1] += text  # a token may span the seam
        else:
            parts.append(text)
    parts = [part for part in parts if part != ""]
    return parts[0] if len(parts) == 1 and isinstance(parts[0], str) else parts


def _messages(facts: ServerFacts, request: Request, rung: Rung, rows: Sequence[Row]) -> dict[str, Any]:
    turns = [turn for turn in request.prompt if isinstance(turn, ChatTurn)]
    messages: list[dict[str, Any]] = [turn.shown for turn in turns]
    body: dict[str, Any] = {"messages": messages}
    if rung is Rung.PREFILL:
        begun: dict[str, Any] = {"role": "assistant", "content": "".join(text for text, _, _ in rows)}
        if facts.prefill == "prefix":
            begun["prefix"] = True
        messages.append(begun)
        if facts.prefill == "continue_final_message":
            body |= {"continue_final_message": True, "add_generation_prompt": False}
    return body


def _tools(facts: ServerFacts, tools: Tools) -> dict[str, Any]:
    body: dict[str, Any] = {"tool_choice": tools.choice}
    offered = tools.offered
    if tools.named and facts.named_tools:
        body["tool_choice"] = {"type": "function", "function": {"name": tools.named}}
    elif tools.named:
        offered = tools.callable
    body["tools"] = [tool.shown for tool in offered]
    if not tools.parallel or facts.kind == "llama-server":  # which makes one call at most unless it is told
        body["parallel_tool_calls"] = tools.parallel
    return body


def _sampling(sampling: Sampling) -> dict[str, Any]:
    """Stop strings are left out: the worker matches them itself, over what was shown before and what is new."""
    values = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": None if sampling.seed is None else sampling.seed % 2**31,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }
    return {name: value for name, value in values.items() if value is not None}


def _further_sampling(facts: ServerFacts, sampling: Sampling) -> dict[str, Any]:
    """The sampling fields that only some servers have, by their names there."""
    body: dict[str, Any] = {}
    if sampling.top_k is not None and facts.top_k:
        body["top_k"] = sampling.top_k or facts.all_tokens
    if sampling.min_p is not None and facts.min_p:
        body["min_p"] = sampling.min_p
    if sampling.repetition_penalty is not None and facts.repetition_penalty:
        body["repeat_penalty" if facts.kind == "llama-server" else "repetition_penalty"] = sampling.repetition_penalty
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    return body


def _logprobs(facts: ServerFacts, wanted: int, *, prompted: bool) -> dict[str, Any]:
    if prompted:
        return {"logprobs": max(1, wanted) if facts.kind == "llama-server" else wanted}
    return {"logprobs": True, "top_logprobs": wanted}


def _schema(facts: ServerFacts, schema: dict[str, Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The output format. `named`: what the request says of its schema, such as its name."""
    if facts.kind == "llama-server":
        return {"json_schema": schema or {"type": "object"}}
    if not schema:
        return {"response_format": {"type": "json_object"}}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", **named, "schema": schema}}}


def _extras(facts: ServerFacts, request: Request, *, prompted: bool, cache_prompt: bool, salt: str) -> dict[str, Any]:
    """Fields that only some servers know."""
    if facts.kind == "llama-server":
        return {
            "cache_prompt": cache_prompt,
            "verbose": True,  # counts and ids in each chunk
            "return_tokens": True,
            "return_progress": True,
        }
    body: dict[str, Any] = {}
    if facts.usage:
        body["stream_options"] = {"include_usage": True}
        if facts.running_usage:
            body["stream_options"]["continuous_usage_stats"] = True
    if facts.token_ids if prompted else facts.chat_token_ids:
        body["return_token_ids"] = True
    if facts.salted and salt:
        body["cache_salt"] = salt
    if facts.aborts:
        body["rid"] = request.id
    return body
