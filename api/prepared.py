"""Prepared requests: valid ones with all of their job but id, trace and times. Those of plain chats are kept.

Most chats of a client differ only in their messages. So everything that follows from the other fields, from the caller
and from the model's card is computed once for all requests whose other fields have the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from api.auth.keys import Caller
from api.openai import errors
from api.openai.fields import MAX_MESSAGES
from api.openai.json_body import is_heavy
from api.openai.responses.request import ResponseRequest
from api.openai.schemas import ChatRequest, Kind, Request, check_choices, ignored_fields, parse, to_job
from api.waits import WaitLimit, limit_of
from penstock.engine import ChatTurn, ModelCard
from streaming.events import with_webhook
from streaming.jobs.job import Chat, Job, Prompt, unsupported
from streaming.jobs.places import Cost, cost_of, prompt_tokens
from streaming.order import Priority

if TYPE_CHECKING:
    from api.services import Services

MAX_CACHED = 512
MAX_OPTIONS_BYTES = 2048
"""Of the fields beside the messages; requests with more are prepared each time."""


class PreparedRequest(msgspec.Struct, frozen=True):
    """A valid request, and its job without id, trace and times."""

    asked: Request
    """Without its messages, if `prompt` has them."""
    job: Job
    prompt: Prompt
    card: ModelCard | None
    """Of the model, if one was known."""
    cost: Cost
    """Of this request's `prompt`, not of the cached one."""
    limit: WaitLimit | None
    """The tighter of max_queue_ms and deadline_ms; None: the request has neither."""
    ignored: str
    """The value of X-Ignored-Fields."""


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    """A message whose validation changes nothing and finds nothing."""

    role: Literal["system", "user", "assistant"]
    content: str


class _Body(msgspec.Struct):
    messages: msgspec.Raw


_split = msgspec.json.Decoder(_Body).decode
_messages = msgspec.json.Decoder(Annotated[list[_Message], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]).decode

_Options: TypeAlias = tuple[bytes, bytes]
"""What a body has before and behind its messages."""


class PreparedRequests:
    """Prepares the requests of one process, with a cache for those of plain chats. What it holds of callers, such as
    `user` and `metadata`, ends with the next `clear`, every few seconds."""

    def __init__(self) -> None:
        self._cache: dict[tuple[Kind, _Options, str, Priority, bool], PreparedRequest] = {}

    def clear(self) -> None:
        """Prepare every request anew from now on."""
        self._cache.clear()

    def read(
        self, services: Services, state: dict[str, Any], kind: Kind, body: bytes, *, waits: bool
    ) -> PreparedRequest:
        """Validate a body. `state`: of its scope. `waits`: the response stays open until the job ends.

        Raises ApiError (400, 404).
        """
        caller: Caller = state["caller"]
        plain = _plain(body) if kind in ("chat", "job") else None
        if plain is None:
            return prepare(services, caller, read_request(services, state, kind, body), waits=waits)
        options, turns = plain
        key = (kind, options, caller.tenant, caller.ceiling, waits)
        known = self._cache.get(key)
        if known is None or known.card is not services.cards.get(known.job.model):
            asked = read_request(services, state, kind, body)
            made = prepare(services, caller, asked, waits=waits)
            if not isinstance(asked, ChatRequest):
                return made
            job = replace(made.job, prompt=Chat(()))
            known = replace(made, asked=asked.model_copy(update={"messages": []}), job=job)
            if len(self._cache) >= MAX_CACHED:
                del self._cache[next(iter(self._cache))]
            self._cache[key] = known
        job, prompt = known.job, Chat(tuple([ChatTurn(turn.role, turn.content) for turn in turns]))
        state["model"] = job.model
        cost = replace(known.cost, prompt=prompt_tokens(prompt, job.sampling, job.tools))
        return replace(known, prompt=prompt, cost=cost)


def _plain(body: bytes) -> tuple[_Options, Sequence[_Message]] | None:
    """Split the body of a chat; None if its messages are not plain, or if it is not a valid one for any other reason.
    That two decoders read the body makes no difference: all but the messages is, byte by byte, what was validated."""
    if is_heavy(body):
        return None
    try:
        given = bytes(_split(body).messages)
        messages = _messages(given)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    prefix, _, suffix = body.partition(given)
    return ((prefix, suffix), messages) if len(prefix) + len(suffix) <= MAX_OPTIONS_BYTES else None


def read_request(services: Services, state: dict[str, Any], kind: Kind, body: bytes) -> Request:
    """Validate a body, and note its model in the `state` of its scope. Raises ApiError (400, 404)."""
    asked = parse(kind, body)
    check_choices(asked, services.settings.max_choices_per_request)
    services.model(asked.model)
    state["model"] = asked.model
    return asked


def prepare(services: Services, caller: Caller, asked: Request, *, waits: bool) -> PreparedRequest:
    """Prepare a valid request. Raises ApiError (400) for what its model's engine does not support."""
    card = services.cards.get(asked.model)
    events, webhook = _recipients(services, caller.tenant, asked, waits=waits)
    job = to_job(
        asked,
        tenant=caller.tenant,
        ceiling=caller.ceiling,
        reply_to=services.relay.address if waits else "",
        events=events,
        webhook=webhook,
        card=card,
    )
    if card is not None and (failure := unsupported(job, card.capabilities, card.embedding_size)):
        raise errors.from_failure(failure)
    ignored = ", ".join(ignored_fields(asked, card))
    return PreparedRequest(asked, job, job.prompt, card, cost_of(job, card), limit_of(job), ignored)


def _recipients(services: Services, tenant: str, asked: Request, *, waits: bool) -> tuple[str, str]:
    """Return who gets the events of a job, and the webhook that the request names, as Job has them: nobody else, if its
    client waits for the answer. Raises ApiError (400)."""
    subscriptions, response = services.subscriptions, isinstance(asked, ResponseRequest)
    if isinstance(asked, ResponseRequest):
        letters = subscriptions.of_responses(tenant) if asked.background else ""
    else:
        letters = "" if waits else subscriptions.of_jobs(tenant)
    if not asked.queue.webhook:
        return letters, ""
    try:
        webhook = subscriptions.webhook(tenant, asked.queue.webhook)
    except ValueError as error:
        raise errors.invalid_request(f"queue.webhook {error}.", "queue.webhook") from None
    return with_webhook(letters, response=response), webhook
