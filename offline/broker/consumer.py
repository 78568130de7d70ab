"""Broker consumer: takes messages from a broker's queue, turns each into a job, and acknowledges it only after that.

It runs in a thread of its own because broker clients block; the event loop accepts the job while the thread waits. A
message that can never be a job, or that crashed its consumer several times, goes to the queue `<name>.rejected` with
the reason. While the store has no room, messages stay unacknowledged at the broker (backpressure).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import CancelledError as FutureCancelled
from functools import partial

from kombu.message import Message

from offline.broker.connection import HEARTBEAT_S, Broker, BrokerUnavailable
from offline.broker.intake import Intake, Rejected
from penstock.loops import ExpectedErrors
from streaming.errors import LaneFull, StoreFull, Unavailable
from streaming.events.settings import EventSettings
from telemetry.metrics import Metrics
from telemetry.tracing import extract

log = logging.getLogger(__name__)

POLL_INTERVAL_S, RETRY_DELAY_S = 1.0, 0.5
REASON_HEADER = "x-penstock-reason"


class Consumer:
    """One per process. Call `start` and `stop` from the event loop's thread."""

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
        message = "no jobs are taken until the broker answers: %s"
        on_end = partial(log.info, "the broker answers again, taking jobs")
        outage = ExpectedErrors(BrokerUnavailable, log.warning, message, once=True, on_end=on_end)
        while not self._stop.is_set():
            broker = Broker(self._settings.take_url, HEARTBEAT_S)
            try:
                with outage:
                    self._take_all(broker, outage, loop)
            except FutureCancelled:
                return  # the event loop ends
            except Exception:
                # kombu may raise anything for a message that it cannot decode.
                log.exception("taking jobs failed, connecting again")
            finally:
                broker.close()
            self._stop.wait(RETRY_DELAY_S)

    def _take_all(self, broker: Broker, outage: ExpectedErrors, loop: asyncio.AbstractEventLoop) -> None:
        """Take messages until stopped. Raises BrokerUnavailable."""
        broker.connect()
        broker.consume(self._settings.take_queue, self._settings.take_ahead)
        outage.end()
        while not self._stop.is_set():
            for message in broker.take(POLL_INTERVAL_S):
                self._take(broker, message, loop)

    def _take(self, broker: Broker, message: Message, loop: asyncio.AbstractEventLoop) -> None:
        """Accept or reject one message. Raises BrokerUnavailable: the broker then delivers it again."""
        properties = message.properties or {}
        # The brokers that kombu emulates give every message a delivery tag of its own.
        name = str(properties.get("message_id") or properties.get("delivery_tag") or "")
        body, redelivered = _bytes(message.body), bool((message.delivery_info or {}).get("redelivered"))
        trace, full = extract(_texts(message.headers)), False
        while not self._stop.is_set():
            try:
                accepting = self._intake.accept(body, name, redelivered=redelivered, trace=trace)
                job_id = asyncio.run_coroutine_threadsafe(accepting, loop).result()
            except Rejected as error:
                queue = f"{self._settings.take_queue}.rejected"
                broker.publish(
                    queue, body, message.content_type or "application/json", name, {REASON_HEADER: str(error)}
                )
                broker.ack(message)
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
    return body.encode() if isinstance(body, str) else bytes(body)  # type: ignore[call-overload]
