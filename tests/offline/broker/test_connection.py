"""The brokers of events: which are refused, what is asked of a connection, and what a message is published as."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from flow import until
from kombu import compression
from kombu.entity import Queue as BrokerQueue

from offline.broker import (
    MAX_MESSAGE_ID,
    RETRY_DELAY_S,
    Broker,
    BrokerUnavailable,
    Consumer,
    Rejected,
    check_broker,
)
from penstock.config import ConfigError
from streaming.errors import StoreFull
from streaming.events import EventSettings
from telemetry.metrics import Metrics


def test_an_unknown_kind_of_broker_is_refused_by_its_setting() -> None:
    """The password in its address is not said. None, and those that kombu knows, are fine."""
    for url in ("", "memory://", "redis://h:1/0", "amqp://u:p@h//"):
        check_broker("events.take_url", url)
    with pytest.raises(ConfigError, match=r"events\.take_url: no broker that kombu knows: smoke://") as refused:
        check_broker("events.take_url", "smoke://user:secret@h/")
    assert "secret" not in str(refused.value)


def test_what_is_published_is_to_survive_the_broker() -> None:
    """Whoever takes it finds its name, its kind and its headers."""
    broker = Broker("memory://")
    broker.publish("survives", b'{"a": 1}', "application/json", "m-1", {"x-reason": "r"})
    broker.consume("survives", 1)
    (message,) = broker.take(10.0)
    assert message.properties["delivery_mode"] == 2, "kept on disk, in the words of AMQP"
    assert (message.properties["message_id"], message.content_type) == ("m-1", "application/json")
    assert (message.headers, json.loads(message.body)) == ({"x-reason": "r"}, {"a": 1})
    broker.ack(message)
    broker.close()


def test_a_queue_is_declared_before_the_first_message_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message for a queue that is not there is dropped by RabbitMQ without a word."""
    declared: list[str] = []
    declare = BrokerQueue.declare

    def noted(queue: BrokerQueue, **options: Any) -> object:
        declared.append(queue.name)
        assert queue.durable
        return declare(queue, **options)

    monkeypatch.setattr(BrokerQueue, "declare", noted)
    broker = Broker("memory://")
    for _ in range(2):
        for queue in ("one", "two"):
            broker.publish(queue, b"{}", "application/json", "m", {})
    broker.close()
    assert declared == ["one", "two"]


async def test_a_connection_that_is_listened_to_has_a_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a broker that has silently gone is waited for for ever."""
    asked: list[int] = []

    class Away(Broker):
        def __init__(self, url: str, heartbeat_s: int = 0) -> None:
            super().__init__(url, heartbeat_s)
            asked.append(heartbeat_s)

        def connect(self) -> None:
            raise BrokerUnavailable("nobody is there")

    monkeypatch.setattr("offline.broker.Broker", Away)
    metrics = Metrics.start("", "offline")
    taker = Consumer(None, EventSettings(take_url="memory://"), metrics)  # type: ignore[arg-type]
    taker.start()
    await until(lambda: asked)
    await taker.stop()
    metrics.close()
    assert min(asked) > 0


async def test_a_message_that_has_to_wait_is_held_until_there_is_room() -> None:
    """It is looked at again every RETRY_DELAY_S, and acknowledged once it is a job."""
    answers: list[StoreFull | str] = [StoreFull("no room"), StoreFull("no room"), "job_1"]
    done: list[object] = []

    async def accept(_body: bytes, _name: str, *, redelivered: bool, trace: Mapping[str, str]) -> str:
        if isinstance(answer := answers.pop(0), StoreFull):
            raise answer
        assert not redelivered and not trace
        return answer

    metrics = Metrics.start("", "offline")
    intake: Any = SimpleNamespace(accept=accept)
    broker: Any = SimpleNamespace(hold=done.append, ack=done.append)
    message: Any = SimpleNamespace(body=b"{}", properties={}, delivery_info={}, headers={}, errors=[])
    taker = Consumer(intake, EventSettings(take_url="memory://"), metrics)
    await asyncio.to_thread(taker._take, broker, message, asyncio.get_running_loop())
    metrics.close()
    assert done == [RETRY_DELAY_S, RETRY_DELAY_S, message] and answers == []


@pytest.mark.parametrize("name", [*compression.encoders(), "gzip", "one of tomorrow"])
def test_what_a_header_asks_to_decompress_comes_as_it_was_sent(name: str) -> None:
    """With an error: some kB would become GB, and a message that kombu cannot read would come again and again."""
    broker, sent = Broker("memory://"), compression.compress(b"\0" * 10**6, "gzip")[0]
    broker.publish("packed", sent, "application/json", "m-1", {"compression": name})
    broker.consume("packed", 1)
    (message,) = broker.take(10.0)
    assert message.errors and message.body == sent
    broker.ack(message)
    broker.close()


async def test_a_rejected_message_is_named_and_not_copied() -> None:
    """Also one that the intake never sees; the broker may keep it where it keeps such messages."""
    done, notes = list[object](), list[tuple[str, dict[str, Any]]]()

    def publish(queue: str, body: bytes, _type: str, name: str, headers: Mapping[str, str]) -> None:
        notes.append((queue, json.loads(body)))
        assert name == notes[-1][1]["message_id"] and headers["x-penstock-reason"] == notes[-1][1]["reason"]

    async def accept(_body: bytes, _name: str, **_more: Any) -> str:
        raise Rejected("it says nothing")

    metrics = Metrics.start("", "offline")
    intake: Any = SimpleNamespace(accept=accept)
    broker: Any = SimpleNamespace(publish=publish, reject=done.append)
    taker = Consumer(intake, EventSettings(take_url="memory://", take_queue="in"), metrics)
    texts: list[Any] = [b"secret", "secret", "secret\ud800"]
    messages: list[Any] = [
        SimpleNamespace(body=text, properties={"message_id": "m" * 999}, delivery_info={}, headers={}, errors=errors)
        for text, errors in zip(texts, ([], ["compressed"], ["no text"]), strict=True)
    ]
    for message in messages:
        await asyncio.to_thread(taker._take, broker, message, asyncio.get_running_loop())
    metrics.close()
    assert done == messages
    for (queue, note), words in zip(notes, ("it says nothing", "compressed", "no text"), strict=True):
        assert queue == "in.rejected" and words in note["reason"] and "secret" not in str(note)
        assert len(note["message_id"]) == MAX_MESSAGE_ID
    assert notes[0][1]["bytes"] == 6 and notes[0][1]["sha256"] == hashlib.sha256(b"secret").hexdigest()


@pytest.mark.parametrize("payload", [
    {"model": "m"}, "text", {"body": 7, "properties": {"delivery_tag": "t", "body_encoding": "base64"}},
])  # fmt: skip
def test_json_that_kombu_did_not_write_is_a_message(payload: Any) -> None:
    """A bare LPUSH, which kombu would lose: its body is the whole, and it can be restored to its queue."""
    broker = Broker("memory://")
    broker.consume("bare", 1)
    broker._connection.channel()._put("bare", payload)
    (message,) = broker.take(10.0)
    assert json.loads(message.body) == payload and message.properties["delivery_tag"]
    assert message.delivery_info == {"exchange": "", "routing_key": "bare"}
    broker.ack(message)
    broker.close()
