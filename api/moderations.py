"""POST /v1/moderations: says what content rules, or a moderation model that is served here, find in texts.

The model gets each text as a chat of the caller's: on the caller's lane, within its quotas, and with a time limit.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from api.admission import Admitted, accept, caller_of, model_of, prepare, read_body, services_of, withdraw
from api.jobs import as_json, ignored_header
from api.openai import errors
from api.openai.errors import ApiError
from api.openai.fields import StrictBody
from api.openai.json_body import read_object, validated
from api.openai.results import answer_in_slices
from api.openai.schemas import ChatRequest
from api.services import Services
from api.settings import ModerationSettings
from api.stream.reply import Watched, served_by_header
from penstock.loops import at_once
from streaming.jobs.codec import Delta, Terminal
from streaming.jobs.job import CancelledBy

MAX_INPUTS = 1000
RULES = "content-rules"
"""The name by which requests and answers mean the rules themselves."""
MAX_VERDICT_TOKENS = 256
OTHER = "other"
"""The category of what a model finds and names otherwise, or not at all."""


class ModerationPart(StrictBody):
    """A part of one input."""

    type: Literal["text"]
    text: str


Inputs = Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)]
Parts = Annotated[list[ModerationPart], Field(min_length=1, max_length=MAX_INPUTS)]


class ModerationRequest(StrictBody):
    """The body of POST /v1/moderations."""

    input: str | Inputs | Parts
    """A text; several, each with a result; or the parts of one."""
    model: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """content-rules, also if it is left out: the rules alone. Or the moderation model, which is asked as well."""

    @property
    def texts(self) -> list[str]:
        """The texts that have a result each."""
        if isinstance(self.input, str):
            return [self.input]
        parts = [each.text for each in self.input if isinstance(each, ModerationPart)]
        return ["\n".join(parts)] if parts else [each for each in self.input if isinstance(each, str)]


async def create(request: Request) -> Response:
    """See what content rules or a model find in texts.

    Answer as OpenAI does, with rules, and what the model finds, as categories. A score is 1 or 0: a rule matches or
    does not, and the model says yes or no.
    """
    services = services_of(request)
    body = await read_body(request.scope, request.receive, services.settings.body_limit)
    asked = validated(ModerationRequest, read_object(body))
    judge, model, texts = services.moderation, asked.model or RULES, asked.texts
    meant = None if model == RULES else services.meant(caller_of(request).tenant, model)
    if model != RULES and (meant is None or meant.full_model != judge.model):
        raise errors.model_not_found(model, {RULES, judge.model} - {""})
    found: list[dict[str, bool]] = [{} for _ in texts]
    if services.content is not None:
        found = await services.content.moderated(caller_of(request).tenant, texts, len(body))
    headers = ignored_header(asked)
    if model != RULES:
        judged = await _judged(services, request, model, texts)
        model, headers = judge.model, headers | served_by_header([judge.model])
        found = [rules | {name: hit or rules.get(name, False) for name, hit in more.items()}
                 for rules, more in zip(found, judged, strict=True)]  # fmt: skip
    answer = {
        "id": f"modr-{request.scope['state']['request_id']}",
        "model": model,
        "results": [_result(each) for each in found],
    }
    return as_json(answer, headers=headers)


def _result(found: dict[str, bool]) -> dict[str, Any]:
    return {
        "flagged": any(found.values()),
        "categories": found,
        "category_scores": {name: float(hit) for name, hit in found.items()},
        "category_applied_input_types": {name: ["text"] for name in found},
    }


# --- the model's judgement --------------------------------------------------------------------------------------------


async def _judged(services: Services, request: Request, name: str, texts: Sequence[str]) -> list[dict[str, bool]]:
    """By text: what the model finds, of all its categories. All are put before the first verdict; one that a content
    rule keeps from models has none. `name`: the caller's for the model. Raises ApiError, StreamingError,
    ClientDisconnect."""
    judge, caller, most = services.moderation, caller_of(request), services.settings.max_choices_per_request
    model_of(services, caller, name)
    what = f"may have at most {most} texts for {judge.model!r} ([api] max_choices_per_request). Send several requests"
    errors.refuse_if(len(texts) > most, "input", what)
    # The caller's Idempotency-Key would make one job of all texts.
    state = request.scope["state"]
    scope = {**request.scope, "state": {**state, "headers": {}}}
    state["model"] = judge.model
    until, asked, found = time.monotonic() + judge.timeout_s, dict[int, Admitted](), dict[int, dict[str, bool]]()
    try:
        for number, text in enumerate(texts):
            prepared = prepare(services, caller, validated(ChatRequest, _chat(judge, text)), waits=True)
            try:
                asked[number] = await accept(services, scope, prepared, text.encode(), waits=True)
            except ApiError as error:
                if error.code != "content_filter":
                    raise
        for number, each in asked.items():
            rows, end = list[Delta](), None
            with Watched(state["connection"], each.buffer.hang_up) as client:
                while end is None and not each.buffer.rewound and (left_s := until - time.monotonic()) > 0:
                    taken, end = await each.buffer.take(left_s)
                    client.check()
                    rows += taken
            found[number] = _found(services, each, end, rows)
    finally:
        for each in asked.values():
            services.relay.close(each.buffer)
            if each.buffer.terminal is None:
                services.spawn(withdraw(partial(services.queue.cancel, each.job.id, CancelledBy.READER)))
    return [found.get(number, {}) for number in range(len(texts))]


def _chat(judge: ModerationSettings, text: str) -> dict[str, Any]:
    """The body of the chat that asks about a text."""
    return {
        "model": judge.model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": MAX_VERDICT_TOKENS,
        "temperature": 0,
        "queue": {"deadline_ms": round(1000 * judge.timeout_s)},
    }


VERDICT = re.compile(r"safe|(unsafe)\b[\s,]*(.*)", re.IGNORECASE | re.DOTALL)


def _found(services: Services, asked: Admitted, end: Terminal | None, rows: Sequence[Delta]) -> dict[str, bool]:
    """By category, whether the model finds it. Raises ApiError: it has not answered, or with no verdict."""
    judge = services.moderation
    if end is None:
        raise errors.no_verdict(judge.model)
    services.waits.completions.ended(judge.model)
    answer = at_once(answer_in_slices(services.facts(asked.job, asked.created_ms), end, rows))
    choice = answer["choices"][0]
    said = VERDICT.fullmatch((choice["message"]["content"] or "").strip())
    if said is None or choice["finish_reason"] != "stop":
        raise errors.no_verdict(judge.model)
    codes = {f"S{number}": name for number, name in enumerate(judge.categories, 1)}
    named = {codes.get(each, each) for each in re.split(r"[\s,]+", said[2] or "")}
    found = {name: name in named for name in judge.categories}
    return found | {OTHER: said[1] is not None and not any(found.values())}
