"""/v1/conversations, and what a request for a response refers to: earlier responses, conversations, and their items."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from api.admission import caller_of, idempotency_key, read_body, services_of
from api.auth.keys import Caller
from api.jobs import as_json, as_page, ignored_header
from api.openai import errors
from api.openai.errors import from_failure
from api.openai.fields import MAX_MESSAGES
from api.openai.json_body import Body, read_object, validated
from api.openai.rendering import Facts, to_json
from api.openai.responses.items import (
    NO_MEDIA,
    ConversationRequest,
    ConversationUpdate,
    ItemsRequest,
    conversation_object,
    input_items,
    item_of,
    job_of,
    new_items,
    turns_of,
)
from api.openai.responses.object import AnswerItems, answer_turn, ended_response, form_of, given_up, outcome
from api.openai.responses.request import Context, InputFields, ResponseRequest
from api.query import value_of
from api.services import Services
from api.stream.reply import Watched
from penstock.engine import ChatTurn
from penstock.tools import SAID
from streaming.errors import ConversationChanged, DecodeError, Unavailable, UnknownConversation, UnknownJob
from streaming.ids import joined, partition_of
from streaming.jobs.codec import encode
from streaming.jobs.conversations import Conversation, ConversationItem
from streaming.jobs.job import Chat
from streaming.jobs.media import borrowed, text_only
from streaming.jobs.records import NEWER, JobRecord


def own_turns(record: JobRecord) -> tuple[ChatTurn, ...]:
    """Return the turns of a response's own input."""
    turns = record.job.prompt.turns if isinstance(record.job.prompt, Chat) else ()
    return turns[len(turns) - form_of(record.job).own_turns :]


def own_items(record: JobRecord) -> list[dict[str, Any]]:
    """Render the items of a response's own input, oldest first."""
    return input_items(record.job.id, own_turns(record), form_of(record.job).developer)


MAX_READS = 8
"""Readers that end the same turn at once read again; more changes than this at once are refused."""


async def current(services: Services, tenant: str, conversation_id: str, *, kept: bool = False) -> Conversation:
    """Read a conversation with the items of each response that has ended. `kept`: only as the store keeps it.

    Raises ApiError (404, 500, 503), Unavailable.

    Nobody has to be there when a response ends. Whoever reads the conversation next adds the items, which follow from
    the response's job; of several at once, the store takes the change of one. A reader that cannot add them, because
    the store is full, sees them nevertheless. The job is kept at least as long as the conversation, unless it is
    forgotten early: that adds its items first.
    """
    for _ in range(MAX_READS):
        try:
            conversation = await services.conversations.read(conversation_id, tenant)
        except UnknownConversation:
            raise errors.conversation_not_found() from None
        except DecodeError:
            raise errors.conversation_unreadable() from None
        if not conversation.turn or (items := await _ended(services, conversation)) is None:
            return conversation
        try:
            await services.conversations.end_turn(conversation, items)
        except (ConversationChanged, UnknownConversation):
            continue
        except Unavailable:  # the store is full: the next reader that finds room adds the same items
            if kept:
                raise
            return msgspec.structs.replace(conversation, turn="", items=(*conversation.items, *items))
    raise errors.conversation_locked()


async def _ended(services: Services, conversation: Conversation) -> list[ConversationItem] | None:
    """Return what the conversation's turn adds if its response has ended; None if it has not."""
    try:
        record = await services.job_reader.outline(conversation.turn, conversation.tenant)
    except UnknownJob:  # the store was emptied of it by hand
        return []
    return await _items(services, record) if record.state.final else None


async def _items(services: Services, record: JobRecord) -> list[ConversationItem]:
    """Return what a response that has ended adds: its input and its answer, or nothing if it has none. Raises ApiError
    (503, 500) if its record cannot be read here."""
    if record.newer or (record.completed and record.is_newer_body):
        raise from_failure(NEWER)
    if not record.completed:
        return []
    if record.fault:
        raise errors.conversation_unreadable()
    record = await services.job_reader.with_rows(record)
    terminal, job = record.terminal, record.job
    assert terminal is not None
    work = ended_response(Facts(job, record.created_ms), terminal, terminal.rows, record.drafts)
    answer = (await services.store_client.turns.run(work, len(terminal.rows)))["output"]
    items = [_stored(item, "") for item in own_items(record)]
    return items + [_stored(_without_logprobs(item), job.id) for item in answer]


def _stored(item: dict[str, Any], answer: str) -> ConversationItem:
    return ConversationItem(item["id"], msgspec.Raw(to_json(item)), answer)


def _without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    parts = [part | {"logprobs": []} if "logprobs" in part else part for part in item.get("content", ())]
    return item | {"content": parts} if parts else item


async def add_turn(services: Services, tenant: str, conversation_id: str) -> None:
    """Add the items of a response that is to be forgotten. Raises ApiError (500, 503), Unavailable."""
    try:
        await current(services, tenant, conversation_id, kept=True)
    except errors.ApiError as error:
        if error.status != 404:
            raise


async def find(services: Services, tenant: str, job_id: str) -> JobRecord | None:
    """Return a stored response's record, without a long result's deltas; None if this tenant has none with that job.

    Raises ApiError (500, 503) if its record cannot be read here, Unavailable.
    """
    if partition_of(job_id) not in services.store_client.partitions:
        return None
    with contextlib.suppress(UnknownJob):
        record = await services.job_reader.outline(job_id, tenant)
        if record.job.tenant != tenant:
            return None
        if record.fault:
            ended = record.terminal
            raise from_failure(ended.failure if ended is not None and ended.failure is not None else record.unread)
        if record.job.response is not None and record.job.response.store:
            return record
    return None


async def context_of(services: Services, scope: Scope, asked: InputFields) -> Context:
    """Read what a request refers to, as far as its job is then no larger than a body may be. Raises ApiError (400,
    404); ClientDisconnect once its client has left."""
    if asked.conversation_id and asked.previous_response_id is not None:
        raise errors.mutually_exclusive()
    if asked.previous_response_id is None and not asked.conversation_id and not asked.references:
        return Context()
    with Watched(scope["state"]["connection"]) as client:
        return await _context(services, scope["state"]["caller"], asked, client)


async def _context(services: Services, caller: Caller, asked: InputFields, client: Watched) -> Context:
    version, named = -1, "input"
    limit, turns, previous = services.settings.body_limit, tuple[ChatTurn, ...](), ""
    tools = asked.tools_asked
    left = limit - len(encode(Chat(text_only(asked.prompt_asked.turns)))) - (len(encode(tools)) if tools else 0)
    if asked.previous_response_id is not None:
        record = await find(services, caller.tenant, job_of(asked.previous_response_id))
        if record is None:
            raise errors.previous_response_not_found(asked.previous_response_id)
        turns, previous, named = await _continued(services, record), record.job.id, "previous_response_id"
    if asked.conversation_id:
        conversation = await current(services, caller.tenant, asked.conversation_id)
        if conversation.turn and isinstance(asked, ResponseRequest):
            raise errors.conversation_locked()
        turns, version, named = await _turns(services, conversation), conversation.version, "conversation"
    left -= sum([len(encode(turn)) for turn in text_only(turns)])
    if left < 0 or len(turns) + len(asked.own_turns) + len(asked.references) > MAX_MESSAGES:
        message = f"The conversation has more than {MAX_MESSAGES} turns or {limit} bytes ([api] body_limit)"
        raise errors.invalid_request(f"{message}: begin another.", named)
    referenced = await _referenced(services, caller, asked, left, client)
    own = (*asked.own_turns, *referenced.values())
    errors.refuse_if(asked.conversation_id and any(turn.parts for turn in own), "input", NO_MEDIA)
    return Context(turns, previous, referenced, version)


async def _turns(services: Services, conversation: Conversation) -> tuple[ChatTurn, ...]:
    """Return the turns of a conversation. Raises ApiError (500)."""
    try:
        return await services.store_client.turns.run(turns_of(conversation.items), len(conversation.items))
    except DecodeError:
        raise errors.conversation_unreadable() from None


async def _continued(services: Services, record: JobRecord) -> tuple[ChatTurn, ...]:
    """Return the turns of a response with its answer, without its instructions. Raises ApiError (400)."""
    state = outcome(record.terminal).status if record.terminal is not None else "not finished"
    if state not in ("completed", "incomplete"):
        message = f"previous_response_id names a response that is {state}: it has no answer to continue from."
        raise errors.invalid_request(message, "previous_response_id")
    assert isinstance(record.job.prompt, Chat)
    turns = borrowed(record.job.prompt.turns[1 if form_of(record.job).instructed else 0 :], record.job.id)
    ended = (await services.job_reader.with_rows(record)).terminal
    return (*turns, answer_turn(record.job, ended.rows if ended is not None else ()))


MAX_REFERENCED = 128
"""Responses whose items one input may refer to; the answer of each is read as a whole."""


async def _referenced(
    services: Services, caller: Caller, asked: InputFields, left: int, client: Watched
) -> Mapping[str, ChatTurn]:
    """Return the turns of the items that the input refers to, reading each response once. `left`: bytes that they may
    have, an item that is referred to twice counting twice. Raises ApiError (400)."""
    found: dict[str, ChatTurn] = {}
    uses, places = Counter(asked.references), defaultdict[str, dict[str, tuple[bool, int]]](dict)
    for item_id in uses:
        job_id, is_output, place = item_of(item_id) or ("", False, -1)
        places[job_id][item_id] = (is_output, place)
    if len(places) > MAX_REFERENCED:
        message = f"input refers to items of {len(places)} responses, and a request reads at most {MAX_REFERENCED}."
        remedy = "Continue with previous_response_id or a conversation, or send the items themselves."
        raise errors.invalid_request(f"{message} {remedy}", "input")
    for job_id, wanted in places.items():
        client.check()
        known = await _turns_by_place(services, caller, job_id, any(is_output for is_output, _ in wanted.values()))
        for item_id, at in wanted.items():
            turn = known.get(at)
            if turn is None:
                message = f"input refers to the item {item_id[:80]}, which no stored response has."
                raise errors.invalid_request(message, "input")
            left -= uses[item_id] * sum([len(encode(each)) for each in text_only([turn])])
            if left < 0:
                limit = services.settings.body_limit
                message = (
                    f"With the items that input refers to, the request is larger than {limit} bytes ([api] body_limit)."
                )
                raise errors.invalid_request(f"{message} Refer to fewer or shorter items, and to each once.", "input")
            found[item_id] = turn
    return found


async def _turns_by_place(
    services: Services, caller: Caller, job_id: str, with_answer: bool
) -> dict[tuple[bool, int], ChatTurn]:
    """Return the turns of a stored response's items, each by whether it is output and by its place; none if the caller
    has no such response."""
    record = await find(services, caller.tenant, job_id) if job_id else None
    if record is None:
        return {}
    found = {(False, place): turn for place, turn in enumerate(borrowed(own_turns(record), job_id))}
    if with_answer and record.terminal is not None:  # an answer that was given up is no item of the response
        ended = (await services.job_reader.with_rows(record)).terminal
        answer = AnswerItems(record.job, given_up(record.job, record.drafts))
        if not answer.take(ended.rows if ended is not None else ()):
            answer.begin(SAID)
        found |= {(True, item.index): item.turn(record.job.id) for item in answer.items}
    return found


# --- the endpoints of conversations -----------------------------------------------------------------------------------


KEY_DIGITS = 16
"""Hexadecimal digits of an item's id that tell the request that added it, before as many that tell what it sent."""


async def create(request: Request) -> Response:
    """Begin a conversation.

    POST /v1/conversations: store a new conversation, with its first items.
    """
    services, caller = services_of(request), caller_of(request)
    asked = await _asked(request, ConversationRequest)
    conversations, quota = services.conversations, services.quotas(caller)
    items = new_items(asked.items or (), secrets.token_hex(16))
    _check_room(request, (), items)
    conversation_id = conversations.new_id(caller.tenant if services.is_limited(caller.tenant) else "")
    made = await conversations.create(conversation_id, caller.tenant, asked.metadata or {}, items, quota)
    return as_json(conversation_object(made), headers=ignored_header(asked))


async def show(request: Request) -> Response:
    """Show a conversation.

    GET /v1/conversations/{id}: show a conversation, without its items.
    """
    return as_json(conversation_object(await _own(request)))


async def update(request: Request) -> Response:
    """Replace the metadata of a conversation.

    POST /v1/conversations/{id}.
    """
    services, caller = services_of(request), caller_of(request)
    asked = await _asked(request, ConversationUpdate)
    conversation, metadata = await _own(request), asked.metadata or {}
    await services.conversations.set_metadata(conversation, metadata, services.quotas(caller))
    return as_json(conversation_object(conversation) | {"metadata": metadata}, headers=ignored_header(asked))


async def delete(request: Request) -> Response:
    """Delete a conversation.

    DELETE /v1/conversations/{id}: delete a conversation with its items. A response that runs in it goes on.
    """
    services, conversation_id = services_of(request), request.path_params["conversation_id"]
    await services.conversations.delete(conversation_id, caller_of(request).tenant)
    return as_json({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


async def add_items(request: Request) -> Response:
    """Add items to a conversation.

    POST /v1/conversations/{id}/items: append items. With an Idempotency-Key, once however often it is sent.
    """
    services, caller = services_of(request), caller_of(request)
    asked, key = await _asked(request, ItemsRequest), idempotency_key(request.scope)
    token = _token(asked.items, joined(caller.tenant, request.url.path, key) if key else secrets.token_hex(16))
    items, ignored = new_items(asked.items, token), ignored_header(asked)
    for _ in range(MAX_READS):
        conversation = await _own(request)
        if items and not _already_added(conversation, token):
            if conversation.turn:
                break
            _check_room(request, conversation.items, items)
            try:
                await services.conversations.add(conversation, items, services.quotas(caller))
            except ConversationChanged:
                continue
        return as_page({item.id: item.shown for item in items}, headers=ignored)
    raise errors.conversation_locked()


async def list_items(request: Request) -> Response:
    """List the items of a conversation.

    GET /v1/conversations/{id}/items[?after=&limit=&order=&include=]: list the items, the newest first.
    """
    after, number = request.query_params.get("after"), None
    conversation = await _own(request)
    if after is not None:
        number = next((item.number for item in conversation.items if item.id == after), None)
        if number is None:
            number = await services_of(request).conversations.deleted_place(conversation, after)
        if number is None:
            raise errors.invalid_request("after names no item of this conversation.", "after")
    return items_page(request, [(item.number, item.id, item.shown) for item in conversation.items], number)


async def show_item(request: Request) -> Response:
    """Show an item of a conversation.

    GET /v1/conversations/{id}/items/{item_id}: show one item.
    """
    return as_json(_item(request, await _own(request)).shown)


async def delete_item(request: Request) -> Response:
    """Delete an item of a conversation.

    DELETE /v1/conversations/{id}/items/{item_id}: delete one item, and show the conversation.
    """
    services = services_of(request)
    for _ in range(MAX_READS):
        conversation = await _own(request)
        try:
            await services.conversations.remove(conversation, _item(request, conversation))
        except ConversationChanged:
            continue
        return as_json(conversation_object(conversation))
    raise errors.conversation_locked()


async def _own(request: Request) -> Conversation:
    """Return the conversation in the path, if the caller owns it. Raises ApiError (404, 503)."""
    return await current(services_of(request), caller_of(request).tenant, request.path_params["conversation_id"])


def _item(request: Request, conversation: Conversation) -> ConversationItem:
    """Return the item in the path. Raises ApiError (404)."""
    named = request.path_params["item_id"]
    for item in conversation.items:
        if item.id == named:
            return item
    raise errors.conversation_item_not_found()


def _token(sent: Sequence[Any], name: str) -> str:
    """What makes the ids of new items unique: 16 digits of the request's name, then 16 of what it sent."""
    shown = to_json([item.shown for item in new_items(sent, "")])
    return _digits(name.encode()) + _digits(shown)


def _digits(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:KEY_DIGITS]


def _already_added(conversation: Conversation, token: str) -> bool:
    """Whether an earlier try of the request has added its items. Raises ApiError (422) if the request of the same key
    that added items had others."""
    tokens = [item.id.rpartition("_")[2] for item in conversation.items]
    earlier = [each for each in tokens if each.startswith(token[:KEY_DIGITS])]
    if earlier and not any(each.startswith(token) for each in earlier):
        raise errors.idempotency_key_reused()
    return bool(earlier)


async def _asked(request: Request, model: type[Body]) -> Body:
    """Read the body. Raises ApiError, also if the store accepts nothing new."""
    services = services_of(request)
    body = await read_body(request.scope, request.receive, services.settings.body_limit)
    asked = validated(model, read_object(body))
    if services.refusal:
        raise errors.store_full(services.refusal)
    return asked


def _check_room(request: Request, items: Sequence[ConversationItem], new: Sequence[ConversationItem]) -> None:
    """Refuse items that no response could read together with those that are there. Raises ApiError (400)."""
    limit = services_of(request).settings.body_limit
    size = sum([len(bytes(item.shown)) for item in (*items, *new)])
    if len(items) + len(new) > MAX_MESSAGES or size > limit:
        message = f"A conversation has at most {MAX_MESSAGES} items and {limit} bytes ([api] body_limit)"
        raise errors.invalid_request(f"{message}: delete items, or begin another.", "items")


def items_page(request: Request, items: Sequence[tuple[int, str, Any]], after: int | None) -> Response:
    """Build the page that the query asks for, of items in ascending order, each with its number and id. `after`: the
    number of the item that the page continues after. Raises ApiError (400)."""
    query = request.query_params
    limit, oldest_first = value_of(query, "limit") or 20, value_of(query, "order") == "asc"
    if after is not None:
        items = [each for each in items if (each[0] > after if oldest_first else each[0] < after)]
    ordered = items if oldest_first else items[::-1]
    return as_page({item_id: shown for _, item_id, shown in ordered[:limit]}, has_more=limit < len(items))
