"""Continuation: how an answer that broke off is asked for again, in a way that the server supports."""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, get_args
from urllib.parse import quote

from penstock.engine import ChatTurn, Request, Sampling
from penstock.text import counted
from penstock.tools import Tools
from streaming.jobs.job import HINTS
from workers.engines.upstream.server import DEFAULT_CONTEXT, ServerFacts
from workers.engines.upstream.settings import Ability, UpstreamSettings

Row = tuple[str, Sequence[int], int]
"""Text, known token ids, and count of tokens, of what was generated."""


class Rung(Enum):
    """A way to send a request."""

    FRESH = "fresh"
    """From the beginning: nothing was generated yet."""
    REATTACH = "reattachment"
    """The same generation, which goes on at the server; what was shown is swallowed."""
    IDS = "token ids"
    """The ids of prompt and answer so far, with no template and no tokenisation at the seam."""
    TEXT = "text"
    """The rendered prompt and the answer so far, as one text."""
    PREFILL = "prefill"
    """The answer so far as the beginning of the assistant's message."""
    REPLAY = "replay"
    """From the beginning; what was shown is swallowed as long as it is the same."""
    RESTART = "restart"
    """The job begins again, and its reader is told."""


FROM_BEGINNING = (Rung.FRESH, Rung.REATTACH, Rung.REPLAY)
"""Rungs whose reply begins with the first token."""
REPEATED = (Rung.REATTACH, Rung.REPLAY)
"""Rungs whose reply repeats what was shown."""


def choose(facts: ServerFacts, request: Request, rows: Sequence[Row], tried: Collection[Rung] = ()) -> tuple[Rung, str]:
    """How this server continues `request` after `rows`, all of its answer so far, and why by no better rung.

    JSON, calls of tools, reasoning, and penalties that count only new tokens are never continued in the middle: a
    replay that is compared with what was shown goes on, or the job begins again.

    Args:
        tried: rungs that the server has refused for this request.
    """
    if not rows:
        return Rung.FRESH, ""
    if facts.reattach and request.text_id and Rung.REATTACH not in tried:
        return Rung.REATTACH, ""
    reason = _unspliceable(facts, request, rows)
    for rung, obstacle in () if reason else _splices(facts, request, rows):
        if rung in tried:
            reason = f"{facts.kind} has refused {rung.value}"
        elif obstacle:
            reason = obstacle
        else:
            return rung, reason
    sampling = request.sampling
    is_repeatable = sampling.temperature == 0 or sampling.seed is not None  # else a replay is not worth its tokens
    return Rung.REPLAY if is_repeatable and Rung.REPLAY not in tried else Rung.RESTART, reason


def _unspliceable(facts: ServerFacts, request: Request, rows: Sequence[Row]) -> str:
    sampling = request.sampling
    if request.tools is not None:
        return "a call of a tool would be cut in two"
    if sampling.json_schema is not None:
        return "a grammar would begin at its root again"
    if (request.reasoning and not facts.template_chat) or any(count and not text for text, _, count in rows):
        return "a part of the answer may be reasoning, which the server tells apart or hides"
    if (sampling.presence_penalty or sampling.frequency_penalty) and not facts.penalties_span:
        return f"penalties of {facts.kind} do not count tokens of a prompt"
    if sampling.repetition_penalty not in (None, 1.0) and not facts.repetition_span:
        return f"repetition_penalty of {facts.kind} may not count tokens of a prompt"
    return ""


def _splices(facts: ServerFacts, request: Request, rows: Sequence[Row]) -> list[tuple[Rung, str]]:
    """The rungs that continue in the middle, best first, each with what stands in its way ("" for nothing)."""
    chat = bool(request.turns)
    cannot = "" if facts.prefill else f"{facts.kind} does not continue an assistant's message"
    as_text = Rung.TEXT, "" if isinstance(request.prompt, str) else "the prompt is token ids"
    without_ids = "token ids have no images" if request.has_media else _without_ids(facts, chat=chat, rows=rows)
    return [(Rung.IDS, without_ids), (Rung.PREFILL, cannot) if chat else as_text]


def _without_ids(facts: ServerFacts, *, chat: bool, rows: Sequence[Row]) -> str:
    if not facts.token_prompts:
        return f"{facts.kind} takes no token ids"
    if chat and not facts.chat_ids:
        return f"{facts.kind} does not render a conversation"
    if not facts.mixed and not all(len(ids) == count for _, ids, count in rows):
        return "not all token ids of the answer are known"
    return ""


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
    rendered = facts.template_chat and request.tools is None and not request.has_media
    return not request.turns or rung is Rung.IDS or rendered


def build(
    facts: ServerFacts,
    request: Request,
    rung: Rung,
    rows: Sequence[Row],
    prompt: Prompt | None,
    settings: UpstreamSettings,
    *,
    limit: int | None = None,
    salt: str = "",
) -> tuple[str, dict[str, Any]]:
    """The path behind the base address, and the body.

    Args:
        rows: all of the answer so far.
        prompt: rendered or tokenised by the server, without the rows; None: the request's own.
        limit: tokens still to generate; None: as many as fit.
        salt: of the request's tenant, for the server's prefix cache.
    """
    prompted = is_prompted(facts, request, rung)
    body: dict[str, Any] = passed(facts, request, settings.withhold_fields, prompted=prompted)
    body |= {"model": facts.model, "stream": True}
    if prompted:
        own = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
        body["prompt"] = continued(own if prompt is None else prompt, rung, rows)  # type: ignore[arg-type]
    else:
        body |= _messages(facts, request, rung, rows)
    body |= _sampling(facts, request.sampling)
    if limit is not None:
        newer = facts.completion_limit or ("max_completion_tokens" in request.passed and facts.kind not in OLDER_LIMIT)
        body["max_completion_tokens" if newer and not prompted else "max_tokens"] = limit
    if (wanted := request.sampling.logprobs) is not None:
        at_least = max(1, wanted) if facts.kind == "llama-server" else wanted
        body |= {"logprobs": at_least} if prompted else {"logprobs": True, "top_logprobs": wanted}
    if request.sampling.json_schema is not None:
        body |= _schema(facts, request.sampling.json_schema, request.passed.get("response_format", {}))
    body |= _extras(facts, request, prompted=prompted, cache_prompt=settings.cache_prompt, salt=salt)
    if not prompted:
        body = with_effort(body, facts, request)
    if request.tools is not None:
        body |= _tools(facts, request.tools)
    if facts.reattach == "key" and rung in (Rung.FRESH, Rung.REATTACH):
        body["queue"] = {"on_disconnect": f"grace:{GRACE_S}"}
    if settings.send_priority and facts.priority:
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
    """The conversation, and those of them that decide how it is rendered."""
    found = {name: value for name, value in passed(facts, request).items() if name in OF_TEMPLATES}
    return found | {"messages": [turn.shown for turn in request.turns]}


def with_effort(body: dict[str, Any], facts: ServerFacts, request: Request) -> dict[str, Any]:
    """The body, which says how much the model reasons, if the request does, beside other variables of the template."""
    if request.reasoning in ("", "default") or not facts.reasoning_effort:
        return body
    told: dict[str, Any] = {"reasoning_effort": request.reasoning}
    if facts.kind != "llama-server":
        return body | told
    thinks, own = request.reasoning != "none", body.get("chat_template_kwargs")
    variables = {"enable_thinking": thinks} | (told if thinks else {}) | (own if isinstance(own, dict) else {})
    return body | {"chat_template_kwargs": variables}


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
    messages: list[dict[str, Any]] = [turn.shown for turn in request.turns]
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


def _sampling(facts: ServerFacts, sampling: Sampling) -> dict[str, Any]:
    """The fields that the server has, by their names there. Stop strings are left out: the worker matches them itself,
    over what was shown before and what is new."""
    repetition = "repeat_penalty" if facts.kind == "llama-server" else "repetition_penalty"
    values = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": None if sampling.seed is None else sampling.seed % 2**31,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "top_k": sampling.top_k or facts.all_tokens if facts.top_k and sampling.top_k is not None else None,
        "min_p": sampling.min_p if facts.min_p else None,
        repetition: sampling.repetition_penalty if facts.repetition_penalty else None,
        "logit_bias": {str(token): bias for token, bias in (sampling.logit_bias or {}).items()} or None,
        "ignore_eos": sampling.ignore_eos or None,
    }
    return {name: value for name, value in values.items() if value is not None}


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
        counts = dict.fromkeys(("verbose", "return_tokens", "return_progress"), True)  # and ids, in each chunk
        return {"cache_prompt": cache_prompt, **counts}
    body: dict[str, Any] = {"stream_options": {"include_usage": True}}
    if facts.running_usage:
        body["stream_options"]["continuous_usage_stats"] = True
    if facts.token_ids if prompted else facts.chat_token_ids:
        body["return_token_ids"] = True
    if facts.salted and salt:
        body["cache_salt"] = salt
    if facts.aborts:
        body["rid"] = request.id
    return body


MAX_KNOWN = 4096


@dataclass(slots=True)
class BreakCounts:
    """How often servers failed during one text.

    A request that breaks servers would otherwise begin anew after each return, for ever.
    """

    breaks: int = 0
    """How often a server failed it since its last progress. Servers that took no connection do not count."""
    restarts: int = 0
    """How often its answer had to begin again, because no server could continue it."""
    shown: bool = False
    """Whether a part of the answer had come out when the text was given back."""
    refused_at: float | None = None
    """When a server first refused it because of a limit (429) or its key since its last progress, in monotonic
    seconds."""
    refusal: str = ""
    """What the last of these servers said."""
    held: tuple[str, float] = ("", 0.0)
    """The model whose servers get it no sooner than then (monotonic): they refused it, and took others."""
    by_model: dict[str, int] = field(default_factory=dict)
    """How often each model's servers failed it before its first token."""
    vain: int = 0
    """How often in a row reading a generation that goes on at its server brought nothing new."""
    refused: frozenset[Rung] = frozenset()
    """Rungs that servers have refused for what has come out of the answer."""


class BrokenTexts:
    """The counts of texts that wait in the queue, by Request.text_id. It forgets the oldest."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, BreakCounts] = OrderedDict()

    def keep(self, text_id: str, counts: BreakCounts) -> None:
        """The text goes back to the queue."""
        if text_id:
            self._known[text_id] = counts
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def refused(self, text_id: str) -> frozenset[Rung]:
        """The rungs that were refused for the answer so far."""
        return self._known[text_id].refused if text_id in self._known else frozenset()

    def take(self, text_id: str, *, begins: bool) -> BreakCounts:
        """The text is submitted again, or for the first time. `begins`: without a part of its answer."""
        counts = self._known.pop(text_id, None) or BreakCounts()
        if begins:
            counts.restarts += int(counts.shown)
            counts.refused = frozenset()
        return counts


BY_NAME = "DELETE"
"""Method of a call that stops whatever generation has a name."""
JOB_HEADER = "x-job-id"
JOB_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


def kept_under(facts: ServerFacts, request: Request, rung: Rung, tried: Collection[Rung] = ()) -> dict[str, str]:
    """The header that names a generation, "" to "": only of replies from the beginning, since others lack a part.
    `tried`: as in `choose`; the key of a job that is given up leads to that job for as long as it is kept.

    The name is made from the request, so nothing of the server's needs to be logged. llama-server keeps the bytes of a
    reply under it; a Penstock gives the job of an idempotency key. Both give the generation again from its beginning.
    """
    if not request.text_id or rung not in FROM_BEGINNING:
        return {}
    if facts.reattach == "stream":
        return {"X-Conversation-Id": stream_name(request)}
    # A replay is another generation than the one that is lost.
    by_key = facts.reattach == "key" and rung is not Rung.REPLAY and Rung.REATTACH not in tried
    # An answer that begins again, or that another model gives, is another job.
    key = f"{request.text_id}\n{request.begun_by}\n{facts.model}"
    return {"Idempotency-Key": hashlib.sha256(key.encode()).hexdigest()} if by_key else {}


def stream_name(request: Request) -> str:
    """Of a text at a llama-server: a new generation of the text ends the one before."""
    return quote(request.text_id, safe="")


def stream_path(request: Request) -> str:
    """Where a llama-server has the reply under this name, behind its base."""
    return f"/stream?conv_id={quote(stream_name(request), safe='')}"


def stop_call(facts: ServerFacts, request: Request, headers: Mapping[str, str]) -> tuple[str, str] | None:
    """Method and path, behind the base, that stop a generation; None: nothing does. `headers`: of its reply."""
    job_id = headers.get(JOB_HEADER, "")
    if facts.reattach == "stream" and request.text_id:
        return BY_NAME, stream_path(request)
    if facts.reattach == "key" and request.text_id and JOB_ID.fullmatch(job_id):
        return "POST", f"/jobs/{job_id}/cancel"
    return None


BEGUN = ((" a", (1,), 1),)


LATER = {Rung.REPLAY: "replay at temperature 0 or with a seed", Rung.RESTART: "beginning again"}


def summary(facts: ServerFacts) -> str:
    """What a server can do, in one line."""
    context = counted(facts.context, "token") if facts.context else f"{DEFAULT_CONTEXT} tokens of context are assumed"
    parts = [f"{facts.kind}: {facts.model}", context]
    if facts.slots:
        parts.append(f"runs {counted(facts.slots, 'request')} at once")
    parts.append(f"continues chats by {_way(facts, [ChatTurn('user', 'a')])}")
    parts.append(f"texts by {_way(facts, 'a')}" if facts.text_prompts else "takes no raw texts")
    if facts.reattach:
        parts.append("goes on with answers whose reader is lost")
    if facts.embed:
        parts.append("makes vectors")
    if facts.rerank:
        parts.append("ranks documents")
    parts += [f"has {name}" for name in get_args(Ability) if getattr(facts, name)]
    lacks = {  # what is refused at the API
        "no JSON schemas": not facts.json_schema,
        "no log-probabilities": facts.logprobs < 0,
        "no prompts of token ids": not facts.token_prompts and facts.text_prompts,
        "no penalties": not facts.penalties,
    }
    return "; ".join([*parts, *[name for name, lacking in lacks.items() if lacking]])


def _way(facts: ServerFacts, prompt: str | Sequence[ChatTurn]) -> str:
    rung, _ = choose(facts, Request("", prompt, Sampling(temperature=0)), BEGUN)
    return LATER.get(rung, rung.value)
