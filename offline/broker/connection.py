"""Broker connection: connects, consumes, publishes and acknowledges over kombu, and maps its errors to one."""

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

from penstock.config import ConfigError

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
        self._queues: set[str] = set()
        self._producer: Producer | None = None

    def connect(self) -> None:
        self._guard(self._connection.connect)

    def consume(self, queue: str, prefetch: int) -> None:
        """Start consuming, with at most `prefetch` unacknowledged messages."""

        def begin() -> None:
            channel = self._connection.channel()
            consumer = self._connection.Consumer(
                [_queue(queue)], channel=channel, prefetch_count=prefetch, on_message=self._received.append
            )
            consumer.consume()

        self._guard(begin)

    def take(self, seconds: float) -> list[Message]:
        """Return the messages that have arrived; wait up to `seconds` for the first."""
        if not self._received:
            self._guard(lambda: self._drain(seconds))
        received = list(self._received)
        self._received.clear()
        return received

    def hold(self, seconds: float) -> None:
        """Wait while holding unacknowledged messages, and keep sending heartbeats to the broker."""
        if self._connection.supports_heartbeats:
            self._guard(lambda: self._drain(seconds))
        else:
            time.sleep(seconds)

    def _drain(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):  # no message: the usual case
            self._connection.drain_events(timeout=seconds)
        self._connection.heartbeat_check()

    def publish(self, queue: str, body: bytes, content_type: str, message_id: str, headers: dict[str, str]) -> None:
        """Publish a persistent message; return when the broker has it. Declares the durable queue first."""

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
        """Acknowledge the message."""
        self._guard(message.ack)

    def close(self) -> None:
        """Close the connection; the broker redelivers unacknowledged messages. Never raises."""
        with contextlib.suppress(BrokerUnavailable):  # the broker has closed it already
            self._guard(self._connection.release)

    def _guard(self, step: Any) -> None:
        try:
            step()
        except self._errors as error:
            raise BrokerUnavailable(f"{self._address}: {type(error).__name__} {error}") from error


def _queue(name: str) -> Queue:
    return Queue(name, durable=True)


def _options(url: str) -> dict[str, Any]:
    """Return the options of each kind of broker that make failures show, and show soon."""
    scheme = urlsplit(url).scheme
    if scheme in ("amqp", "amqps", "pyamqp"):
        return {"confirm_publish": True, "read_timeout": SOCKET_TIMEOUT_S, "write_timeout": SOCKET_TIMEOUT_S}
    if scheme.startswith(("redis", "sentinel")):
        wait = {"socket_timeout": SOCKET_TIMEOUT_S, "socket_connect_timeout": 4.0, "socket_keepalive": True}
        return wait | {"visibility_timeout": VISIBILITY_S}
    return {}
