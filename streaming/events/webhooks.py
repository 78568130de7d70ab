"""Webhook message store: queues the messages of each endpoint and records their delivery attempts.

A process takes a message for one attempt under a lease; if the process is lost, the message is due again after the
lease. Nothing here knows HTTP, secrets or when to give up.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from streaming.errors import UnknownMessage
from streaming.events.outbox import Event
from streaming.ids import kept_partition, message_id
from streaming.keys import partition_key
from streaming.redis.client import ClientUser
from streaming.redis.failures import translated
from streaming.redis.paging import page

log = logging.getLogger(__name__)

State: TypeAlias = Literal["pending", "delivered", "failed"]

FIELDS = (
    "event", "type", "subject", "tenant", "endpoint", "at", "state", "attempt", "tried", "due", "status", "problem",
    "url",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeliveryAttempt:
    """A message that this process has taken to deliver now."""

    id: str
    attempt: int
    tries: int
    """Attempts of this round, including this one: a replay begins a new round."""
    age_ms: int
    """Time since the round began."""
    now_ms: int
    event: str
    type: str
    subject: str
    at_ms: int
    data: str = ""
    """The JSON object that the message says of its subject; "": its id alone."""
    url: str = ""
    """Where the request wants it to go; "": to the URL of the endpoint."""


@dataclass(frozen=True, slots=True)
class WebhookMessage:
    """A message as it stands. Times are Redis milliseconds, 0 for "not yet" or "never"."""

    id: str
    event: str
    type: str
    subject: str
    tenant: str
    endpoint: str
    at_ms: int
    state: State
    attempts: int
    tried_ms: int
    due_ms: int
    status: int
    """The HTTP status of the last answer; 0: there was none."""
    problem: str
    url: str = ""
    """See DeliveryAttempt."""


class Webhooks(ClientUser):
    """Messages in the store. Every method raises Unavailable."""

    async def dispatch(self, event: Event, endpoints: Sequence[str], data: str = "") -> None:
        """Create a message with this data for each endpoint (of a request's own one with its URL, as in Event.webhook),
        and remove the event from the outbox."""
        args: list[str | int] = [event.entry, event.id, event.type, event.subject, event.tenant, event.at_ms]
        args += [2000 * self._client.settings.retention_s, data]
        for endpoint in endpoints:
            args += [message_id(event.partition, event.id, endpoint), endpoint]
        await self._client.call("dispatch", event.partition, *args)

    async def outgoing(self, endpoint: str, limit: int, lease_ms: int) -> list[DeliveryAttempt]:
        """Take up to `limit` messages of each partition that are due, for the lease."""
        args = (endpoint, limit, lease_ms)
        answers = await self._client.calls([("outgoing", partition, args) for partition in self._client.partitions])
        attempts = []
        for now, *messages in answers:
            for name, attempt, *rest in messages:
                try:
                    attempts.append(_attempt(now, name, attempt, *rest))
                except (ValueError, TypeError, AttributeError) as error:
                    await self._give_up(name.decode(errors="replace"), attempt, str(error))
        return attempts

    async def _give_up(self, message: str, attempt: int, problem: str) -> None:
        """End a message whose record is malformed, so that it is not due again and again."""
        log.error("a webhook message cannot be read and is given up: %s", problem, extra={"message_id": message})
        if self._is_ours(message):
            reason = "its record cannot be read"
            args = (message, attempt, "failed", 0, reason, 0, self._client.settings.retention_s)
            await self._client.call("settle", self._partition(message), *args)

    async def settle(self, taken: DeliveryAttempt, state: State, status: int, problem: str, wait_ms: int = 0) -> bool:
        """Record the outcome; `pending` schedules a retry after `wait_ms`. False: another attempt has begun since."""
        args = (taken.id, taken.attempt, state, status, problem[:500], wait_ms, self._client.settings.retention_s)
        return bool(await self._client.call("settle", self._partition(taken.id), *args))

    async def recent(self, limit: int) -> list[WebhookMessage]:
        """List messages of all tenants, newest first."""
        found: list[tuple[str, int]] = []
        for partition in self._client.partitions:
            found += await page(self._client, partition_key(partition, "hooks"), None, limit)
        newest = sorted(found, key=lambda item: (item[1], item[0]), reverse=True)[:limit]
        names = [name for name, _ in newest if self._is_ours(name)]
        return [message for message in await self._messages(names) if message is not None]

    async def get(self, message: str) -> WebhookMessage:
        """Read one message. Raises UnknownMessage."""
        (found,) = await self._messages([message])
        if found is None:
            raise UnknownMessage(message)
        return found

    async def redeliver(self, message: str) -> None:
        """Schedule a message for redelivery under the same id. Raises UnknownMessage."""
        if not await self._client.call("redeliver", self._partition(message), message):
            raise UnknownMessage(message)

    async def _messages(self, names: Sequence[str]) -> list[WebhookMessage | None]:
        pipeline = self._client.redis.pipeline(transaction=False)
        for name in names:
            pipeline.hmget(partition_key(self._partition(name), "hook", name), list(FIELDS))
        with translated():
            found = await pipeline.execute() if names else []
        return [_message(name, values) for name, values in zip(names, found, strict=True)]

    def _is_ours(self, message: str) -> bool:
        return kept_partition(message) in self._client.partitions and message.startswith("msg_")

    def _partition(self, message: str) -> int:
        if not self._is_ours(message):
            raise UnknownMessage(message)
        return cast(int, kept_partition(message))


def _attempt(
    now: int,
    name: bytes,
    attempt: int,
    before: int,
    began: int,
    event: bytes,
    kind: bytes,
    subject: bytes,
    at: int,
    data: bytes,
    url: bytes,
) -> DeliveryAttempt:
    """Raises TypeError, ValueError, AttributeError for a malformed record."""
    return DeliveryAttempt(
        name.decode(), attempt, attempt - before, now - began, now, event.decode(), kind.decode(), subject.decode(), at,
        data.decode(), url.decode(),
    )  # fmt: skip


def _message(name: str, values: Sequence[bytes | None]) -> WebhookMessage | None:
    """Decode a message; None if there is none. Malformed numbers become 0."""
    pairs = zip(FIELDS, values, strict=True)
    raw: dict[str, Any] = {field: (value or b"").decode(errors="replace") for field, value in pairs}
    if not raw["state"]:
        return None
    at_ms, attempts, tried_ms, due_ms, status = (
        _number(raw.pop(field)) for field in ("at", "attempt", "tried", "due", "status")
    )
    return WebhookMessage(
        id=name, at_ms=at_ms, attempts=attempts, tried_ms=tried_ms, due_ms=due_ms, status=status, **raw
    )


def _number(text: str) -> int:
    try:
        return int(float(text or 0))
    except (ValueError, OverflowError):
        return 0
