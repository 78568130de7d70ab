"""GET /v1/jobs/{id}/events through an API process, while the test itself writes what workers would."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any, TextIO, cast

import msgspec
import pytest
from connections import PATIENCE_S
from flow import append, delta, until, waits_again
from hand import LEASE_MS, Hand, lapse
from house import House, module_house
from starlette.types import Message
from stream_reader import Event, StreamReader, events_in

from api import events as events_endpoint
from api.events import EventStream
from api.openai.cursor import Cursor
from api.openai.rendering import Facts
from api.settings import ApiSettings
from streaming.errors import Unavailable
from streaming.ids import new_job_id
from streaming.jobs.codec import Opening
from streaming.jobs.job import Job, Text
from streaming.jobs.lease import Claim
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.records import JobRecord
from streaming.jobs.relay import Relay
from streaming.keys import partition_key
from streaming.order import Priority
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings

pytestmark = pytest.mark.slow

BODY = {"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 99}


class Listener(StreamReader):
    """Reads a job's events in the background, as they come: the logged ones, and those without an id of these names."""

    def __init__(self, house: House, job_id: str, query: str = "", unlogged: Sequence[str] = ()) -> None:
        self._unlogged = unlogged
        super().__init__(house.port, f"/v1/jobs/{job_id}/events{query}")

    @property
    def events(self) -> list[Event]:
        return [event for event in events_in(self.data) if event.id or event.name in self._unlogged]

    async def until(self, name: str, count: int = 1) -> None:
        """Wait until so many events of a kind have come."""
        await until(lambda: [event.name for event in self.events].count(name) >= count)

    async def ended(self) -> list[Event]:
        await self.read_out()
        return self.events


door = module_house(PENSTOCK_REDIS_LEASE_MS=str(LEASE_MS))
"""An API process without workers, on a server of its own."""


@pytest.fixture
async def door_wire(door: House) -> AsyncIterator[RedisClient]:
    wire = RedisClient.open(RedisSettings(url=door.redis_url, lease_ms=LEASE_MS))
    yield wire
    await wire.close()


async def put(house: House, **changes: object) -> str:
    answer = await asyncio.to_thread(house.post, "/v1/jobs", BODY | changes)
    assert answer[0] == 202
    job_id: str = json.loads(answer[2])["id"]
    return job_id


async def read(house: House, job_id: str, after: str = "") -> list[Event]:
    """All that follows a cursor, of a job that has ended."""
    status, data = await asyncio.to_thread(house.get, f"/v1/jobs/{job_id}/events?after={after}".removesuffix("?after="))
    assert status == 200, data
    return [event for event in events_in(data) if event.id]


async def begun(house: House, wire: RedisClient, letters: str) -> tuple[str, Listener, Hand]:
    """A job, a reader who has all that was written of it, and the worker that wrote it."""
    job_id = await put(house)
    live, worker = Listener(house, job_id), await Hand.claiming(wire, "worker-1")
    await worker.write(letters)
    await live.until("delta", len(letters))
    return job_id, live, worker


async def resets(house: House) -> float:
    """Of streams, that this API process has told its readers of."""
    text = (await asyncio.to_thread(house.get, "/metrics"))[1].decode()
    found = [line for line in text.splitlines() if line.startswith("penstock_stream_resets_total ")]
    return sum(float(line.split()[1]) for line in found)


def text_of(events: Sequence[Event]) -> str:
    return "".join(event.data["text"] for event in events if event.name == "delta")


async def test_events_are_one_log_with_an_id_each(door: House, door_wire: RedisClient) -> None:
    """Live and afterwards the same, through two workers that wrote and one that did not; behind each id its suffix."""
    job_id = await put(door)
    live = Listener(door, job_id)
    await live.until("queued")
    first = await Hand.claiming(door_wire, "worker-1")
    await first.write("abc")
    await lapse(door_wire, first.lease)
    nameless = await Hand.claiming(door_wire)
    await lapse(door_wire, nameless.lease)
    second = await Hand.claiming(door_wire, "worker-2")
    await second.write("de", shown=False)
    behind = Listener(door, job_id)
    await behind.until("delta", 5)
    await second.finish()
    whole = await live.ended()
    assert [event.name for event in whole] == [
        *("queued", "started", "delta", "delta", "delta", "started", "started", "delta", "delta", "completed")
    ]
    assert [int(event.id.split(":")[1]) for event in whole] == list(range(1, 11))
    assert text_of(whole) == "abcde"
    workers = [event.data["worker"] for event in whole if event.name == "started"]
    assert workers == ["worker-1", nameless.lease.id, "worker-2"], "as `penstock ps` has them"
    ids = [event.id for event in whole]
    assert [event.id for event in await behind.ended()] == ids
    assert [event.id for event in await read(door, job_id)] == ids
    for place, event in enumerate(whole, 1):
        assert [each.id for each in await read(door, job_id, event.id)] == ids[place:]
    job = json.loads(door.get(f"/v1/jobs/{job_id}")[1])
    assert job["last_event_id"] == ids[-1]


async def test_the_place_where_a_worker_was_lost_is_told(door: House, door_wire: RedisClient) -> None:
    """At once, to each reader there is, before anybody goes on; and by `started` to those who read it later."""
    job_id = await put(door)
    live = Listener(door, job_id, unlogged=("interrupted",))
    first = await Hand.claiming(door_wire, "worker-1")
    await first.write("abc")
    await live.until("delta", 3)
    await lapse(door_wire, first.lease)
    await live.until("interrupted")
    late = Listener(door, job_id, unlogged=("interrupted",))
    await late.until("interrupted")
    second = await Hand.claiming(door_wire, "worker-2")
    await second.write("de")
    await live.until("delta", 5)
    await second.finish()
    whole = await live.ended()
    lost = {"worker": "worker-1", "outcome": "lost"}
    names = ["queued", "started", *["delta"] * 3, "interrupted", "started", *["delta"] * 2, "completed"]
    assert [event.name for event in whole] == [event.name for event in await late.ended()] == names
    assert whole[5].data == lost
    log = json.loads(door.get(f"/v1/jobs/{job_id}")[1])["attempt_log"]
    pause_ms = round(1000 * (log[1]["started_at"] - log[0]["ended_at"]))
    begun = {"worker": "worker-2", "attempt": 2, "previous": lost | {"pause_ms": pause_ms}}
    assert "previous" not in whole[1].data and whole[6].data == begun
    later = [event.data for event in await read(door, job_id) if event.name == "started"]
    assert later == [whole[1].data, begun], "after its end the same"


async def test_a_reader_beside_the_client_of_an_answer_in_one_piece(door: House, door_wire: RedisClient) -> None:
    """The worker is asked for the deltas, too, although it sends that client's API process the end alone."""
    client = asyncio.create_task(asyncio.to_thread(door.post, "/v1/chat/completions", BODY))
    await until(lambda: door_wire.redis.xlen(partition_key(0, "lane", "sim", "interactive")))
    worker = await Hand.claiming(door_wire)
    live = Listener(door, worker.claim.job.id)
    job = partition_key(0, "job", worker.claim.job.id)

    async def asked() -> bool:
        return await door_wire.redis.hget(job, "reply") == b",".join([worker.claim.reply[0].encode()] * 2)

    await until(asked)
    await worker.write("ab")
    await live.until("delta", 2)
    await worker.finish()
    assert [event.name for event in await live.ended()][2:] == ["delta", "delta", "completed"]
    status, _, answer = await client
    assert status == 200 and json.loads(answer)["choices"][0]["message"]["content"] == "ab"


async def test_a_text_that_begins_again_names_the_attempt_before(door: House, door_wire: RedisClient) -> None:
    """Behind the reset; the new text has its first attempt."""
    job_id, live, first = await begun(door, door_wire, "abc")
    await lapse(door_wire, first.lease)
    second = await Hand.claiming(door_wire, "worker-2")
    await second.lease.restart(job_id, second.claim.run_number)
    again = Hand(second.lease, second.claim)
    await again.write("AB")
    await again.finish()
    whole = await live.ended()
    behind = whole[[event.name for event in whole].index("stream.reset") + 1 :]
    assert text_of(behind) == "AB"
    (started,) = [event.data for event in behind if event.name == "started"]
    assert (started["worker"], started["attempt"]) == ("worker-2", 1)
    assert (started["previous"]["worker"], started["previous"]["outcome"]) == ("worker-1", "lost")


async def test_a_reader_that_reconnects_by_itself_goes_on_where_it_was(door: House, door_wire: RedisClient) -> None:
    """A browser asks for the address it began with again, ?after= and all, and says in the header what it had last."""
    job_id = await put(door)
    hand = await Hand.claiming(door_wire)
    await hand.write("abc")
    await hand.finish()
    ids = [event.id for event in await read(door, job_id)]
    path, headers = f"/v1/jobs/{job_id}/events?after={ids[0]}", {"Last-Event-ID": ids[3]}
    status, _, data = await asyncio.to_thread(door.request, "GET", path, headers=headers)
    assert status == 200
    assert [event.id for event in events_in(data)] == ids[4:]


@pytest.mark.parametrize(
    "what",
    ["it leaves", "it stalls", "it stalls in silence", "the process ends", "the process ends and the stream breaks"],
)
async def test_a_stream_that_is_always_busy_ends(what: str) -> None:
    """It never waits, so no cancellation would reach it; what a reader does not take would stay in memory, also where
    only pings would be written. Where the process ends, a stream whose reader could take it for the whole has no last
    chunk."""
    watchers, sent, cut = list[Callable[[], None]](), list[Message](), list[bool]()
    connection = SimpleNamespace(
        watch=watchers.append,
        cut_off=lambda: cut.append(True),
        write_chunk=lambda _: what != "it stalls in silence",
        behind=what.startswith("it stalls"),
    )

    async def server_send(message: Message) -> None:
        sent.append(message)
        if len(sent) == 3 and what != "it stalls in silence":
            if what == "it leaves":
                watchers[0]()
                return
            if what != "it stalls":
                answering.cancel()
            await asyncio.sleep(PATIENCE_S)

    async def busy() -> AsyncGenerator[bytes, None]:
        while len(sent) < 3 or what != "it stalls in silence":
            yield b"x"
        await asyncio.sleep(PATIENCE_S)

    gauge, breaks = SimpleNamespace(inc=int, dec=int), what.endswith("breaks")
    settings = ApiSettings(send_timeout_s=0.01 if what.startswith("it stalls") else 60, keep_alive_s=0.1)
    services: Any = SimpleNamespace(settings=settings, metrics=SimpleNamespace(open_streams=gauge))
    scope = {"type": "http", "state": {"connection": connection, "server_send": server_send}}
    stream = EventStream(services, busy(), {}, b"", breaks=breaks)
    answering = asyncio.create_task(stream(scope, cast(Any, None), server_send))
    await asyncio.wait([answering])
    assert answering.cancelled() is breaks
    assert [message.get("body") for message in sent[:3]] == [None, b"x", b"x"]
    assert [message["more_body"] for message in sent[3:]] == [False] * (what == "the process ends")
    assert cut == [True] * (what.startswith("it stalls") or breaks)


async def test_a_store_that_lost_what_was_shown_resets_its_readers(door: House, door_wire: RedisClient) -> None:
    """Another worker has begun anew what was shown: a new epoch, from the start, and never a splice."""
    before = await resets(door)
    job_id, live, first = await begun(door, door_wire, "abc")
    seen = live.events[-1].id
    await door_wire.redis.xtrim(partition_key(0, "log", first.lease.id), maxlen=0, approximate=False)
    await lapse(door_wire, first.lease)
    second = await Hand.claiming(door_wire)
    assert not second.history.rows
    await second.write("ABCDE")
    await second.finish()
    whole = await live.ended()
    names = [event.name for event in whole]
    reset = names.index("stream.reset")
    assert text_of(whole[:reset]) == "abc" and text_of(whole[reset:]) == "ABCDE"
    cursors = [tuple(map(int, event.id.split(":")[:2])) for event in whole]
    assert cursors == sorted(set(cursors)), "no id stands for two events"
    assert await resets(door) == before + 1
    again = await read(door, job_id, seen)
    assert again[0].name == "stream.reset" and text_of(again) == "ABCDE"
    assert [event.id for event in await read(door, job_id)] == [event.id for event in whole[reset + 1 :]]


async def test_a_job_that_goes_on_in_another_epoch_is_told_anew(door: House, door_wire: RedisClient) -> None:
    """Somebody else's cursor began the epoch while the job waited for its next worker: no id of the new one comes
    without a reset before it."""
    job_id, live, first = await begun(door, door_wire, "ab")
    await lapse(door_wire, first.lease)
    await Queue(door_wire).reset(job_id, (await JobReader(door_wire).record(job_id)).resets)
    second = await Hand.claiming(door_wire)
    await second.write("c")
    await second.finish()
    whole = await live.ended()
    reset = [event.name for event in whole].index("stream.reset")
    assert text_of(whole[:reset]) == "ab" and text_of(whole[reset:]) == "abc"
    assert [event.id for event in await read(door, job_id)] == [event.id for event in whole[reset + 1 :]]


async def test_a_worker_that_lost_the_job_unknowingly_is_not_listened_to(door: House, door_wire: RedisClient) -> None:
    """After a failover two workers run it: the record says who does, and what the other writes reaches nobody."""
    job_id = await put(door)
    zombie = await Hand.claiming(door_wire)
    await zombie.write("x", shown=False)
    # As after the loss of the claim: the job waits again, and its first worker's lease is as good as before.
    job = partition_key(0, "job", job_id)
    await door_wire.redis.hdel(job, "worker", "attempt", "run", "runs")
    await waits_again(door_wire.redis, job_id, "sim")
    holder = await Hand.claiming(door_wire)
    live = Listener(door, job_id)
    await holder.write("ab")
    await live.until("delta", 2)
    address = (await door_wire.redis.hget(job, "reply")).decode()
    run, rows = (zombie.claim.run_number, Opening(job_id)), [delta(zombie.claim, seq, "X") for seq in (1, 2, 3)]
    await zombie.lease.calls([append(zombie.lease, {address: rows}, run)])
    await holder.write("c", shown=False)
    await zombie.finish()
    await holder.finish()
    whole = await live.ended()
    assert "stream.reset" not in [event.name for event in whole] and text_of(whole) == "abc"


@pytest.mark.parametrize("forged", ["{epoch}:3:nobody-1", "{epoch}:40:-", "{epoch}:40", "0:3:{run}"])
async def test_a_made_up_id_gets_a_reset_and_makes_no_other_reader_begin_anew(
    door: House, door_wire: RedisClient, forged: str
) -> None:
    job_id, live, worker = await begun(door, door_wire, "ab")
    epoch, _, run = live.events[-1].id.split(":")
    other = Listener(door, job_id, "?after=" + forged.format(epoch=epoch, run=run))
    await other.until("delta", 2)
    assert (await JobReader(door_wire).record(job_id)).resets == 0
    await worker.write("c")
    await worker.finish()
    told = await other.ended()
    assert told[0].name == "stream.reset" and text_of(told) == "abc"
    assert "stream.reset" not in [event.name for event in await live.ended()]
    assert (await JobReader(door_wire).record(job_id)).resets == 0


async def test_a_job_ended_by_a_script_ends_behind_all_its_deltas(door: House, door_wire: RedisClient) -> None:
    """Cancelled while it waited for its next worker, with deltas that its first reader never heard of. There from the
    beginning, fresh, resumed or later, each reader gets all that the log has, and then the end, which has one id."""
    job_id, live, first = await begun(door, door_wire, "ab")
    await first.write("c", shown=False)
    await lapse(door_wire, first.lease)
    fresh = Listener(door, job_id)
    await fresh.until("delta", 3)
    resumed = [Listener(door, job_id, f"?after={event.id}") for event in fresh.events]
    await resumed[0].until("delta", 3)
    await resumed[1].until("delta", 3)
    assert (await asyncio.to_thread(door.post, f"/v1/jobs/{job_id}/cancel", None))[0] == 200
    whole = await live.ended()
    assert [event.name for event in whole] == ["queued", "started", "delta", "delta", "delta", "cancelled"]
    ids = [event.id for event in whole]
    assert text_of(whole) == "abc"
    assert [event.id for event in await fresh.ended()] == [event.id for event in await read(door, job_id)] == ids
    for place, reader in enumerate(resumed, 1):
        assert [event.id for event in await reader.ended()] == ids[place:]
    for place, event in enumerate(whole, 1):
        assert [each.id for each in await read(door, job_id, event.id)] == ids[place:]
    await door_wire.redis.delete(partition_key(0, "log", first.lease.id))
    left = await read(door, job_id, ids[3])
    assert [event.id for event in left] == ids[4:], "its tokens are in its record by now"


async def test_a_cut_job_whose_log_has_a_hole_ends_before_it(door: House, door_wire: RedisClient) -> None:
    """A text with a hole is not shown as the text: not even to a reader that has had the rest, which is told so."""
    job_id, live, first = await begun(door, door_wire, "abc")
    log = partition_key(0, "log", first.lease.id)
    entries = await door_wire.redis.xrange(log)
    await door_wire.redis.xdel(log, entries[1][0])
    await lapse(door_wire, first.lease)
    assert (await asyncio.to_thread(door.post, f"/v1/jobs/{job_id}/cancel", None))[0] == 200
    shown = ["queued", "started", "delta", "cancelled"]
    assert [event.name for event in await read(door, job_id)] == shown
    assert [event.name for event in await live.ended()][-5:] == ["stream.reset", *shown]


async def test_the_end_of_another_epoch_is_not_told_as_the_end(door: House, door_wire: RedisClient) -> None:
    """The job began a new epoch between the last delta and the end: the reader is told so, and gets it all again."""
    job_id, live, worker = await begun(door, door_wire, "ab")
    await Queue(door_wire).reset(job_id, (await JobReader(door_wire).record(job_id)).resets)
    await worker.finish()
    whole = await live.ended()
    names = [event.name for event in whole]
    reset = names.index("stream.reset")
    assert text_of(whole[reset:]) == "ab" and names[-1] == "completed"
    assert [event.id for event in await read(door, job_id)] == [event.id for event in whole[reset + 1 :]]


@pytest.mark.parametrize(("count", "size", "ends"), [(300, 8_000, {"completed"}), (10_000, 1, {"completed", "error"})])
async def test_a_job_whose_retention_passes_while_it_is_read_never_ends_twice(
    door: House, door_wire: RedisClient, count: int, size: int, ends: set[str]
) -> None:
    """A completed job does not become a failed one. What this process holds by then is given in full; of more deltas
    than it holds the rest is gone, and the reader is told that."""
    job_id = await put(door, max_tokens=9_999)
    worker = await Hand.claiming(door_wire)
    for _ in range(count // 100):
        await worker.write_frame(100, "x" * size)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(60)
        slow.connect(("127.0.0.1", door.port))
        slow.sendall(f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        lines = slow.makefile()
        assert any(line.startswith("event: delta") for line in lines)
        await worker.finish()
        await heard(door, door_wire)
        await door_wire.redis.delete(partition_key(0, "job", job_id), partition_key(0, "log", worker.lease.id))
        names = await asyncio.to_thread(names_in, lines)
    assert names[-1] in ends and set(names[:-1]) == {"delta"}
    assert names[-1] == "error" or names.count("delta") == count - 1


async def heard(house: House, wire: RedisClient) -> None:
    """The API process has heard all that was published before: its readers are told in that order."""
    job_id = await put(house)
    live = Listener(house, job_id)
    worker = await Hand.claiming(wire)
    await worker.write("a")
    await live.until("delta")
    await worker.finish()
    await live.ended()


def names_in(lines: TextIO) -> list[str]:
    """Of the events up to the end of an answer in chunks."""
    found = []
    while (line := lines.readline()) and line != "0\n":
        if line.startswith("event: "):
            found.append(line.split()[1])
    return found


async def test_a_chat_stream_whose_text_was_lost_ends_with_an_error(door: House, door_wire: RedisClient) -> None:
    """Its text cannot be taken back, so it is told, and the job goes on for others."""
    chat = StreamReader(door.port, "/v1/chat/completions", BODY | {"stream": True})
    await until(lambda: door_wire.redis.xlen(partition_key(0, "lane", "sim", "interactive")))
    first = await Hand.claiming(door_wire)
    await first.write("abc")
    await until(lambda: len(chat.events) >= 3)
    await door_wire.redis.delete(partition_key(0, "log", first.lease.id))
    await lapse(door_wire, first.lease)
    second = await Hand.claiming(door_wire)
    await second.write("ABCDE")
    await second.finish()
    await chat.read_out()
    assert chat.text() == "abc" and chat.error is not None and chat.error["code"] == "stream_reset"


async def test_what_a_run_wrote_that_the_store_forgot_is_shown_to_nobody(door: House, door_wire: RedisClient) -> None:
    """The same worker was given the job twice, and the void run's deltas lie in the same log as the valid one's."""
    job_id = await put(door)
    void = await Hand.claiming(door_wire)
    job = partition_key(0, "job", job_id)
    await door_wire.redis.hdel(job, "worker", "attempt", "run", "runs")
    await waits_again(door_wire.redis, job_id, "sim")
    (claim,) = (await void.lease.claim(0, 1)).jobs
    assert isinstance(claim, Claim) and claim.run_number != void.claim.run_number
    await void.write("XY", shown=False)
    valid = Hand(void.lease, claim)
    await valid.write("abc", shown=False)
    live = Listener(door, job_id)
    await live.until("delta", 3)
    await valid.finish()
    whole = await live.ended()
    assert "stream.reset" not in [event.name for event in whole] and text_of(whole) == "abc"


async def test_the_reader_of_a_newer_workers_job_is_told_once(door: House, door_wire: RedisClient) -> None:
    """Its tokens cannot be read here: an error ends the stream, and nothing of the job changes."""
    job_id = await put(door)
    newer = await Hand.claiming(door_wire)
    frame = msgspec.msgpack.encode(["f2", newer.lease.id, 1, {"rows": []}])
    await door_wire.redis.xadd(partition_key(0, "log", newer.lease.id), {"-": frame}, id="1-0")

    def told() -> bytes:
        """The stream to its end, or far enough to see that it has none."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", door.port, timeout=60)) as connection:
            connection.request("GET", f"/v1/jobs/{job_id}/events")
            return connection.getresponse().read(1_500)

    data = await asyncio.to_thread(told)
    assert data.count(b"event: error\n") == 1 and b"newer_version" in data
    assert b"stream.reset" not in data
    assert (await JobReader(door_wire).record(job_id)).resets == 0


@pytest.mark.parametrize("told", [["queued"], ["queued", "started"], ["queued", "started", "delta"]])
async def test_the_end_of_a_lost_job_comes_behind_all_that_was_told(
    door: House, door_wire: RedisClient, told: list[str]
) -> None:
    """The reader came while the job waited; it may have been begun, and then the store had it no more."""
    job_id = await put(door)
    live = Listener(door, job_id)
    if "started" in told:
        await live.until("queued")
        worker = await Hand.claiming(door_wire)
        if "delta" in told:
            await live.until("started")
            await worker.write("a")
    await live.until(told[-1])
    await door_wire.redis.delete(partition_key(0, "job", job_id))
    whole = await live.ended()
    assert [event.name for event in whole] == [*told, "failed"]
    assert whole[-1].data["error"]["code"] == "job_lost"
    numbers = [int(event.id.split(":")[1]) for event in whole]
    assert numbers == sorted(set(numbers))


async def test_readers_wait_while_the_store_is_away(door: House, door_wire: RedisClient) -> None:
    """The server stands still for longer than any command may take: the readers of a running and of a waiting job lose
    nothing, nobody is told an error, and the log has no traceback."""
    running, waiting = await put(door), await put(door)
    hand = await Hand.claiming(door_wire)
    await hand.write("ab")
    reader, other = Listener(door, running), Listener(door, waiting)
    await reader.until("delta", 2)
    await other.until("queued")
    pid = int((await door_wire.redis.info("server"))["process_id"])
    os.kill(pid, signal.SIGSTOP)
    try:
        # Each is refused after the time that a command may take, and readers ask more often.
        refused = [await asyncio.to_thread(door.get, f"/v1/jobs/{waiting}") for _ in range(2)]
    finally:
        os.kill(pid, signal.SIGCONT)
    assert [status for status, _ in refused] == [503, 503]
    await hand.write("c")
    await hand.finish()
    second = await Hand.claiming(door_wire)
    await second.write("d")
    await second.finish()
    for each, deltas in ((reader, 3), (other, 1)):
        names = [event.name for event in await each.ended()]
        assert names == ["queued", "started", *["delta"] * deltas, "completed"]
    assert b'code="internal_error"' not in (await asyncio.to_thread(door.get, "/metrics"))[1]
    assert "Traceback" not in door.log("api")


class Absent:
    """A client of the store whose first call of each kind finds it away."""

    def __init__(self, client: object) -> None:
        self._client, self.refused = client, set[str]()

    def __getattr__(self, name: str) -> Any:
        if name not in ("again", "subscribe", "outline", "position", "reset"):
            return getattr(self._client, name)

        async def call(*args: object) -> object:
            if name not in self.refused:
                self.refused.add(name)
                raise Unavailable("away")
            return await getattr(self._client, name)(*args)

        return call


def services_of(wire: RedisClient, relay: object, queue: object, reader: object) -> Any:
    """What an API process has, as far as a reader of events needs it."""
    return SimpleNamespace(
        settings=ApiSettings(),
        store_client=wire,
        facts=Facts,
        waits=SimpleNamespace(wait_of=lambda *_: None, readiness=SimpleNamespace(problem=lambda _: "")),
        relay=relay,
        queue=queue,
        job_reader=reader,
        metrics=SimpleNamespace(stream_resets=SimpleNamespace(inc=lambda: None)),
    )


async def a_waiting_job(wire: RedisClient) -> JobRecord:
    job = Job(id=new_job_id(0), model="sim", tenant="t", priority=Priority.STANDARD, prompt=Text(("x",)))
    await Queue(wire).put(job)
    return await JobReader(wire).outline(job.id)


@pytest.mark.parametrize(
    ("seen", "shown"), [(None, False), (Cursor(1, 3, "nobody-1"), False), (Cursor(1, 3, "nobody-1"), True)]
)
async def test_each_read_of_a_stream_that_has_begun_is_tried_again(
    door_wire: RedisClient, monkeypatch: pytest.MonkeyPatch, seen: Cursor | None, shown: bool
) -> None:
    """Only the loss of what this process has shown begins a new epoch."""
    monkeypatch.setattr(events_endpoint, "STORE_RETRY_DELAY_S", 0.0)
    relay, queue, reader = (Absent(client) for client in (Relay(door_wire), Queue(door_wire), JobReader(door_wire)))
    await relay.start()
    services, record = services_of(door_wire, relay, queue, reader), await a_waiting_job(door_wire)
    names = []
    async for rendered in events_endpoint.job_log(services, record, seen, shown=shown):
        names += [event.name for event in rendered]
        if names[-1] == "queued":
            hand = await Hand.claiming(door_wire)
            await hand.write("a")
            await hand.finish()
    await relay.stop()
    assert names == [*(["stream.reset"] if seen else []), "queued", "started", "delta", "completed"]
    assert relay.refused == {"subscribe"} and reader.refused >= {"outline", "position"}
    assert queue.refused == ({"reset"} if shown else set())


async def test_a_job_that_begins_in_another_epoch_is_told_with_a_reset_after_a_pause(
    door_wire: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two looks at a waiting job its epoch ended and a worker took it: no id of the new epoch comes before the
    reset. Nor does the reset come at once: a log that changes all the time would be read without end."""
    relay, queue, reader = Relay(door_wire), Queue(door_wire), JobReader(door_wire)
    await relay.start()
    services, record = services_of(door_wire, relay, queue, reader), await a_waiting_job(door_wire)
    told: list[tuple[str, int | float]] = []

    async def pause(delay_s: float) -> None:
        told.append(("pause", delay_s))

    monkeypatch.setattr(events_endpoint, "asyncio", SimpleNamespace(sleep=pause))
    hand: Hand | None = None
    async for rendered in events_endpoint.job_log(services, record, None):
        told += [(event.name, event.id.epoch) for event in rendered if event.id is not None]
        if hand is None:
            await queue.reset(record.job.id, record.resets)
            hand = await Hand.claiming(door_wire)
            await hand.write("a")
        elif told[-1] == ("stream.reset", 2):
            await hand.finish()
    await relay.stop()
    shown = [("stream.reset", 2), ("queued", 2), ("started", 2), ("delta", 2), ("completed", 2)]
    assert told == [("queued", 1), ("pause", events_endpoint.RESET_DELAY_S), *shown]
    assert events_endpoint.RESET_DELAY_S > 0


ASKED = {"model": "sim", "max_tokens": 3, "stream": True}
STREAMS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "chat": ("/v1/chat/completions", ASKED | {"messages": [{"role": "user", "content": "x"}]}),
    "choices": ("/v1/completions", ASKED | {"prompt": ["x", "y"], "n": 2}),
    "response": ("/v1/responses", {"model": "sim", "max_output_tokens": 16, "stream": True, "input": "x"}),
    "events": ("/v1/jobs/{job}/events", None),
    "messages": ("/v1/jobs/{job}/stream?offset=-1&live=sse", None),
}


@pytest.mark.parametrize("what", STREAMS)
def test_each_stream_can_be_read_by_a_client_of_http_1_0(house: House, what: str) -> None:
    """The same lines as with HTTP/1.1, without the framing of chunks, to the end of the connection."""
    path, body = STREAMS[what]
    chat = {"model": "sim", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}
    job = json.loads(house.post("/v1/jobs", chat)[2])["id"]
    assert json.loads(house.get(f"/v1/jobs/{job}?wait=30")[1])["status"] == "completed"
    path, data = path.format(job=job), json.dumps(body).encode() if body else b""
    newer = house.request("POST" if body else "GET", path, body)
    with socket.create_connection(("127.0.0.1", house.port), timeout=60) as connection:
        fields = f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\nConnection: keep-alive\r\n"
        connection.sendall(f"{'POST' if body else 'GET'} {path} HTTP/1.0\r\n{fields}\r\n".encode() + data)
        head, _, text = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower() and head.lower().count(b"connection:") == 1
    assert b"connection: close" in head.lower()
    kinds = [line.partition(b":")[0] for line in text.splitlines()]
    assert newer[0] == 200 and set(kinds) <= {b"", b"data", b"event", b"id"}
    assert text.count(b"\ndata:") == newer[2].count(b"\ndata:")


@pytest.mark.parametrize("after", ["", "bogus"])
def test_a_place_that_is_none_is_refused(house: House, after: str) -> None:
    made = json.loads(house.post("/v1/jobs", BODY)[2])
    status, _, data = house.request("GET", f"/v1/jobs/{made['id']}/events?after={after}")
    assert (status, json.loads(data)["error"]["param"]) == (400, "after")


@pytest.mark.parametrize("path", ["/v1/jobs/{}/events", "/v1/responses/resp_{}?stream=true"])
def test_the_head_of_a_running_stream_leaves_its_connection_free(house: House, path: str) -> None:
    asked = {"model": "sim", "input": "x", "background": True, "max_output_tokens": 4000}
    made = json.loads(house.post("/v1/responses", asked)[2])["id"].removeprefix("resp_")
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", house.port, timeout=20)) as connection:
        connection.request("HEAD", path.format(made))
        with connection.getresponse() as response:
            assert response.headers["content-type"].startswith("text/event-stream")
        connection.request("GET", f"/v1/jobs/{made}")
        with connection.getresponse() as response:
            assert json.loads(response.read())["status"] in ("queued", "in_progress")
    house.post(f"/v1/jobs/{made}/cancel", {})
