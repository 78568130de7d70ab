"""What the tests of events share, whatever the broker: messages in, events out, by kombu as anybody would use it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from batching import tools_of
from house import House, eventually
from kombu import Connection, Queue

from offline.broker import Intake
from streaming.events import EventSettings, EventSubscriptions
from streaming.fleet.aliases import NO_ALIASES, Aliases
from streaming.jobs.settings import NO_LIMITS, Limits
from streaming.redis.client import RedisClient

JOBS, EVENTS = "penstock.jobs", "penstock.events"
LIVES = ("job.accepted", "job.started", "job.completed")


def configure(house: House, url: str, more: str = "") -> None:
    """One setting turns each direction on."""
    text = f'[events]\ntake_url = "{url}"\npublish_url = "{url}"\n{more}'
    (house.folder / "penstock.toml").write_text(text)


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}


async def intake_of(
    wire: RedisClient,
    *,
    entered: bool = True,
    limits: Limits = NO_LIMITS,
    aliases: Aliases = NO_ALIASES,
    **more: Any,
) -> Intake:
    """What makes jobs of messages, for the model `sim`; `entered`: it knows of the store already."""
    tools, events = tools_of(wire, limits=limits, aliases=aliases), EventSettings()
    if entered:
        await tools.store.require()
        await tools.headroom.look()
    return Intake(tools, events, EventSubscriptions(events, {}), **more)


class Outside:
    """Somebody else at the broker. What it puts it puts again until the broker has it, under the same message id."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.events: list[dict[str, Any]] = []

    def put(self, message_id: str, content: Any, queue: str = JOBS) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()

        def send(connection: Connection) -> bool:
            producer = connection.Producer()
            Queue(queue, durable=True)(producer.channel).declare()
            producer.publish(
                data, exchange="", routing_key=queue, content_type="application/json", content_encoding="utf-8",
                message_id=message_id, delivery_mode=2,
            )  # fmt: skip
            return True

        self._with_connection(send)

    def read(self, queue: str = EVENTS, seconds: float = 0.3) -> list[Any]:
        """What lies in a queue, or comes while it is looked at; acknowledged once it is here."""
        found: list[Any] = []

        def drain(connection: Connection) -> bool:
            # One by one: a consumer of kombu's may be given a message while it is closed, and lose it.
            lying = Queue(queue, durable=True)(connection.default_channel)
            lying.declare()
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                message = lying.get()
                if message is not None:
                    found.append((message.headers, message.body))
                    message.ack()
                elif found:
                    break
                else:
                    time.sleep(0.02)
            return True

        self._with_connection(drain)
        return found

    def hear(self) -> list[dict[str, Any]]:
        """All events so far, as often as they came."""
        for _, data in self.read():
            self.events.append(json.loads(data))
        return self.events

    def completed(self) -> dict[str, dict[str, Any]]:
        """The ends by the jobs' metadata name; each event once."""
        ends = {event["id"]: event for event in self.hear() if event["type"] == "penstock.job.completed"}
        return {event["data"]["metadata"]["name"]: event for event in ends.values()}

    def _with_connection(self, work: Callable[[Connection], bool]) -> None:
        def once() -> bool:
            with Connection(self.url, transport_options={"confirm_publish": True}) as connection:
                connection.connect()
                try:
                    return work(connection)
                except (*connection.connection_errors, *connection.channel_errors) as error:
                    raise OSError(str(error)) from error

        eventually(once, Exception, seconds=90)


def lives_are_whole(outside: Outside, names: set[str]) -> None:
    """Every message became one job, and every job's life was told: nothing lost, and repetitions told apart by id."""
    eventually(lambda: set(outside.completed()) >= names, seconds=120)
    events = {event["id"]: event for event in outside.events}
    jobs = {event["subject"] for event in events.values()}
    assert len(jobs) == len(names)
    told = [(event["subject"], event["type"].removeprefix("penstock.")) for event in events.values()]
    eventually(lambda: sorted(_told(outside)) == sorted((job, kind) for job in jobs for kind in LIVES), seconds=60)
    assert len(told) == len(set(told))


def _told(outside: Outside) -> list[tuple[str, str]]:
    events = {event["id"]: event for event in outside.hear()}
    return [(event["subject"], event["type"].removeprefix("penstock.")) for event in events.values()]
