"""Events in and out through kombu, with Redis as the broker: a message becomes a job, and its life is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest
from batching import tools_of
from brokering import EVENTS, JOBS, Outside, body, configure, intake_of, lives_are_whole
from house import House, eventually, free_port, redis_process
from redis import Redis

from offline import broker as publishers
from offline.broker import MAX_REDELIVERIES, BrokerUnavailable, Rejected, cloud_event
from streaming.errors import LaneFull, LimitReached, QuotaExceeded, StreamingError, Unavailable
from streaming.events import Event, EventSettings, EventSubscriptions, WebhookSettings
from streaming.fleet.aliases import Aliases
from streaming.jobs.job import Job
from streaming.jobs.queue import Accepted, Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.settings import Limits, LimitSettings, QuotaSettings
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings

pytestmark = pytest.mark.slow

JOB = "job_00" + "1" * 30
SECRET = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="


@pytest.fixture
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis that is the broker alone; the queue has its own."""
    with redis_process(tmp_path_factory.mktemp("broker")) as url:
        yield url


def start(house: House) -> None:
    house.start_all("workers", "offline")


def test_an_event_is_a_cloud_event_and_its_id_is_made_of_what_happened() -> None:
    event = Event(JOB, "t", "job.completed", 1_700_000_000_123, 0, "1700000000123-0")
    again = Event(JOB, "t", "job.completed", 1_700_000_009_999, 0, "1700000009999-0")
    told = json.loads(cloud_event(event, None, "/here", results=False))
    assert told["specversion"] == "1.0" and told["source"] == "/here" and told["subject"] == JOB
    assert told["type"] == "penstock.job.completed" and told["data"] == {"id": JOB, "tenant": "t"}
    assert datetime.fromisoformat(told["time"]).timestamp() == 1_700_000_000.123
    assert told["id"] == again.id == event.id != Event(JOB, "t", "job.failed", 0, 0, "").id


def test_only_those_who_are_asked_for_are_named() -> None:
    row = WebhookSettings(url="https://example.com", secret=SECRET, tenant="a", events=("batch.failed",))
    wanted = EventSubscriptions(EventSettings(), {"x": row})
    assert (wanted.of("a", "job"), wanted.of("a", "batch"), wanted.of("b", "batch")) == ("", "w", "")
    wanted = EventSubscriptions(EventSettings(publish_url="redis://127.0.0.1"), {"x": row})
    assert (wanted.of("a", "job"), wanted.of("a", "batch"), wanted.of("b", "batch")) == ("b", "bw", "b")
    nobody = EventSubscriptions(EventSettings(), {})
    assert (nobody.of("a", "job"), nobody.of("a", "response"), nobody.of("a", "batch")) == ("", "", "")


def test_a_message_becomes_a_job_and_its_life_comes_out(empty_house: House, broker: str) -> None:
    """Tenant and lane are the setting's, whatever the message says; the same message twice is one job."""
    more = 'take_tenant = "outside"\ntake_priority = "batch"\nresults = true\nsource = "/house"\n'
    configure(empty_house, broker, more)
    start(empty_house)
    outside = Outside(broker)
    asked = body("hello", metadata={"name": "one"}, tenant="local", queue={"priority": "interactive"})
    for _ in range(2):
        outside.put("m-1", asked)
    lives_are_whole(outside, {"one"})
    event = outside.completed()["one"]
    assert event["data"]["tenant"] == "outside" and event["data"]["priority"] == "batch"
    assert event["source"] == "/house" and event["data"]["result"]["choices"][0]["message"]["content"]
    assert json.loads(empty_house.get("/v1/jobs")[1])["data"] == []  # of tenant local


def test_what_cannot_be_a_job_is_put_aside_with_the_reason(empty_house: House, broker: str) -> None:
    """And what comes behind it goes on, also behind bytes that kombu did not write."""
    configure(empty_house, broker)
    with Redis.from_url(broker) as redis:
        redis.lpush(JOBS, b"no message of kombu's", b'{"body": 7, "properties": {"body_encoding": "base64"}}')
    outside = Outside(broker)
    start(empty_house)
    outside.put("bad-1", b"not json")
    outside.put("bad-2", body("x") | {"model": "nobody"})
    outside.put("bad-3", body("x", max_tokens=-1))
    outside.put("good", body("fine", metadata={"name": "good"}))
    outside.put("good", body("another", metadata={"name": "other"}))
    outside.put("i" * 300, body("x"))
    lives_are_whole(outside, {"good"})
    rejected: list[tuple[dict[str, str], bytes | str]] = []
    eventually(lambda: rejected.extend(outside.read(f"{JOBS}.rejected")) or len(rejected) == 6)
    expected = ["model is", "not valid JSON", "does not exist here", "max_tokens", "another body", "message_id"]
    for (headers, _), words in zip(rejected, expected, strict=True):
        assert words in headers["x-penstock-reason"]
    note = json.loads(rejected[1][1])
    assert (note["message_id"], note["bytes"], note["reason"]) == ("bad-1", 8, rejected[1][0]["x-penstock-reason"])


async def test_a_message_may_name_an_alias_or_no_model(wire: RedisClient) -> None:
    """As at the door, for the tenant of all messages."""
    intake = await intake_of(
        wire, aliases=Aliases({"gpt-*": "sim"}, {"local": {"mine": "sim"}, "red": {"its": "sim"}}, "mine")
    )
    for name in ("gpt-4o", "mine", None):
        job_id = await intake.accept(json.dumps(body("x", model=name)).encode(), f"of {name}")
        assert (await JobReader(wire).outline(job_id)).job.model == "sim"
    with pytest.raises(Rejected, match="its"):
        await intake.accept(json.dumps(body("x", model="its")).encode(), "of another")


async def test_a_message_that_makes_its_taker_fail_is_put_aside(
    wire: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes again a few times, then it is rejected with the reason; what comes beside it is taken."""
    intake = await intake_of(wire)
    poison, good = (json.dumps(body(text)).encode() for text in ("poison", "good"))
    put = Queue.put

    async def fails(queue: Queue, job: Job, **more: Any) -> Accepted:
        if "poison" in str(job.prompt):
            raise LookupError("nobody thought of this")
        return await put(queue, job, **more)

    monkeypatch.setattr(Queue, "put", fails)
    for number in range(MAX_REDELIVERIES + 1):
        with pytest.raises(LookupError):
            await intake.accept(poison, "poison", redelivered=number > 0)
        await intake.accept(good, f"good {number}", redelivered=number > 0)
    with pytest.raises(Rejected, match="failed without an answer"):
        await intake.accept(poison, "poison", redelivered=True)
    assert await wire.redis.keys("*redelivery*") == []


@pytest.mark.parametrize("refusal", [LaneFull, QuotaExceeded, LimitReached, Unavailable])
async def test_a_message_that_has_to_wait_is_rejected_by_no_number_of_tries(
    redis_url: str, refusal: type[StreamingError]
) -> None:
    """The lane is full, or its tenant's quota, or a limit is reached, or the store is away: it comes again and again,
    and harms nobody."""
    wire = RedisClient.open(RedisSettings(url=redis_url, lane_limit=1 if refusal is LaneFull else 9))
    quota = QuotaSettings(jobs=1 if refusal is QuotaExceeded else 9)
    entered = refusal is not Unavailable  # else nothing is accepted until the store was looked at
    limits = Limits({"local": LimitSettings(requests_per_minute=1)} if refusal is LimitReached else {}, {})
    intake = await intake_of(wire, entered=entered, quota=quota, limits=limits)
    message = json.dumps(body("hello")).encode()
    first = await intake.accept(message, "first") if entered else ""
    for _ in range(2 * MAX_REDELIVERIES):
        with pytest.raises(refusal):
            await intake.accept(message, "second", redelivered=True)
    if entered:
        assert await intake.accept(message, "first", redelivered=True) == first, "it is accepted already"
    assert await wire.redis.keys("*redelivery*") == []
    await wire.close()


async def test_a_message_that_exceeds_a_whole_limit_is_rejected(wire: RedisClient) -> None:
    limits = Limits({"local": LimitSettings(tokens_per_day=3)}, {})
    intake = await intake_of(wire, limits=limits)
    with pytest.raises(Rejected, match="tokens_per_day"):
        await intake.accept(json.dumps(body("hello") | {"max_tokens": 50}).encode(), "large")
    assert await wire.redis.keys("*:job:*") == []


async def test_a_connection_that_broke_is_closed_before_another_is_made(
    wire: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker may have come back at the same address: what is left of the old connection would fail for ever."""
    done = asyncio.Event()
    monkeypatch.setattr(publishers, "RETRY_DELAY_S", 0.0)
    publisher = publishers.Publisher(tools_of(wire), "p", EventSettings())
    closed = list[object]()

    async def publish() -> int:
        if publisher._broker is None:
            done.set()
            return 0
        raise BrokerUnavailable("gone")

    publisher.publish = publish  # type: ignore[method-assign]
    publisher._broker = cast(Any, SimpleNamespace(close=lambda: closed.append(1)))
    task = asyncio.create_task(publisher.keep_publishing())
    async with asyncio.timeout(20):
        await done.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert closed == [1]


def test_off_by_default(empty_house: House) -> None:
    """No broker is asked for, no record names anybody, and jobs leave no events."""
    start(empty_house)
    status, _, answer = empty_house.post("/v1/jobs", body("hello"))
    assert status == 202
    job = json.loads(answer)["id"]
    eventually(lambda: json.loads(empty_house.get(f"/v1/jobs/{job}")[1])["status"] == "completed")
    with Redis.from_url(empty_house.redis_url) as redis:
        assert not [key for kind in ("outbox", "hook", EVENTS, JOBS) for key in redis.keys(f"*{kind}*")]


def test_a_broker_that_breaks_in_the_middle_loses_nothing(
    empty_house: House, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """All its connections are cut, and then it is ended and started again on what it has written, while events are on
    their way. No message is: in the instant in which one is taken Redis as the broker can lose it (docs/events.md)."""
    folder, port = tmp_path_factory.mktemp("broker"), free_port()
    options = ("--appendonly", "yes", "--appendfsync", "always")
    names = [f"n-{number}" for number in range(60)]
    url = f"redis://127.0.0.1:{port}/0"
    configure(empty_house, url)
    outside = Outside(url)

    def put(some: Sequence[str]) -> None:
        before = jobs_kept(empty_house)
        for name in some:
            outside.put(name, body(name, metadata={"name": name}))
        eventually(lambda: jobs_kept(empty_house) == before + len(some))

    with redis_process(folder, port, *options):
        start(empty_house)
        put(names[:20])
        with Redis.from_url(url) as redis:
            for _ in range(3):
                redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            put(names[20:40])
            redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    with redis_process(folder, port, *options):
        put(names[40:])
        lives_are_whole(outside, set(names))


def jobs_kept(house: House) -> int:
    """Jobs that the store of this house has a record of."""
    with Redis.from_url(house.redis_url) as redis:
        return sum(1 for _ in redis.scan_iter("penstock:*:job:job_*", count=1000))


def test_a_killed_publisher_leaves_its_events_to_another(empty_house: House, broker: str) -> None:
    """Taken out of the outbox for publishing and not said to be published: they come again, under the same ids."""
    empty_house.environ["PENSTOCK_REDIS_PARTITIONS"] = "3"
    configure(empty_house, broker)
    start(empty_house)
    outside = Outside(broker)
    names = {f"n-{number}" for number in range(80)}
    for name in sorted(names):
        assert empty_house.post("/v1/jobs", body(name, metadata={"name": name}))[0] == 202
    eventually(lambda: len(outside.completed()) >= 5)
    empty_house._processes[-1].kill()
    empty_house.start("offline", "--id", "offline-2")
    lives_are_whole(outside, names)
