"""/v1/conversations: create, show, label and delete conversations; add, list, show and delete their items."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from api.admission import caller_of, idempotency_key, read_body, services_of
from api.jobs import as_json, as_page, ignored_header
from api.openai import errors
from api.openai.fields import MAX_MESSAGES
from api.openai.json_body import Body, read_object, validated
from api.openai.rendering import to_json
from api.openai.responses.conversation import (
    ConversationRequest,
    ConversationUpdate,
    ItemsRequest,
    conversation_object,
    new_items,
)
from api.responses.endpoints import items_page
from api.responses.stored import MAX_READS, current
from streaming.errors import ConversationChanged
from streaming.ids import joined
from streaming.jobs.conversations import Conversation, ConversationItem

KEY_DIGITS = 16
"""Hexadecimal digits of an item's id that tell the request that added it, before as many that tell what it sent."""


async def create(request: Request) -> Response:
    """POST /v1/conversations: store a new conversation, with its first items."""
    services, caller = services_of(request), caller_of(request)
    asked = await _asked(request, ConversationRequest)
    conversations, quota = services.conversations, services.quotas(caller)
    items = new_items(asked.items or (), secrets.token_hex(16))
    _check_room(request, (), items)
    conversation_id = conversations.new_id(secrets.randbelow(2**16))
    made = await conversations.create(conversation_id, caller.tenant, asked.metadata or {}, items, quota)
    return as_json(conversation_object(made), headers=ignored_header(asked))


async def show(request: Request) -> Response:
    """GET /v1/conversations/{id}: show a conversation, without its items."""
    return as_json(conversation_object(await _own(request)))


async def update(request: Request) -> Response:
    """POST /v1/conversations/{id}: replace the metadata of a conversation."""
    services, caller = services_of(request), caller_of(request)
    asked = await _asked(request, ConversationUpdate)
    conversation, metadata = await _own(request), asked.metadata or {}
    await services.conversations.set_metadata(conversation, metadata, services.quotas(caller))
    return as_json(conversation_object(conversation) | {"metadata": metadata}, headers=ignored_header(asked))


async def delete(request: Request) -> Response:
    """DELETE /v1/conversations/{id}: delete a conversation with its items. A response that runs in it goes on."""
    services, conversation_id = services_of(request), request.path_params["conversation_id"]
    await services.conversations.delete(conversation_id, caller_of(request).tenant)
    return as_json({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


async def add_items(request: Request) -> Response:
    """POST /v1/conversations/{id}/items: append items. With an Idempotency-Key, once however often it is sent."""
    services, caller = services_of(request), caller_of(request)
    asked, key = await _asked(request, ItemsRequest), idempotency_key(request.scope)
    token = _token(asked.items, joined(caller.tenant, request.url.path, key) if key else secrets.token_hex(16))
    items, ignored = new_items(asked.items, token), ignored_header(asked)
    for _ in range(MAX_READS):
        conversation = await _own(request)
        if not items or _already_added(conversation, token):
            return as_page({item.id: item.shown for item in items}, headers=ignored)
        if conversation.turn:
            raise errors.conversation_locked()
        _check_room(request, conversation.items, items)
        try:
            await services.conversations.add(conversation, items, services.quotas(caller))
        except ConversationChanged:
            continue
        return as_page({item.id: item.shown for item in items}, headers=ignored)
    raise errors.conversation_locked()


async def list_items(request: Request) -> Response:
    """GET /v1/conversations/{id}/items[?after=&limit=&order=&include=]: list the items, the newest first."""
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
    """GET /v1/conversations/{id}/items/{item_id}: show one item."""
    return as_json(_item(request, await _own(request)).shown)


async def delete_item(request: Request) -> Response:
    """DELETE /v1/conversations/{id}/items/{item_id}: delete one item, and show the conversation."""
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
