"""Transactional outbox of lifecycle events of jobs and batches, for the message broker and the webhooks.

The script that changes a job's state appends the event in the same step, if the job's record names a recipient. An
entry stays until it is acknowledged, so delivery is at least once; an event's id is derived from its subject and type,
so receivers can detect duplicates. Nothing here knows brokers or receivers.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from streaming.events.settings import EventSettings, WebhookSettings, allows_url
from streaming.redis.client import RedisClient

log = logging.getLogger(__name__)

Box: TypeAlias = Literal["broker", "webhooks"]

LEASES_HELD = 2
"""Events that a consumer took and did not acknowledge within so many leases are given to another."""


@dataclass(frozen=True, slots=True)
class Event:
    """One lifecycle event, at `at_ms` of Redis time. `type` is job.started, batch.completed...; of a response, whose
    subject is its job, response. and the state of the job."""

    subject: str
    """Id of the job or batch."""
    tenant: str
    type: str
    at_ms: int
    partition: int
    entry: str
    """Id of its entry in the outbox."""
    recipients: str = ""
    """The letters of the job's record (see Job.events)."""
    webhook: str = ""
    """The webhook that its request names, as the job's record holds it; "": none."""

    @property
    def id(self) -> str:
        """Derived from subject and type, which are unique: a job starts once and ends once."""
        return "evt_" + hashlib.sha256(f"{self.subject}:{self.type}".encode()).hexdigest()[:32]


class EventSubscriptions:
    """Recipients of each tenant's events, as the letters that records hold (see Job.events)."""

    def __init__(self, events: EventSettings, webhooks: Mapping[str, WebhookSettings]) -> None:
        self._broker = "b" if events.publish_url else ""
        self._rows = webhooks
        self._webhooks = {(row.tenant, each.partition(".")[0]) for row in webhooks.values() for each in row.events}

    def of_jobs(self, tenant: str) -> str:
        """Recipients for a job whose client does not wait for the answer."""
        return self._broker + ("w" if (tenant, "job") in self._webhooks else "")

    def of_responses(self, tenant: str) -> str:
        """Recipients for a response in the background. Webhooks get its end as `response.*`, the broker as a job's."""
        return self._broker + ("wr" if (tenant, "response") in self._webhooks else "")

    def of_batches(self, tenant: str) -> str:
        """Recipients for a batch; its lines have no events of their own."""
        return self._broker + ("w" if (tenant, "batch") in self._webhooks else "")

    def webhook(self, tenant: str, named: str) -> str:
        """Return the webhook that a request of the tenant names in `queue.webhook`, as records hold it: the name of an
        endpoint, after the URL and a line break if the request names a URL. Raises ValueError, whose text never has
        the URL."""
        own = {name: row for name, row in self._rows.items() if row.tenant == tenant}
        if named in own:
            return named
        for name, row in own.items():
            if named == row.url:
                return name
            if allows_url(row, named):
                return f"{named}\n{name}"
        if "://" in named:
            raise ValueError("is a URL that this server does not allow. Its operator may add it to `urls` of a webhook "
                             "of your tenant, in [webhooks.NAME]")  # fmt: skip
        known = f"Yours are {', '.join(own)}" if own else "There is none; the server's operator adds [webhooks.NAME]"
        raise ValueError(f"names no webhook of your tenant. {known}")


def with_webhook(letters: str, *, response: bool) -> str:
    """Add to the recipients of a job the webhook that its request names."""
    if "w" in letters:
        return letters + "h"
    return letters + ("wro" if response else "wo")


class Outbox:
    """Outbox of one kind of recipient. Stateless; every method raises Unavailable."""

    def __init__(self, client: RedisClient, box: Box) -> None:
        self._client, self._box = client, box

    async def collect(self, consumer: str, most: int) -> list[Event]:
        """Take up to `most` events of each partition that no other consumer has taken, the oldest first."""
        idle_ms = LEASES_HELD * self._client.settings.lease_ms
        args = (self._box, consumer, most, idle_ms)
        answers = await self._client.calls([("collect", partition, args) for partition in self._client.partitions])
        events = []
        for partition, answer in zip(self._client.partitions, answers, strict=True):
            for entry, *words in answer:
                try:
                    subject, tenant, kind, recipients, webhook = (word.decode() for word in words)
                except UnicodeDecodeError as error:
                    log.error("an event cannot be read and is dropped: %s", error)
                    await self._client.call("posted", partition, self._box, entry)
                else:
                    at_ms = int(entry.split(b"-")[0])
                    events.append(Event(subject, tenant, kind, at_ms, partition, entry.decode(), recipients, webhook))
        return events

    async def posted(self, events: Iterable[Event]) -> None:
        """Acknowledge events that were delivered."""
        entries: dict[int, list[str]] = {}
        for event in events:
            entries.setdefault(event.partition, []).append(event.entry)
        await self._client.calls([("posted", partition, (self._box, *each)) for partition, each in entries.items()])


def endpoints_for(event: Event, webhooks: Mapping[str, WebhookSettings]) -> Sequence[str]:
    """The webhooks that receive the event: those that subscribe to it, and the one that its request names, even if
    that is configured no more (its message waits for it)."""
    rows = {} if "o" in event.recipients else webhooks
    found = [name for name, row in rows.items() if row.tenant == event.tenant and event.type in row.events]
    row = webhooks.get(event.webhook.rpartition("\n")[2])
    if row is not None and row.tenant != event.tenant:
        log.error("an event is not sent to the webhook of another tenant", extra={"subject": event.subject})
    elif event.webhook and event.webhook not in found:
        found.append(event.webhook)
    return found
