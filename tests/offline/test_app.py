"""The Celery app: set as it must be, on a broker found from the queue's own address; and messages that are lost."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest
from batching import batch_record
from certificates import Authority, secured
from flow import until
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from offline.app import HARD_LIMIT_S, QUEUE, VISIBILITY_S, broker, build_app
from offline.batch.batch_runner import DueNotifier
from offline.broker import Broker, BrokerUnavailable
from offline.settings import OfflineSettings
from penstock.config import ConfigError
from streaming.batches.store import Batches, BatchState
from streaming.errors import Unavailable
from streaming.keys import BROKER, channel
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings
from telemetry.metrics import Metrics

pytestmark = pytest.mark.slow


def nothing(_batch: str, _notice: int) -> None:
    """A task without work."""


def at(url: str, **own: str) -> tuple[str, dict[str, Any]]:
    return broker(OfflineSettings(**own), RedisSettings(url=url))


@pytest.mark.parametrize(("url", "theirs", "options"), [
    ("redis://:pw@h:1/2", "redis://:pw@h:1/2", {}),
    ("rediss://h:1/0", "rediss://h:1/0", {}),
    ("unix:///run/redis.sock", "redis+socket:///run/redis.sock", {}),
    ("unix://u:p%40w@/a%20b?db=2", "redis+socket://u:p%40w@/a%20b?virtual_host=2", {}),
    ("unix:///s?username=u&password=p%40w", "redis+socket://u:p%40w@/s", {}),
    (
        "redis+sentinel://u:p%40w@a:1,b:2/main/3",
        "sentinel://u:p%40w@a:1/3;sentinel://u:p%40w@b:2/3",
        {"master_name": "main"},
    ),
    (
        "rediss+sentinel://a:1/main?sentinel_password=s",
        "sentinel://a:1/0",
        {"sentinel_kwargs": {"ssl": True, "username": None, "password": "s", "socket_timeout": 4.0}},
    ),
])  # fmt: skip
def test_the_queues_own_redis_is_the_broker(url: str, theirs: str, options: dict[str, Any]) -> None:
    """Under a prefix of its own."""
    address, found = at(url)
    assert address == theirs
    assert found["global_keyprefix"] == BROKER
    assert found.items() >= options.items()


def test_a_cluster_needs_another() -> None:
    """Said with the setting that helps; any broker may be given."""
    with pytest.raises(ConfigError, match=r"offline.broker_url: Celery cannot use a Redis cluster"):
        at("redis+cluster://h:1")
    assert at("redis+cluster://h:1", broker_url="amqp://h//")[0] == "amqp://h//"


def test_it_is_set_as_it_must_be() -> None:
    """Late acknowledgement, JSON alone, one message a task, no task beyond half the visibility timeout, and nobody at
    the broker commands the process. The task's name is one that processes of two versions share."""
    app = build_app(OfflineSettings(), RedisSettings(), nothing)
    conf = app.conf
    assert conf.task_acks_late and conf.task_reject_on_worker_lost and conf.worker_prefetch_multiplier == 1
    assert conf.accept_content == conf.result_accept_content == ["json"] and conf.task_serializer == "json"
    assert conf.broker_transport_options["visibility_timeout"] == VISIBILITY_S > 2 * HARD_LIMIT_S
    assert conf.result_backend is None and conf.task_ignore_result
    assert not conf.worker_enable_remote_control
    assert "penstock.batch" in app.tasks


def test_nobody_at_its_broker_makes_it_decompress() -> None:
    """As task messages may ask it to, before Celery looks at them."""
    app, refused = build_app(OfflineSettings(broker_url="memory://"), RedisSettings(), nothing), list[Any]()
    app.send_task("penstock.batch", ("x" * 10**6, 1), compression="gzip")
    with app.connection_for_read() as connection:
        consumer = app.amqp.TaskConsumer(
            connection.channel(), on_decode_error=lambda message, _: refused.append(message)
        )
        with consumer:
            connection.drain_events(timeout=10)
    app.close()
    (message,) = refused
    assert len(message.body) < 10**4


@pytest.mark.parametrize(("url", "tls"), [
    ("redis://h:1/0", False),
    ("rediss://h:1/0", {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True}),
    ("rediss+sentinel://h:1/main", {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True}),
    ("amqps://h//", {"cert_reqs": ssl.CERT_REQUIRED, "server_hostname": None}),
])  # fmt: skip
def test_a_brokers_certificate_and_name_are_checked(url: str, tls: object) -> None:
    """Whatever kombu does when nobody says."""
    own, redis = ({"broker_url": url}, {}) if url.startswith("amqp") else ({}, {"url": url})
    app = build_app(OfflineSettings(**own), RedisSettings(**redis), nothing)
    assert app.conf.broker_use_ssl == tls
    app.close()


async def test_over_tls_nobody_is_believed_without_a_certificate(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue's own connection, Celery's and those of events alike refuse an unknown authority and another name; told
    of the authority, by the address or by SSL_CERT_FILE, they find their server."""
    authority = Authority(tmp_path / "authority")

    async def failures(port: int, host: str, more: str = "") -> list[str]:
        settings, found = RedisSettings(url=f"rediss://{host}:{port}/0{more}"), []
        wire, app, broker = (
            RedisClient.open(settings),
            build_app(OfflineSettings(), settings, nothing),
            Broker(settings.url),
        )
        steps = (
            wire.ping(),
            asyncio.to_thread(app.connection_for_write().channel),  # send_task does so, and tries again for seconds
            asyncio.to_thread(broker.publish, "q", b"{}", "application/json", "m", {}),
        )
        for ended in await asyncio.gather(*steps, return_exceptions=True):
            if isinstance(ended, BaseException):
                assert isinstance(ended, Unavailable | RedisConnectionError | BrokerUnavailable), ended
                found.append(str(ended))
        await wire.close()
        app.close()
        broker.close()
        return found

    async with secured(authority.server("localhost"), int(redis_url.split(":")[2].split("/", maxsplit=1)[0])) as port:
        unknown = await failures(port, "localhost")
        assert await failures(port, "localhost", f"?ssl_ca_certs={authority.file}") == []
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
        assert await failures(port, "localhost") == []
        another = await failures(port, "127.0.0.1")
    with Redis.from_url(redis_url) as redis:
        assert redis.llen("q") == 2
    assert len(unknown) == len(another) == 3
    assert all("unable to get local issuer certificate" in each for each in unknown)
    assert all("IP address mismatch" in each for each in another)


async def test_a_batch_is_told_of_as_soon_as_it_is_due(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one, one after a turn, one that its owner has steered: not at the next poll, which is an hour away."""
    monkeypatch.setattr("offline.batch.batch_runner.POLL_INTERVAL_S", 3600.0)
    settings = RedisSettings(url=redis_url)
    wire, app = RedisClient.open(settings), build_app(OfflineSettings(), settings, nothing)
    batches, metrics = Batches(wire), Metrics.start("", "offline")
    notifying = asyncio.create_task(DueNotifier(batches, app, metrics).keep_notifying())
    try:
        with Redis.from_url(redis_url) as redis:
            due = channel("offline", "due")
            await until(lambda: dict(redis.pubsub_numsub(due))[due.encode()])  # type: ignore[arg-type]
            batch = batch_record(id=batches.new_id("t"))
            await batches.create(batch, "digest")
            await until(lambda: redis.llen(f"{BROKER}{QUEUE}") == 1)
            hold = await batches.hold(batch.id, 1)
            await batches.save(hold, BatchState.IN_PROGRESS, hold.progress, rest_ms=0)
            await until(lambda: redis.llen(f"{BROKER}{QUEUE}") == 2)
            await batches.hold(batch.id, 2)
            await batches.request(batch.id, "cancel")
            await until(lambda: redis.llen(f"{BROKER}{QUEUE}") == 3)
    finally:
        notifying.cancel()
        await asyncio.gather(notifying, return_exceptions=True)
        app.close()
        await wire.close()


async def test_each_batch_is_told_by_one_message_and_again_when_it_is_lost(redis_url: str) -> None:
    """However many notifiers run; a lost message is sent again after a while, and the old one is worth nothing."""
    settings = RedisSettings(url=redis_url, lease_ms=400)
    wire, app = RedisClient.open(settings), build_app(OfflineSettings(), settings, nothing)
    batches = Batches(wire)
    try:
        for _ in range(3):
            await batches.create(batch_record(id=batches.new_id("t")), "digest")
        metrics = Metrics.start("", "offline")
        notifiers = [DueNotifier(batches, app, metrics) for _ in range(4)]
        assert sum(await asyncio.gather(*(notifier.notify() for notifier in notifiers))) == 3
        with Redis.from_url(redis_url) as redis:
            assert redis.llen(f"{BROKER}{QUEUE}") == 3
            redis.delete(f"{BROKER}{QUEUE}")
            assert await until(notifiers[0].notify) == 3
            assert redis.llen(f"{BROKER}{QUEUE}") == 3
            page = metrics.expose().decode()
            assert 'penstock_batch_due_notices_total{reason="due"} 3.0' in page
            assert 'penstock_batch_due_notices_total{reason="unanswered"} 3.0' in page
            assert all(key.startswith(b"penstock:") for key in redis.scan_iter("*"))
    finally:
        app.close()
        await wire.close()
