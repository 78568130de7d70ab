"""A message broker as kombu knows it: how to reach it, and what its failures look like. Knows no job and no event."""

from __future__ import annotations

import contextlib
import ssl
import time
from typing import Any
from urllib.parse import urlsplit

from kombu.connection import Connection
from kombu.entity import Queue
from kombu.exceptions import KombuError
from kombu.message import Message
from kombu.messaging import Producer

from runtime.config import ConfigError

ANSWER_S = 10.0
HEARTBEAT_S = 20
"""For a connection that is listened to."""
VISIBILITY_S = 60
"""On brokers without acknowledgements of their own, such as Redis: when a message comes back whose taker was killed."""


def check_broker(key: str, url: str) -> None:
    """Whether kombu knows this kind of broker; nothing is connected to. Raises ConfigError."""
    try:
        Connection(url or "memory://").get_transport_cls()
    except (KeyError, ImportError, ValueError):
        scheme = urlsplit(url).scheme
        raise ConfigError(key, f"no broker that kombu knows: {scheme}://", "redis://..., amqp://...") from None


def tls_of(url: str) -> dict[str, Any] | None:
    """How kombu is to speak TLS with a broker at this address; left to itself it believes any certificate (rediss), or
    does not look at its name (amqps). `ssl_*` options in the address of a Redis go before these."""
    scheme = urlsplit(url).scheme
    if scheme in ("rediss", "rediss+sentinel"):
        return {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True}
    if scheme == "amqps":
        return {"cert_reqs": ssl.CERT_REQUIRED, "server_hostname": None}  # kombu's word for: the address's own
    return None


class BrokerUnavailable(Exception):
    """Raised when the broker is away or the connection is lost. Its words hold no password."""


class Broker:
    """One connection, for one thread. Every method raises Broken; after it a new one is needed."""

    def __init__(self, url: str, heartbeat_s: int = 0) -> None:
        self._connection = Connection(
            url, heartbeat=heartbeat_s, connect_timeout=4, transport_options=_options(url), ssl=tls_of(url) or False
        )
        self._faults = (
            OSError, KombuError, *self._connection.connection_errors, *self._connection.channel_errors
        )  # fmt: skip
        self._where = self._connection.as_uri()  # without its password
        self._taken: list[Message] = []
        self._queues: set[str] = set()
        self._producer: Producer | None = None

    def connect(self) -> None:
        self._guard(self._connection.connect)

    def consume(self, queue: str, ahead: int) -> None:
        """Begin to be sent messages, at most `ahead` before they are acknowledged."""

        def begin() -> None:
            channel = self._connection.channel()
            consumer = self._connection.Consumer(
                [_queue(queue)], channel=channel, prefetch_count=ahead, on_message=self._taken.append
            )
            consumer.consume()

        self._guard(begin)

    def take(self, seconds: float) -> list[Message]:
        """Messages that have come, waiting so long for the first."""
        if not self._taken:
            self._guard(lambda: self._listen(seconds))
        taken = list(self._taken)
        self._taken.clear()
        return taken

    def hold(self, seconds: float) -> None:
        """Wait with messages in hand, and have the broker know that we are there."""
        if self._connection.supports_heartbeats:
            self._guard(lambda: self._listen(seconds))
        else:
            time.sleep(seconds)

    def _listen(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):  # nothing came: the usual case
            self._connection.drain_events(timeout=seconds)
        self._connection.heartbeat_check()

    def publish(self, queue: str, body: bytes, content_type: str, message_id: str, headers: dict[str, str]) -> None:
        """Returns when the broker has it. The queue is made if there is none, and it survives the broker."""

        def send() -> None:
            if self._producer is None:
                self._producer = self._connection.Producer(self._connection.channel())
            if queue not in self._queues:
                _queue(queue)(self._producer.channel).declare()
                self._queues.add(queue)
            self._producer.publish(
                body, exchange="", routing_key=queue, content_type=content_type, content_encoding="utf-8",
                headers=headers, message_id=message_id, delivery_mode=2, retry=False,
            )  # fmt: skip

        self._guard(send)

    def ack(self, message: Message) -> None:
        """It need not come again."""
        self._guard(message.ack)

    def close(self) -> None:
        """What is held comes again, to whoever takes next. Never raises."""
        with contextlib.suppress(BrokerUnavailable):  # it was closed already, from the other side
            self._guard(self._connection.release)

    def _guard(self, step: Any) -> None:
        try:
            step()
        except self._faults as error:
            raise BrokerUnavailable(f"{self._where}: {type(error).__name__} {error}") from error


def _queue(name: str) -> Queue:
    return Queue(name, durable=True)


def _options(url: str) -> dict[str, Any]:
    """What each kind of broker needs so that a failure shows, and shows soon."""
    scheme = urlsplit(url).scheme
    if scheme in ("amqp", "amqps", "pyamqp"):
        return {"confirm_publish": True, "read_timeout": ANSWER_S, "write_timeout": ANSWER_S}
    if scheme.startswith(("redis", "sentinel")):
        wait = {"socket_timeout": ANSWER_S, "socket_connect_timeout": 4.0, "socket_keepalive": True}
        return wait | {"visibility_timeout": VISIBILITY_S}
    return {}
