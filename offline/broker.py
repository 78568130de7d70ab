"""Message broker: takes jobs from a queue, and publishes events of jobs and batches to a queue as CloudEvents."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import ssl
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError as FutureCancelled
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from kombu import compression
from kombu.connection import Connection
from kombu.entity import Queue as BrokerQueue
from kombu.exceptions import KombuError
from kombu.message import Message
from kombu.messaging import Producer
from kombu.transport import virtual

from api.openai.errors import ApiError, limit_reached, model_not_found, too_large_for_store
from api.openai.json_body import weighed
from api.openai.rendering import job_object, to_json
from api.openai.results import result
from api.openai.schemas import check_choices, parse, recipients, to_job
from offline.tools import OfflineTools
from penstock.config import ConfigError
from penstock.loops import ExpectedErrors
from streaming.errors import KeyReused, LaneFull, LimitReached, NeverFits, NoCapacity, StoreFull, Unavailable
from streaming.events import Event, EventSettings, EventSubscriptions, Outbox, Redeliveries
from streaming.fleet.processes import Fleet
from streaming.fleet.settings import served_names
from streaming.ids import joined
from streaming.jobs.job import Job, has_media, unsupported
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.records import JobRecord
from streaming.jobs.settings import UNLIMITED, QuotaSettings
from streaming.jobs.waiting import cost_of
from telemetry import tracing as names
from telemetry.metrics import Metrics
from telemetry.otlp import Attributes
from telemetry.tracing import extract

CONTENT_TYPE = "application/cloudevents+json"
SHOWN = ("model", "priority", "metadata")
"""Fields of the job object that never change."""
BEFORE_THE_END = ("job.accepted", "job.started")


def cloud_event(event: Event, record: JobRecord | None, source: str, *, results: bool) -> bytes:
    """Encode the event. `record` is the job's; None for a batch or an expired job: then only the id is sent."""
    data: dict[str, Any] = {"id": event.subject, "tenant": event.tenant}
    if record is not None:
        told = result(record) if results and record.terminal is not None and record.completed else None
        shown = job_object(record, result=told)
        data |= {name: shown[name] for name in SHOWN} if event.type in BEFORE_THE_END else shown
    return to_json(
        {
            "specversion": "1.0",
            "id": event.id,
            "source": source,
            "type": f"penstock.{event.type}",
            "subject": event.subject,
            "time": datetime.fromtimestamp(event.at_ms / 1000, UTC).isoformat(timespec="milliseconds"),
            "datacontenttype": "application/json",
            "data": data,
        }
    )


SOCKET_TIMEOUT_S = 10.0
HEARTBEAT_S = 20
"""Heartbeat of a connection that consumes."""
VISIBILITY_S = 60
"""Visibility timeout on brokers without acknowledgements of their own, such as Redis: an unacknowledged message is
delivered again after this time."""


def check_broker(key: str, url: str) -> None:
    """Check that kombu supports this kind of broker, without connecting. Raises ConfigError."""
    try:
        Connection(url or "memory://").get_transport_cls()
    except (KeyError, ImportError, ValueError):
        scheme = urlsplit(url).scheme
        raise ConfigError(key, f"no broker that kombu knows: {scheme}://", "redis://..., amqp://...") from None


def tls_of(url: str) -> dict[str, Any] | None:
    """Return kombu's TLS options for this address. By default kombu accepts any certificate (rediss) or ignores its
    host name (amqps). `ssl_*` options in the address of a Redis override these."""
    scheme = urlsplit(url).scheme
    if scheme in ("rediss", "rediss+sentinel"):
        return {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True}
    if scheme == "amqps":
        return {"cert_reqs": ssl.CERT_REQUIRED, "server_hostname": None}  # None: kombu checks the address's own name
    return None


def _refuse(_: bytes) -> bytes:
    raise KombuError("compressed messages are refused here")


for _kind in compression.encoders():
    # kombu decompresses what a header tells it to, without a limit, before anybody sees the message: 600 bytes become
    # 1 GB. In this process it notes an error instead, for the intake and for Celery alike.
    compression.register(compression.get_encoder(_kind)[0], _refuse, _kind)


class BrokerUnavailable(Exception):
    """Raised when the broker is away or the connection is lost. Its message holds no password."""


class Broker:
    """One connection, for one thread. Every method raises BrokerUnavailable, after which a new Broker is needed."""

    def __init__(self, url: str, heartbeat_s: int = 0) -> None:
        self._connection = Connection(
            url, heartbeat=heartbeat_s, connect_timeout=4, transport_options=_options(url), ssl=tls_of(url) or False
        )
        self._errors = (
            OSError, KombuError, *self._connection.connection_errors, *self._connection.channel_errors
        )  # fmt: skip
        self._address = self._connection.as_uri()  # without its password
        self._received: list[Message] = []
        self._producer: Producer | None = None

    def connect(self) -> None:
        with self._reached():
            self._connection.connect()

    def consume(self, queue: str, prefetch: int) -> None:
        """Start consuming, with at most `prefetch` unacknowledged messages."""
        with self._reached():
            channel = self._connection.channel()
            if isinstance(channel, virtual.Channel):
                channel.Message = _emulated(queue)
            consumer = self._connection.Consumer(
                [_queue(queue)], channel=channel, prefetch_count=prefetch, on_message=self._received.append,
                on_decode_error=lambda message, _: self._received.append(message),
            )  # fmt: skip
            consumer.consume()

    def take(self, seconds: float) -> list[Message]:
        """Return the messages that have arrived; wait up to `seconds` for the first."""
        if not self._received:
            self._drain(seconds)
        received, self._received[:] = list(self._received), []
        return received

    def hold(self, seconds: float) -> None:
        """Wait while holding unacknowledged messages, and keep sending heartbeats to the broker."""
        if self._connection.supports_heartbeats:
            self._drain(seconds)
        else:
            time.sleep(seconds)

    def _drain(self, seconds: float) -> None:
        with self._reached():
            with contextlib.suppress(TimeoutError):  # no message: the usual case
                self._connection.drain_events(timeout=seconds)
            self._connection.heartbeat_check()

    def publish(self, queue: str, body: bytes, content_type: str, message_id: str, headers: dict[str, str]) -> None:
        """Publish a persistent message; return when the broker has it. Declares the durable queue first."""
        with self._reached():
            if self._producer is None:
                self._producer = self._connection.Producer(self._connection.channel())
            self._producer.publish(
                body, exchange="", routing_key=queue, content_type=content_type, content_encoding="utf-8",
                headers=headers, message_id=message_id, delivery_mode=2, retry=False, declare=[_queue(queue)],
            )  # fmt: skip

    def ack(self, message: Message) -> None:
        """Acknowledge the message."""
        with self._reached():
            message.ack()

    def reject(self, message: Message) -> None:
        """Give the message up: a broker that has a place for such messages, as RabbitMQ, puts it there."""
        with self._reached():
            message.reject()

    def close(self) -> None:
        """Close the connection; the broker redelivers unacknowledged messages. Never raises."""
        with contextlib.suppress(BrokerUnavailable), self._reached():  # the broker may have closed it already
            self._connection.release()

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise BrokerUnavailable(f"{self._address}: {type(error).__name__} {error}") from error


def _queue(name: str) -> BrokerQueue:
    return BrokerQueue(name, durable=True)


def _emulated(queue: str) -> type[virtual.Message]:
    """The messages of a broker that kombu emulates. JSON that kombu did not write, as by LPUSH, is the body of one,
    because kombu would lose it."""

    class AnyMessage(virtual.Message):
        def __init__(self, payload: Any, channel: Any = None, **more: Any) -> None:
            read: Any = super().__init__
            try:
                read(payload, channel, **more)
            except Exception:  # noqa: BLE001 - whatever a sender wrote
                properties = {"delivery_tag": str(uuid.uuid4()), "delivery_info": {}}
                bare = {"body": json.dumps(payload), "headers": {}, "properties": properties}
                read(bare, channel, **more)
            self.delivery_info = {"exchange": "", "routing_key": queue, **self.delivery_info}

    return AnyMessage


def _options(url: str) -> dict[str, Any]:
    """Return the options of each kind of broker that make failures show, and show soon."""
    scheme = urlsplit(url).scheme
    if scheme in ("amqp", "amqps", "pyamqp"):
        return {"confirm_publish": True, "read_timeout": SOCKET_TIMEOUT_S, "write_timeout": SOCKET_TIMEOUT_S}
    if scheme.startswith(("redis", "sentinel")):
        wait = {"socket_timeout": SOCKET_TIMEOUT_S, "socket_connect_timeout": 4.0, "socket_keepalive": True}
        return wait | {"visibility_timeout": VISIBILITY_S}
    return {}


MAX_REDELIVERIES = 5
"""Redeliveries without an outcome (each crashed its process) before a message is rejected."""
MAX_BYTES = 2 * 1024 * 1024
MAX_MESSAGE_ID = 200
NO_CONTEXT: Mapping[str, str] = {}


class Rejected(Exception):
    """Raised when a message can never become a job. The text says why and quotes none of the message."""


class Intake:
    """Makes jobs of messages. The settings fix the tenant and the highest lane; a message cannot choose them."""

    def __init__(
        self,
        tools: OfflineTools,
        settings: EventSettings,
        subscriptions: EventSubscriptions,
        quota: QuotaSettings = UNLIMITED,
    ) -> None:
        self._queue = Queue(tools.store_client, tools.headroom, tools.weights, tools.limits)
        self._fleet, self._redeliveries = Fleet(tools.store_client), Redeliveries(tools.store_client)
        self._tools, self._settings, self._subscriptions, self._quota = tools, settings, subscriptions, quota

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
                words = f"The message was taken up {count} times and each time the process failed without an answer."
                raise Rejected(words)
            job_id = await self._accept(body, message_id, trace)
        except (Rejected, LaneFull, StoreFull, Unavailable):
            await self._redeliveries.settle(queue, message_id)
            raise
        await self._redeliveries.settle(queue, message_id)
        return job_id

    async def _accept(self, body: bytes, message_id: str, trace: Mapping[str, str]) -> str:
        if not message_id or len(message_id) > MAX_MESSAGE_ID:
            need = f"A message needs a message_id of 1 to {MAX_MESSAGE_ID} characters"
            raise Rejected(f"{need}: without one it could be computed twice.")
        if len(body) > MAX_BYTES:
            raise Rejected(f"The message is larger than the {MAX_BYTES} bytes accepted here.")
        if reason := self._tools.store.reason or self._tools.headroom.reason:
            raise Unavailable(reason)
        key, tenant = joined("message", self._settings.take_queue, message_id), self._settings.take_tenant
        try:
            cards = await self._fleet.cards()
            asked, models = parse("job", await weighed(body), self._tools.aliases.default), self._tools.models
            check_choices(asked, self._tools.max_choices)
            if (meant := self._tools.aliases.resolve(tenant, asked.model, models)) is None:
                raise model_not_found(asked.model, served_names(models))
            asked = asked.naming(meant.model, meant.adapter)
            events, webhook = recipients(self._subscriptions, tenant, asked, waits=False)
        except ApiError as error:
            raise Rejected(error.message) from None
        card = cards.get(asked.model)
        about: Attributes = {names.REQUEST_MODEL: asked.model, names.TENANT: tenant}
        span = self._tools.tracing.enter(f"take {self._settings.take_queue}", trace, "consumer", about)
        job = to_job(
            asked, job_id=self._queue.new_id(tenant, key), tenant=tenant, ceiling=self._settings.take_priority,
            reply_to="", trace=span.carrier(), events=events, webhook=webhook, card=card,
        )  # fmt: skip
        if card is not None and (failure := unsupported(job, card)):
            raise Rejected(failure.message)
        media: Sequence[bytes] = ()
        try:
            if self._tools.media is not None and has_media(job.prompt):
                job, media = await self._tools.media.taken(job, card, MAX_BYTES)
            if self._tools.content is not None:
                job = await self._tools.content.admitted(job, len(body))
            accepted = await self._queue.put(
                job, idempotency_key=key, digest=hashlib.sha256(body).hexdigest(),
                must_run=bool(asked.queue.do_not_queue), cost=cost_of(job, card), quota=self._quota,
                media=media,
            )  # fmt: skip
        except (ApiError, NeverFits, LimitReached, KeyReused, NoCapacity) as error:
            raise _refused(error, job) from None
        if not accepted.joined:
            span.end(attributes={names.JOB_ID: accepted.id, names.PRIORITY: str(job.priority)})
        return accepted.id


def _refused(error: Exception, job: Job) -> Exception:
    """What becomes of a message whose job was refused: it is rejected, unless a limit lets it in later."""
    match error:
        case LimitReached():
            return error if error.retry_ms >= 0 else Rejected(limit_reached(error).message)
        case ApiError() if error.status == 503:
            return Unavailable(error.message)
        case NeverFits():
            return Rejected(too_large_for_store(job, error.needed).message)
        case KeyReused():
            return Rejected("This message_id came with another body before.")
        case NoCapacity():
            return Rejected("No worker is free, and the message says not to queue (queue.do_not_queue).")
    return Rejected(str(error))


log = logging.getLogger(__name__)

POLL_INTERVAL_S, RETRY_DELAY_S = 1.0, 0.5
REASON_HEADER = "x-penstock-reason"


class Consumer:
    """Takes messages from a queue; one per process. Call `start` and `stop` from the event loop's thread.

    It runs in a thread of its own because broker clients block; the event loop accepts the job while the thread waits.
    A message that can never be a job, or that crashed its consumer several times, is given up: the queue
    `<name>.rejected` gets a note with its id, size, digest and the reason, not what it holds. While the store has no
    room, messages stay unacknowledged at the broker (backpressure).
    """

    def __init__(self, intake: Intake, settings: EventSettings, metrics: Metrics) -> None:
        self._intake, self._settings, self._metrics = intake, settings, metrics
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._keep_consuming, args=(loop,), name="intake", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Stop the thread; messages that are not yet a job go back to the broker."""
        self._stop.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 5.0)

    def _keep_consuming(self, loop: asyncio.AbstractEventLoop) -> None:
        """Consume until stopped; reconnect whenever the broker fails."""
        words = "no jobs are taken until the broker answers: %s"
        on_end = partial(log.info, "the broker answers again, taking jobs")
        outage = ExpectedErrors(BrokerUnavailable, log.warning, words, once=True, on_end=on_end)
        while not self._stop.is_set():
            broker = Broker(self._settings.take_url, HEARTBEAT_S)
            try:
                with outage:
                    broker.connect()
                    broker.consume(self._settings.take_queue, self._settings.take_ahead)
                    outage.end()
                    while not self._stop.is_set():
                        for message in broker.take(POLL_INTERVAL_S):
                            self._take(broker, message, loop)
            except FutureCancelled:
                return  # the event loop ends
            except Exception:
                # kombu may raise anything for a message that it cannot decode.
                log.exception("taking jobs failed, connecting again")
            finally:
                broker.close()
            self._stop.wait(RETRY_DELAY_S)

    def _take(self, broker: Broker, message: Message, loop: asyncio.AbstractEventLoop) -> None:
        """Accept or reject one message. Raises BrokerUnavailable: the broker then delivers it again."""
        properties = message.properties or {}
        # The brokers that kombu emulates give every message a delivery tag of its own.
        name = str(properties.get("message_id") or properties.get("delivery_tag") or "")
        # Such as a header that asks for its decompression.
        problem = "The message is compressed, or no text: send it as it is, in UTF-8." if message.errors else ""
        body, redelivered = _bytes(message.body), bool((message.delivery_info or {}).get("redelivered"))
        trace, full = extract(_texts(message.headers)), False
        while not self._stop.is_set():
            try:
                if problem:
                    raise Rejected(problem)
                accepting = self._intake.accept(body, name, redelivered=redelivered, trace=trace)
                job_id = asyncio.run_coroutine_threadsafe(accepting, loop).result()
            except Rejected as error:
                queue, reason, name = f"{self._settings.take_queue}.rejected", str(error), name[:MAX_MESSAGE_ID]
                digest = hashlib.sha256(body).hexdigest()
                note = {"message_id": name, "bytes": len(body), "sha256": digest, "reason": reason}
                broker.publish(queue, to_json(note), "application/json", name, {REASON_HEADER: reason})
                broker.reject(message)
                self._metrics.taken.labels("rejected").inc()
                log.warning("a message was rejected: %s", error, extra={"queue": queue})
                return
            except (LaneFull, StoreFull, Unavailable) as error:
                if not full:
                    log.info("messages wait at the broker: %s", error)
                full = True
                broker.hold(RETRY_DELAY_S)
            else:
                broker.ack(message)
                self._metrics.taken.labels("accepted").inc()
                log.debug("taken from the broker", extra={"job_id": job_id})
                return


def _texts(headers: object) -> dict[str, str]:
    """The headers of a message that are texts; a sender may write anything."""
    found = headers if isinstance(headers, dict) else {}
    return {str(name).lower(): value for name, value in found.items() if isinstance(value, str)}


def _bytes(body: object) -> bytes:
    if isinstance(body, str):
        return body.encode(errors="surrogatepass")
    return bytes(body) if isinstance(body, bytes | bytearray | memoryview) else json.dumps(body).encode()


OUTBOX_POLL_S, PUBLISH_RETRY_S = 0.1, 1.0
MAX_EVENTS = 50
"""Events of one partition published in one round."""


class Publisher:
    """Publishes events; several processes may share the work. While the broker is away the outbox keeps the events."""

    def __init__(self, tools: OfflineTools, name: str, settings: EventSettings) -> None:
        self._outbox, self._job_reader = Outbox(tools.store_client, "broker"), JobReader(tools.store_client)
        self._name, self._settings, self._metrics = name, settings, tools.metrics
        self._broker: Broker | None = None

    async def keep_publishing(self) -> None:
        """Run until cancelled; retry while the store or the broker is away."""
        message = "events wait in the outbox until the broker answers: %s"
        no_broker = ExpectedErrors(BrokerUnavailable, log.warning, message, once=True)
        no_store = ExpectedErrors(Unavailable, log.debug, "no events until the store answers: %s")
        try:
            while True:
                wait_s = PUBLISH_RETRY_S
                with no_store, no_broker:
                    wait_s = 0.0 if await self.publish() else OUTBOX_POLL_S
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
            jobs = list({event.subject for event in events if event.subject.startswith("job_")})
            records = dict(zip(jobs, await self._job_reader.records(jobs), strict=True))
            await asyncio.to_thread(self._send, self._broker, events, records)
            await self._outbox.posted(events)
            self._metrics.events.inc(len(events))
        return len(events)

    def _send(self, broker: Broker, events: Sequence[Event], records: Mapping[str, JobRecord | None]) -> None:
        source, results, queue = self._settings.source, self._settings.results, self._settings.publish_queue
        for event in events:
            body = cloud_event(event, records.get(event.subject), source, results=results)
            broker.publish(queue, body, CONTENT_TYPE, event.id, {"type": f"penstock.{event.type}"})

    async def _disconnect(self) -> None:
        broker, self._broker = self._broker, None
        if broker is not None:
            await asyncio.to_thread(broker.close)
