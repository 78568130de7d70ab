"""What happened to jobs and batches, for those outside who asked to hear of it: which, and the way out.

The scripts that change a job's state add an entry to an outbox, in the same step, if its record names somebody; else
it costs nothing. An entry stays until it was passed on, so an event may be passed on twice and is never lost; its id
is made of what happened, so it is the same each time. Nothing here knows brokers or webhooks' receivers.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from streaming.redis.client import RedisClient
from streaming.settings import EventSettings, WebhookSettings

log = logging.getLogger(__name__)

Box: TypeAlias = Literal["broker", "webhooks"]

LEASES_HELD = 2
"""Events taken and not passed on within so many leases are given to somebody else."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened, at `at_ms` of Redis time. `type` is job.started, batch.completed..."""

    subject: str
    """Id of the job or batch."""
    tenant: str
    type: str
    at_ms: int
    partition: int
    entry: str
    """Where it lies in the outbox."""

    @property
    def id(self) -> str:
        """A job begins once and ends once, so subject and type make an event."""
        return "evt_" + hashlib.sha256(f"{self.subject}:{self.type}".encode()).hexdigest()[:32]


class EventSubscriptions:
    """Who hears of which tenant's jobs and batches: b the broker, w webhooks. Their records carry it."""

    def __init__(self, events: EventSettings, webhooks: Mapping[str, WebhookSettings]) -> None:
        self._broker = "b" if events.publish_url else ""
        self._webhooks = {(row.tenant, each.partition(".")[0]) for row in webhooks.values() for each in row.events}

    def of_jobs(self, tenant: str) -> str:
        """For a job that nobody waits for at the door."""
        return self._broker + ("w" if (tenant, "job") in self._webhooks else "")

    def of_batches(self, tenant: str) -> str:
        """For a batch; its lines have no events of their own."""
        return self._broker + ("w" if (tenant, "batch") in self._webhooks else "")


class Outbox:
    """One of the two ways out. Stateless; every method raises Unavailable."""

    def __init__(self, wire: RedisClient, box: Box) -> None:
        self._wire, self._box = wire, box

    async def collect(self, consumer: str, most: int) -> list[Event]:
        """Events nobody else is passing on, of each partition at most so many, the oldest first."""
        idle_ms = LEASES_HELD * self._wire.settings.lease_ms
        args = (self._box, consumer, most, idle_ms)
        answers = await self._wire.calls([("collect", partition, args) for partition in self._wire.partitions])
        events = []
        for partition, answer in zip(self._wire.partitions, answers, strict=True):
            for entry, *words in answer:
                try:
                    subject, tenant, kind = (word.decode() for word in words)
                except UnicodeDecodeError as error:
                    log.error("an event cannot be read and is dropped: %s", error)
                    await self._wire.call("posted", partition, self._box, entry)
                else:
                    at_ms = int(entry.split(b"-")[0])
                    events.append(Event(subject, tenant, kind, at_ms, partition, entry.decode()))
        return events

    async def posted(self, events: Iterable[Event]) -> None:
        """They are passed on."""
        entries: dict[int, list[str]] = {}
        for event in events:
            entries.setdefault(event.partition, []).append(event.entry)
        await self._wire.calls([("posted", partition, (self._box, *each)) for partition, each in entries.items()])


def endpoints_for(event: Event, webhooks: Mapping[str, WebhookSettings]) -> Sequence[str]:
    """The names of those that want it."""
    return [name for name, row in webhooks.items() if row.tenant == event.tenant and event.type in row.events]
