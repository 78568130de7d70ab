"""Broker intake: validates a message's body and turns it into an accepted job, as POST /v1/jobs does."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from api.openai.errors import ApiError, model_not_found, too_large_for_store
from api.openai.json_weight import weighed
from api.openai.schemas import check_choices, parse, to_job
from streaming.errors import KeyReused, LaneFull, NeverFits, NoCapacity, StoreFull, Unavailable
from streaming.events.outbox import EventSubscriptions, with_webhook
from streaming.events.redeliveries import Redeliveries
from streaming.events.settings import EventSettings
from streaming.fleet.processes import Fleet
from streaming.fleet.settings import ModelSettings
from streaming.ids import joined
from streaming.jobs.capabilities import unsupported
from streaming.jobs.queue import Queue
from streaming.jobs.settings import NO_WEIGHTS, UNLIMITED, QuotaSettings
from streaming.redis.client import RedisClient
from streaming.store.memory import Headroom
from streaming.store.monitor import StoreMonitor
from telemetry import tracing as names
from telemetry.tracing import NO_TRACING, Attributes, Tracing

MAX_REDELIVERIES = 5
"""Redeliveries without an outcome (each crashed its process) before a message is rejected."""
MAX_BYTES = 2 * 1024 * 1024
MAX_MESSAGE_ID = 200
NO_CONTEXT: Mapping[str, str] = {}


class Rejected(Exception):
    """Raised when a message can never become a job. The text says why and quotes none of the message."""


class Intake:
    """One per process. The settings fix the tenant and the highest lane; a message cannot choose them."""

    def __init__(
        self,
        store_client: RedisClient,
        headroom: Headroom,
        store: StoreMonitor,
        models: Mapping[str, ModelSettings],
        settings: EventSettings,
        subscriptions: EventSubscriptions,
        max_choices: int,
        quota: QuotaSettings = UNLIMITED,
        weights: Mapping[str, float] = NO_WEIGHTS,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        self._queue, self._fleet = Queue(store_client, headroom, weights), Fleet(store_client)
        self._headroom, self._store, self._redeliveries = headroom, store, Redeliveries(store_client)
        self._models, self._settings, self._subscriptions = models, settings, subscriptions
        self._max_choices, self._quota, self._tracing = max_choices, quota, tracing

    async def accept(
        self, body: bytes, message_id: str, *, redelivered: bool = False, trace: Mapping[str, str] = NO_CONTEXT
    ) -> str:
        """Accept the message as a job and return the job's id. The same message again returns the same job.

        Args:
            redelivered: the broker has delivered the message before.

        Raises:
            Rejected: it can never become a job.
            LaneFull, StoreFull, Unavailable: there is no room now (StoreFull: in the store or the tenant's quota).
        """
        if not redelivered:
            return await self._accept(body, message_id, trace)
        queue = self._settings.take_queue
        count = await self._redeliveries.begin(queue, message_id)
        try:
            if count > MAX_REDELIVERIES:
                raise Rejected(
                    f"The message was taken up {count} times and each time the process failed without an answer."
                )
            job_id = await self._accept(body, message_id, trace)
        except (Rejected, LaneFull, StoreFull, Unavailable):
            await self._redeliveries.settle(queue, message_id)
            raise
        await self._redeliveries.settle(queue, message_id)
        return job_id

    async def _accept(self, body: bytes, message_id: str, trace: Mapping[str, str]) -> str:
        if not message_id or len(message_id) > MAX_MESSAGE_ID:
            raise Rejected(
                f"A message needs a message_id of 1 to {MAX_MESSAGE_ID} characters: "
                f"without one it could be computed twice."
            )
        if len(body) > MAX_BYTES:
            raise Rejected(f"The message is larger than the {MAX_BYTES} bytes accepted here.")
        if reason := self._store.reason or self._headroom.reason:
            raise Unavailable(reason)
        key = joined("message", self._settings.take_queue, message_id)
        tenant = self._settings.take_tenant
        try:
            cards = await self._fleet.cards()
            asked = parse("job", await weighed(body))
            check_choices(asked, self._max_choices)
            if asked.model not in self._models:
                raise model_not_found(asked.model, self._models)
        except ApiError as error:
            raise Rejected(error.message) from None
        events, webhook = self._subscriptions.of_jobs(tenant), ""
        if asked.queue.webhook:
            try:
                webhook = self._subscriptions.webhook(tenant, asked.queue.webhook)
            except ValueError as error:
                raise Rejected(f"queue.webhook {error}.") from None
            events = with_webhook(events, response=False)
        card = cards.get(asked.model)
        about: Attributes = {names.REQUEST_MODEL: asked.model, names.TENANT: tenant}
        span = self._tracing.enter(f"take {self._settings.take_queue}", trace, "consumer", about)
        job = to_job(
            asked,
            job_id=self._queue.new_id(tenant, key),
            tenant=tenant,
            ceiling=self._settings.take_priority,
            reply_to="",
            trace=span.carrier(),
            events=events,
            webhook=webhook,
            card=card,
        )
        if card is not None and (failure := unsupported(job, card.capabilities, card.embedding_size)):
            raise Rejected(failure.message)
        digest = hashlib.sha256(body).hexdigest()
        try:
            must_run = bool(asked.queue.do_not_queue)
            accepted = await self._queue.put(
                job, idempotency_key=key, digest=digest, must_run=must_run, card=card, quota=self._quota
            )
            if not accepted.joined:
                span.end(attributes={names.JOB_ID: accepted.id, names.PRIORITY: str(job.priority)})
            return accepted.id
        except NeverFits as error:
            raise Rejected(too_large_for_store(job, error.needed, error.most).message) from None
        except KeyReused:
            raise Rejected("This message_id came with another body before.") from None
        except NoCapacity:
            raise Rejected("No worker is free, and the message says not to queue (queue.do_not_queue).") from None
