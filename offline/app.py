"""Celery app: its broker, its settings and its one task. Celery only carries reminders, never state.

Over Redis, Celery loses a message when its worker is killed between taking it and recording that it took it, and it
gives a long task to a second worker after the visibility timeout. So a message only says "work on this batch"; the
batch, its fencing token and its next due time are in Penstock's own keys, and offline.batch.batch_runner repeats lost
messages. A new kind of work gets a task here and a notifier of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

from celery import Celery

from offline.broker import tls_of
from offline.settings import OfflineSettings
from penstock.config import ConfigError
from streaming.keys import BROKER
from streaming.redis.settings import Address, RedisSettings, parse_address

QUEUE = "offline"
LOOK_AT_BATCH = "penstock.batch"
"""Name of the task; its arguments are the id of a batch and the number of the due notice."""

VISIBILITY_S = 3600
HARD_LIMIT_S = VISIBILITY_S // 2 - 60
"""Seconds a task may take: less than the visibility timeout, so that no second worker gets a task that still runs."""

BRPOP_TIMEOUT_S = 2
"""Seconds that one BRPOP blocks. A process that stops waits for the one under way."""

SETTINGS: dict[str, Any] = {
    "task_acks_late": True,
    "task_reject_on_worker_lost": True,
    "task_ignore_result": True,
    "task_default_queue": QUEUE,
    "task_serializer": "json",
    "result_serializer": "json",
    "accept_content": ["json"],
    "result_accept_content": ["json"],
    "worker_prefetch_multiplier": 1,
    "worker_hijack_root_logger": False,
    "worker_enable_remote_control": False,
    "broker_connection_retry_on_startup": True,
    "broker_connection_max_retries": None,
    "broker_connection_timeout": 4,
}
"""Acknowledge a message after its task, accept only JSON, prefetch nothing, and reconnect to the broker without end."""


def build_app(settings: OfflineSettings, redis: RedisSettings, look_at_batch: Callable[[str, int], None]) -> Celery:
    """Build the app. Celery calls `look_at_batch(batch, notice)` in a thread of its own. Raises ConfigError."""
    url, options = broker(settings, redis)
    app = Celery("penstock", broker=url, set_as_current=False)
    tls = tls_of(settings.broker_url or redis.url) or False
    app.conf.update(SETTINGS, broker_transport_options=options, broker_use_ssl=tls)
    app.task(name=LOOK_AT_BATCH)(look_at_batch)
    app.finalize()
    return app


def broker(settings: OfflineSettings, redis: RedisSettings) -> tuple[str, dict[str, Any]]:
    """Return the broker's address and transport options in the form kombu expects. Raises ConfigError."""
    if settings.broker_url:
        return settings.broker_url, {"visibility_timeout": VISIBILITY_S}
    options: dict[str, Any] = {
        "visibility_timeout": VISIBILITY_S,
        "global_keyprefix": BROKER,
        "polling_interval": BRPOP_TIMEOUT_S,
        "socket_timeout": max(4.0, 2 * redis.timeout_s),
        "socket_connect_timeout": redis.timeout_s,
        "socket_keepalive": True,
    }
    address = parse_address(redis.url)
    match address.kind:
        case "server":
            return (_over_socket(redis.url) if redis.url.startswith("unix://") else redis.url), options
        case "sentinel":
            sentinel_options = {
                "ssl": address.tls,
                "username": address.sentinel_username,
                "password": address.sentinel_password,
                "socket_timeout": options["socket_timeout"],
            }
            return _sentinels(address), options | {"master_name": address.service, "sentinel_kwargs": sentinel_options}
        case "cluster":
            raise ConfigError(
                "offline.broker_url",
                "Celery cannot use a Redis cluster",
                "give it a server of its own: a small Redis, or RabbitMQ (amqp://...)",
            )


def _over_socket(url: str) -> str:
    """Translate a unix:// address to kombu's form: database as virtual host, login before the path."""
    parts, query = urlsplit(url), dict(parse_qsl(urlsplit(url).query))
    login, at, _ = parts.netloc.rpartition("@")
    if not at and (query.keys() & {"username", "password"}):
        login, at = f"{quote(query.get('username', ''), safe='')}:{quote(query.get('password', ''), safe='')}", "@"
    database = f"?virtual_host={query['db']}" if "db" in query else ""
    return f"redis+socket://{login}{at}{parts.path}{database}"


def _sentinels(address: Address) -> str:
    login = ""
    if address.password:
        login = f"{quote(address.username or '', safe='')}:{quote(address.password, safe='')}@"
    return ";".join(f"sentinel://{login}{host}:{port}/{address.db}" for host, port in address.hosts)
