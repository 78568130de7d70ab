"""Event publisher: sends events from the outbox to a broker's queue, as CloudEvents."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from offline.broker.cloudevents import CONTENT_TYPE, cloud_event
from offline.broker.connection import Broker, BrokerUnavailable
from penstock.loops import ExpectedErrors
from streaming.errors import Unavailable
from streaming.events.outbox import Event, Outbox
from streaming.events.settings import EventSettings
from streaming.jobs.reader import JobReader
from streaming.redis.client import RedisClient
from telemetry.metrics import Metrics

log = logging.getLogger(__name__)

POLL_INTERVAL_S, RETRY_DELAY_S = 0.1, 1.0
MAX_EVENTS = 50
"""Events of one partition published in one round."""


class Publisher:
    """One per process; any number of processes share the work. While the broker is away the outbox keeps the events."""

    def __init__(self, store_client: RedisClient, name: str, settings: EventSettings, metrics: Metrics) -> None:
        self._outbox, self._job_reader = Outbox(store_client, "broker"), JobReader(store_client)
        self._name, self._settings, self._metrics = name, settings, metrics
        self._broker: Broker | None = None

    async def keep_publishing(self) -> None:
        """Run until cancelled; retry while the store or the broker is away."""
        message = "events wait in the outbox until the broker answers: %s"
        no_broker = ExpectedErrors(BrokerUnavailable, log.warning, message, once=True)
        no_store = ExpectedErrors(Unavailable, log.debug, "no events until the store answers: %s")
        try:
            while True:
                wait_s = RETRY_DELAY_S
                with no_store, no_broker:
                    wait_s = 0.0 if await self.publish() else POLL_INTERVAL_S
                if no_broker.active:
                    await self._disconnect()
                await asyncio.sleep(wait_s)
        finally:
            await self._disconnect()

    async def publish(self) -> int:
        """Publish what is in the outbox; return how many events. Raises BrokerUnavailable, Unavailable."""
        if self._broker is None:
            broker = Broker(self._settings.publish_url)
            await asyncio.to_thread(broker.connect)
            self._broker = broker
        events = await self._outbox.collect(self._name, MAX_EVENTS)
        if events:
            bodies = await self._bodies(events)
            await asyncio.to_thread(self._send, self._broker, events, bodies)
            await self._outbox.posted(events)
            self._metrics.events.inc(len(events))
        return len(events)

    def _send(self, broker: Broker, events: Sequence[Event], bodies: Sequence[bytes]) -> None:
        for event, body in zip(events, bodies, strict=True):
            headers = {"type": f"penstock.{event.type}"}
            broker.publish(self._settings.publish_queue, body, CONTENT_TYPE, event.id, headers)

    async def _bodies(self, events: Sequence[Event]) -> list[bytes]:
        jobs = list({event.subject for event in events if event.subject.startswith("job_")})
        records = dict(zip(jobs, await self._job_reader.records(jobs), strict=True))
        settings = self._settings
        return [
            cloud_event(event, records.get(event.subject), settings.source, results=settings.results)
            for event in events
        ]

    async def _disconnect(self) -> None:
        broker, self._broker = self._broker, None
        if broker is not None:
            await asyncio.to_thread(broker.close)
