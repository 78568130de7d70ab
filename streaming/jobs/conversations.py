"""Conversations in the store: items in order, of which responses read all and add their own, one turn at a time.

A turn begins in the script that accepts its job, which refuses it unless the conversation is as the request has read
it. Its items are added once, whoever does it: they follow from the job's record, and the change that adds them ends the
turn.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

import msgspec
from redis.exceptions import ResponseError

from penstock.loops import Sliced
from streaming.errors import ConversationChanged, DecodeError, UnknownConversation
from streaming.ids import new_conversation_id, partition_of, tenant_partition
from streaming.jobs.codec import decode_metadata, encode_metadata
from streaming.jobs.quotas import Quotas, exceeded
from streaming.jobs.records import read_number
from streaming.jobs.settings import UNLIMITED, QuotaSettings
from streaming.keys import partition_key
from streaming.redis.client import RedisClient, place_of
from streaming.store.monitor import Headroom

OVERHEAD_BYTES = 256
"""What every conversation counts as in its tenant's quota, besides its items and its metadata."""
ITEMS_PER_SLICE = 200
"""Items that one slice decodes, in about half a millisecond if they are short."""


class ConversationItem(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One item of a conversation."""

    id: str
    shown: msgspec.Raw
    """JSON, as its owner sees it."""
    answer: str = ""
    """The job whose answer it is a part of; "" for an item that a client sent."""
    number: int = 0
    """Its place in the store, which rises with each item; 0 before it is stored."""


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation as it was read. `created_ms` is Redis time."""

    id: str
    tenant: str
    created_ms: int
    metadata: dict[str, str] = {}
    version: int = 0
    """Grows with each change of its items."""
    turn: str = ""
    """The job whose items are still to be added; "" if there is none."""
    items: tuple[ConversationItem, ...] = ()
    """In their order."""


_ITEM = msgspec.json.Decoder(ConversationItem)


class Conversations:
    """Conversations of all tenants. Every async method raises Unavailable. With a `headroom`, they count against their
    tenant's share of the store."""

    def __init__(self, client: RedisClient, headroom: Headroom | None = None) -> None:
        self._client, self._headroom, self._quotas = client, headroom or Headroom(client), Quotas(client)

    async def create(
        self,
        conversation_id: str,
        tenant: str,
        metadata: dict[str, str],
        items: Sequence[ConversationItem],
        quota: QuotaSettings = UNLIMITED,
    ) -> Conversation:
        """Store a new conversation. Raises QuotaExceeded."""
        keep_s = self._client.settings.retention_s
        partition = self._partition(conversation_id)
        left = await self._quotas.left(tenant, partition, quota)
        about = (conversation_id, tenant, encode_metadata(metadata), keep_s, OVERHEAD_BYTES)
        bounds = (left.get("requests", ""), self._share(partition, quota))
        answer = await self._client.call("put_conversation", partition, *about, *bounds, *_encoded(items))
        if isinstance(answer, list):
            raise exceeded(quota, answer, left)
        numbered = tuple(_numbered(item, number) for number, item in enumerate(items, 1))
        return Conversation(
            id=conversation_id, tenant=tenant, created_ms=int(answer), metadata=metadata, items=numbered
        )

    async def read(self, conversation_id: str, tenant: str) -> Conversation:
        """Raises UnknownConversation, also for another tenant's; DecodeError."""
        partition = self._partition(conversation_id)
        try:
            fields = await self._client.call(
                "HGETALL", partition, partition_key(partition, "conversation", conversation_id)
            )
        except ResponseError:  # no hash: it says nothing of whose it is
            raise UnknownConversation(conversation_id) from None
        raw: dict[bytes, bytes] = dict(zip(fields[::2], fields[1::2], strict=True))
        if raw.get(b"tenant", b"").decode(errors="replace") != tenant:
            raise UnknownConversation(conversation_id)
        try:
            return await self._client.turns.run(_parsed(conversation_id, raw), len(raw))
        except (msgspec.DecodeError, ValueError, LookupError) as error:
            raise DecodeError(b"".join(raw.values()), error) from error

    async def set_metadata(
        self, conversation: Conversation, metadata: dict[str, str], quota: QuotaSettings = UNLIMITED
    ) -> None:
        """Replace the metadata. Raises UnknownConversation, QuotaExceeded."""
        await self._amend(conversation, metadata=b"=" + encode_metadata(metadata), any_version=True, quota=quota)

    async def add(
        self, conversation: Conversation, items: Sequence[ConversationItem], quota: QuotaSettings = UNLIMITED
    ) -> None:
        """Append items, which follow the answer of its turn, if it has one. Raises UnknownConversation, QuotaExceeded;
        ConversationChanged if it is no longer as it was read."""
        await self._amend(conversation, items=items, quota=quota)

    async def remove(self, conversation: Conversation, item: ConversationItem) -> None:
        """Delete an item. Raises UnknownConversation, ConversationChanged."""
        await self._amend(conversation, dropped=(item,))

    async def deleted_place(self, conversation: Conversation, item_id: str) -> int | None:
        """Return the number that a deleted item had; None if it is not known (place_of)."""
        name = f"{conversation.id} {item_id}"
        return await place_of(self._client, self._partition(conversation.id), name, conversation.tenant)

    async def end_turn(self, conversation: Conversation, items: Sequence[ConversationItem]) -> None:
        """Append the items of its turn, and let another one begin. No quota refuses them. Raises UnknownConversation,
        ConversationChanged: somebody else has ended the turn."""
        await self._amend(conversation, items=items, turn_after="")

    async def delete(self, conversation_id: str, tenant: str) -> None:
        """Raises UnknownConversation."""
        partition = self._partition(conversation_id)
        if await self._client.call("drop_conversation", partition, conversation_id, tenant) == b"unknown":
            raise UnknownConversation(conversation_id)

    async def _amend(
        self,
        conversation: Conversation,
        *,
        items: Sequence[ConversationItem] = (),
        dropped: Iterable[ConversationItem] = (),
        metadata: bytes = b"",
        turn_after: str | None = None,
        any_version: bool = False,
        quota: QuotaSettings = UNLIMITED,
    ) -> None:
        tenant, turn, partition = conversation.tenant, conversation.turn, self._partition(conversation.id)
        left = await self._quotas.left(tenant, partition, quota)
        args = (
            conversation.id, tenant, "" if any_version else conversation.version, turn,
            turn if turn_after is None else turn_after, self._client.settings.retention_s, metadata,
            left.get("requests", ""), self._share(partition, quota),
            ",".join(f"{item.number}:{item.id}" for item in dropped), *_encoded(items),
        )  # fmt: skip
        match await self._client.call("amend_conversation", partition, *args):
            case b"unknown":
                raise UnknownConversation(conversation.id)
            case b"changed":
                raise ConversationChanged(conversation.id)
            case [*answer]:
                raise exceeded(quota, answer, left)

    def _share(self, partition: int, quota: QuotaSettings) -> int | str:
        """The bytes of the partition that a tenant may take; "": any."""
        share = self._headroom.share(partition, quota.store_share)
        return "" if share is None else share

    def new_id(self, tenant: str = "") -> str:
        """Make the id of a conversation in any partition, or in that of a tenant, which counts its turns in limits."""
        count = self._client.settings.partitions
        return new_conversation_id(tenant_partition(tenant, count) if tenant else secrets.randbelow(count))

    def _partition(self, conversation_id: str) -> int:
        return self._client.partition_of(conversation_id, "conv_", UnknownConversation)


def _encoded(items: Iterable[ConversationItem]) -> list[bytes]:
    return [msgspec.json.encode(item) for item in items]


def _numbered(item: ConversationItem, number: int) -> ConversationItem:
    return msgspec.structs.replace(item, number=number)


def _parsed(conversation_id: str, raw: dict[bytes, bytes]) -> Sliced[Conversation]:
    """Raises msgspec.DecodeError, ValueError, LookupError, also for what the scripts could not go on from."""
    numbers = sorted([int(name[1:]) for name in raw if name[:1] == b"i" and name[1:].isdigit()])
    turn = raw[b"turn"].decode()
    if turn and partition_of(turn) != partition_of(conversation_id, "conv_"):
        raise ValueError("its turn is no job of its partition")
    if numbers and read_number(raw[b"next"]) < numbers[-1]:
        raise ValueError("its next item would replace another one")
    items = list[ConversationItem]()
    for first in range(0, len(numbers), ITEMS_PER_SLICE):
        some = numbers[first : first + ITEMS_PER_SLICE]
        items += [_numbered(_ITEM.decode(raw[b"i%d" % number]), number) for number in some]
        yield
    return Conversation(
        id=conversation_id,
        tenant=raw[b"tenant"].decode(),
        created_ms=read_number(raw[b"created"]),
        metadata=decode_metadata(raw[b"metadata"]),
        version=read_number(raw[b"version"]),
        turn=turn,
        items=tuple(items),
    )
