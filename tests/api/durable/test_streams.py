"""GET and HEAD /v1/jobs/{id}/stream through API processes, while the test itself writes what workers would."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import pytest
from api_in_process import api_in_process
from flow import until
from hand import LEASE_MS, Hand, lapse
from house import House, redis_process
from stream_reader import StreamReader, events_in

from api import durable
from api.durable import offset_of
from api.openai.cursor import read as read_cursor
from bench.ports import free_port
from streaming.ids import new_job_id
from streaming.jobs.reader import JobReader
from streaming.keys import partition_key
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings

pytestmark = pytest.mark.slow

BODY = {"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 99}


class Read(NamedTuple):
    """One answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def next(self) -> str:
        return self.headers["stream-next-offset"]

    @property
    def up_to_date(self) -> bool:
        return self.headers.get("stream-up-to-date") == "true"

    @property
    def closed(self) -> bool:
        return self.headers.get("stream-closed") == "true"

    @property
    def messages(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.body)
        return found

    @property
    def text(self) -> str:
        return text_of(self.messages)


class Door(House):
    """An API process without workers, and a second one."""

    other: int

    async def put(self) -> str:
        status, _, data = await asyncio.to_thread(self.post, "/v1/jobs", BODY)
        assert status == 202
        job_id: str = json.loads(data)["id"]
        return job_id

    async def read(
        self,
        job_id: str,
        offset: str | None = None,
        live: str = "",
        *,
        method: str = "GET",
        port: int = 0,
        headers: dict[str, str] | None = None,
        **query: str,
    ) -> Read:
        asked = query | ({"offset": offset} if offset is not None else {}) | ({"live": live} if live else {})
        path = f"/v1/jobs/{job_id}/stream" + (f"?{urlencode(asked)}" if asked else "")
        return Read(*await asyncio.to_thread(self.request, method, path, headers=headers, port=port or self.port))


class SseReader(StreamReader):
    """Reads a stream with live=sse in the background, as it comes."""

    def __init__(self, door: House, job_id: str, offset: str, port: int = 0) -> None:
        super().__init__(port or door.port, f"/v1/jobs/{job_id}/stream?offset={offset}&live=sse")

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [message for event in events_in(self.data) if event.name == "data" for message in event.data]

    @property
    def controls(self) -> list[dict[str, Any]]:
        return [event.data for event in events_in(self.data) if event.name == "control"]

    async def until(self, count: int) -> None:
        """Wait until so many messages have come, and the control event behind them."""
        await until(
            lambda: len(self.messages) >= count and self.controls and events_in(self.data)[-1].name == "control"
        )


def text_of(messages: list[dict[str, Any]]) -> str:
    return "".join(message["data"]["text"] for message in messages if message["event"] == "delta")


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    folder: Path = tmp_path_factory.mktemp("door")
    with redis_process(folder, None, "--appendonly", "yes") as url:
        house = Door(url, folder)
        house.environ["PENSTOCK_REDIS_LEASE_MS"] = str(LEASE_MS)
        try:
            house.start_api()
            house.start_api(port := free_port())
            house.other = port
            yield house
        finally:
            house.close()


@pytest.fixture
async def wire(door: Door) -> AsyncIterator[RedisClient]:
    client = RedisClient.open(RedisSettings(url=door.redis_url, lease_ms=LEASE_MS))
    yield client
    await client.close()


async def test_a_job_is_read_after_every_offset_while_it_runs_and_afterwards(door: Door, wire: RedisClient) -> None:
    """Through two workers, at two API processes: the same bytes, and after each offset exactly the rest."""
    job_id = await door.put()
    first = await Hand.claiming(wire, "worker-1")
    await first.write("abc")
    await lapse(wire, first.lease)
    second = await Hand.claiming(wire, "worker-2")
    await second.write("de")
    early = await door.read(job_id)
    assert (early.status, early.text, early.up_to_date, early.closed) == (200, "abcde", True, False)
    assert early.headers["content-type"] == "application/json"
    await second.finish()
    whole = await door.read(job_id, "-1", port=door.other)
    assert [each["event"] for each in whole.messages] == ["delta"] * 5 + ["completed"]
    assert whole.closed and whole.up_to_date and whole.body.startswith(early.body[:-1])
    assert (await door.read(job_id)).body == whole.body
    names = [str(each["id"]) for each in whole.messages]
    events = (await asyncio.to_thread(door.get, f"/v1/jobs/{job_id}/events"))[1].decode()
    data = dict(re.findall(r"^id: (.+)\ndata: (.+)$", events, re.MULTILINE))
    for each in whole.messages:
        assert json.loads(data[each["id"]]) == each["data"], "as the events of the job have it"
    assert (await door.read(job_id, early.next)).messages == whole.messages[5:]
    assert len(names) == len(set(names))
    end = await door.read(job_id, whole.next, port=door.other)
    assert (end.status, end.body, end.next, end.closed, end.up_to_date) == (200, b"[]", whole.next, True, True)


async def test_every_offset_of_a_live_stream_resumes_at_another_process(door: Door, wire: RedisClient) -> None:
    """Each control event's offset, live and afterwards, by every kind of read: the later messages and no other."""
    job_id = await door.put()
    reader = SseReader(door, job_id, "-1")
    await reader.until(0)
    hand = await Hand.claiming(wire)
    for count, letter in enumerate("abcd", 1):
        await hand.write(letter)
        await reader.until(count)
    offsets = list(dict.fromkeys(each["streamNextOffset"] for each in reader.controls))
    assert len(offsets) == 5 and offsets == sorted(offsets)
    for place, offset in enumerate(offsets):
        assert (await door.read(job_id, offset, port=door.other)).text == "abcd"[place:]
    live = [SseReader(door, job_id, offset, door.other) for offset in offsets]
    await hand.write("e")
    await hand.finish()
    await reader.read_out()
    whole = await door.read(job_id)
    assert reader.messages == whole.messages
    assert reader.controls[-1] == {"streamNextOffset": whole.next, "upToDate": True, "streamClosed": True}
    for place, (offset, resumed) in enumerate(zip(offsets, live, strict=True)):
        await resumed.read_out()
        assert resumed.messages == whole.messages[place:]
        assert (await door.read(job_id, offset, "long-poll")).messages == whole.messages[place:]
    assert all("streamCursor" in each for each in reader.controls[:-1])


async def test_a_long_poll_waits_for_the_next_message_and_ends_with_the_stream(door: Door, wire: RedisClient) -> None:
    job_id = await door.put()
    start = await door.read(job_id)
    assert (start.body, start.up_to_date, start.closed) == (b"[]", True, False)
    waiting = asyncio.create_task(door.read(job_id, start.next, "long-poll"))
    hand = await Hand.claiming(wire)
    await hand.write("a")
    first = await waiting
    assert (first.status, first.text, first.up_to_date) == (200, "a", True)
    cursor = first.headers["stream-cursor"]
    again = await door.read(job_id, start.next, "long-poll", cursor=cursor)
    assert (again.body, int(again.headers["stream-cursor"])) == (first.body, pytest.approx(int(cursor) + 90, abs=90))
    assert int(again.headers["stream-cursor"]) > int(cursor)
    waiting = asyncio.create_task(door.read(job_id, first.next, "long-poll", port=door.other))
    await hand.finish()
    last = await waiting
    assert ([each["event"] for each in last.messages], last.closed) == (["completed"], True)
    over = await door.read(job_id, last.next, "long-poll")
    assert (over.status, over.body, over.next, over.closed, over.up_to_date) == (204, b"", last.next, True, True)


async def test_the_tail_is_found_without_reading_what_is_before_it(door: Door, wire: RedisClient) -> None:
    job_id = await door.put()
    hand = await Hand.claiming(wire)
    await hand.write("abc")
    head = await door.read(job_id, method="HEAD")
    assert (head.status, head.body, head.closed) == (200, b"", False)
    assert (head.headers["content-type"], head.headers["cache-control"]) == ("application/json", "no-store")
    now = await door.read(job_id, "now")
    assert (now.body, now.next, now.up_to_date, now.headers["cache-control"]) == (b"[]", head.next, True, "no-store")
    assert "etag" not in now.headers
    reader, waiting = SseReader(door, job_id, "now"), asyncio.create_task(door.read(job_id, "now", "long-poll"))
    await reader.until(0)
    assert reader.controls[0].items() >= {"streamNextOffset": head.next, "upToDate": True}.items()
    while waiting not in (await asyncio.wait([waiting], timeout=0.05))[0]:
        await hand.write("d")
    assert set((await waiting).text) == {"d"}
    await hand.finish()
    await reader.read_out()
    assert set(text_of(reader.messages)) == {"d"} and reader.messages[-1]["event"] == "completed"
    for offset, live, status in (("now", "", 200), ("now", "long-poll", 204)):
        over = await door.read(job_id, offset, live)
        assert (over.status, over.closed, over.up_to_date) == (status, True, True)
    assert (await door.read(job_id, method="HEAD")).next == (await door.read(job_id)).next == over.next
    reader = SseReader(door, job_id, "now")
    await reader.read_out()
    assert reader.controls == [{"streamNextOffset": over.next, "upToDate": True, "streamClosed": True}]


async def test_a_page_is_kept_until_its_stream_goes_on_or_ends(door: Door, wire: RedisClient) -> None:
    """The ETag changes with what is read, also if the stream ends without another message behind it."""
    job_id = await door.put()
    hand = await Hand.claiming(wire)
    await hand.write("ab")
    page = await door.read(job_id)
    tag = page.headers["etag"]
    assert page.headers["cache-control"].startswith("private")
    same = await door.read(job_id, headers={"If-None-Match": f'"other", {tag}'}, port=door.other)
    assert (same.status, same.body, same.next, same.headers["etag"]) == (304, b"", page.next, tag)
    assert (await door.read(job_id, page.next, headers={"If-None-Match": tag})).status == 200
    await hand.write("c")
    assert (await door.read(job_id, headers={"If-None-Match": tag})).text == "abc"
    await hand.finish()
    closed = await door.read(job_id, headers={"If-None-Match": tag})
    assert (closed.status, closed.closed) == (200, True)
    again = await door.read(job_id, headers={"If-None-Match": closed.headers["etag"]})
    assert (again.status, again.closed) == (304, True)


async def test_a_long_stream_comes_in_pages(door: Door, wire: RedisClient) -> None:
    """Each but the last says nothing of the end, and no message is lost or repeated between two."""
    job_id = await door.put()
    hand = await Hand.claiming(wire)
    await hand.write_frame(2_000, "x")
    running = await door.read(job_id)
    assert (len(running.messages), running.up_to_date) == (1_000, False)
    rest = await door.read(job_id, running.next)
    assert (len(rest.messages), rest.up_to_date, rest.closed) == (1_000, True, False)
    await hand.finish()
    pages = [await door.read(job_id)]
    while not pages[-1].closed:
        assert not pages[-1].up_to_date
        pages.append(await door.read(job_id, pages[-1].next, port=door.other))
    assert pages[0].body == running.body
    assert [len(page.messages) for page in pages] == [1_000, 1_001]
    reader = SseReader(door, job_id, "-1")
    await reader.read_out()
    assert reader.messages == [message for page in pages for message in page.messages]


async def test_a_new_epoch_is_a_message_and_changes_nothing_before_it(door: Door, wire: RedisClient) -> None:
    """Another worker has begun anew what was read. Live and resumed, the reader gets a reset, then the new text."""
    job_id = await door.put()
    first = await Hand.claiming(wire)
    await first.write("abc")
    before = await door.read(job_id)
    reader = SseReader(door, job_id, "-1")
    await reader.until(3)
    await wire.redis.xtrim(partition_key(0, "log", first.lease.id), maxlen=0, approximate=False)
    await lapse(wire, first.lease)
    second = await Hand.claiming(wire)
    await second.write("ABCDE")
    await second.finish()
    await reader.read_out()
    resumed = await door.read(job_id, before.next, port=door.other)
    assert [each["event"] for each in resumed.messages] == ["stream.reset"] + ["delta"] * 5 + ["completed"]
    assert reader.messages == before.messages + resumed.messages
    offsets = [each["streamNextOffset"] for each in reader.controls]
    assert offsets == sorted(offsets) and min(offsets) <= before.next < resumed.next
    assert (await door.read(job_id)).messages == resumed.messages[1:], "what is kept begins behind the reset"
    assert (await door.read(job_id, before.next)).body == resumed.body, "the epoch does not change with each reader"


async def test_a_reader_that_comes_back_to_a_running_job_is_told_that_its_text_was_lost(
    door: Door, wire: RedisClient
) -> None:
    """The next worker has written others in the place of the messages that it has, and as many. The reader is told to
    begin again; only a process that has shown lost messages itself begins a new epoch."""
    job_id = await door.put()
    first = await Hand.claiming(wire)
    await first.write("abc")
    before = await door.read(job_id)
    await wire.redis.xtrim(partition_key(0, "log", first.lease.id), maxlen=0, approximate=False)
    await lapse(wire, first.lease)
    second = await Hand.claiming(wire)
    await second.write("ABCDE")
    refused = await door.read(job_id, before.next)
    assert (refused.status, json.loads(refused.body)["error"]["code"]) == (410, "offset_gone")
    back = await door.read(job_id)
    assert (back.text, back.up_to_date, back.closed) == ("ABCDE", True, False)
    await second.finish()
    assert [each["event"] for each in (await door.read(job_id, back.next)).messages] == ["completed"]


@pytest.mark.parametrize("ended", [False, True])
async def test_a_made_up_offset_is_refused_and_changes_nothing(door: Door, wire: RedisClient, ended: bool) -> None:
    """Beyond the tail, before the run's first message, of another run, of none, and of a store that is gone."""
    job_id = await door.put()
    hand = await Hand.claiming(wire)
    await hand.write("abc")
    reader = SseReader(door, job_id, "-1")
    await reader.until(3)
    true = (await door.read(job_id)).next
    if ended:
        await hand.finish()
        await reader.read_out()
    epoch, number, run = true.split("_")
    made_up = [
        f"{epoch}_{int(number) + 40:015d}_{run}",
        f"{epoch}_{2:015d}_{run}",
        f"{epoch}_{number}_{'f' * 12}",
        f"{epoch}_{number}_{'0' * 12}",
        f"{int(epoch) + 1:015d}_{number}_{run}",
    ]
    for offset, live in itertools.product(made_up, ("", "long-poll", "sse")):
        refused = await door.read(job_id, offset, live)
        assert (refused.status, json.loads(refused.body)["error"]["code"]) == (410, "offset_gone"), offset
    assert (await JobReader(wire).record(job_id)).resets == 0
    assert (await door.read(job_id, true)).status == 200
    if not ended:
        await hand.finish()
        await reader.read_out()
    assert [each["event"] for each in reader.messages] == ["delta"] * 3 + ["completed"]


async def test_a_bad_read_is_refused(door: Door) -> None:
    for query, param in (
        ("offset=1", "offset"), ("offset=", "offset"), ("offset=-1&offset=-1", "offset"),
        ("live=long-poll", "offset"), ("live=sse", "offset"), ("offset=-1&live=websocket", "live"),
        ("offset=-1&live=long-poll&cursor=x", "cursor"),
    ):  # fmt: skip
        status, data = await asyncio.to_thread(door.get, f"/v1/jobs/{new_job_id(0)}/stream?{query}")
        assert (status, json.loads(data)["error"]["param"]) == (400, param)


async def test_a_stream_is_read_only_and_only_there_while_its_job_is(door: Door, wire: RedisClient) -> None:
    job_id = await door.put()
    for method in ("POST", "PUT", "DELETE"):
        status, headers, _ = await asyncio.to_thread(door.request, method, f"/v1/jobs/{job_id}/stream", {})
        assert (status, headers["allow"]) == (405, "GET, HEAD")
    unknown = job_id[:-4] + "0000"
    for method in ("GET", "HEAD"):
        assert (await door.read(unknown, method=method)).status == 404
    hand = await Hand.claiming(wire)
    await hand.write("a")
    offset = (await door.read(job_id)).next
    await hand.finish()
    await wire.redis.delete(partition_key(0, "job", job_id))
    for live in ("", "long-poll", "sse"):
        assert (await door.read(job_id, offset, live)).status == 410


async def test_a_live_reader_of_a_job_that_is_lost_is_not_told_an_end(door: Door, wire: RedisClient) -> None:
    """Its connection ends, and when it comes back it gets the error."""
    job_id = await door.put()
    hand = await Hand.claiming(wire)
    await hand.write("a")
    reader = SseReader(door, job_id, "-1")
    await reader.until(1)
    await wire.redis.delete(partition_key(0, "job", job_id))
    await reader.read_out()
    assert text_of(reader.messages) == "a" and len(reader.messages) == 1
    assert "streamClosed" not in reader.controls[-1]


async def test_live_reads_end_after_a_while(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long-poll without news is a 204, and events end so that their reader comes back: neither is an end."""
    monkeypatch.setattr(durable, "LONG_POLL_S", 0.1)
    monkeypatch.setattr(durable, "SSE_S", 0.1)
    async with api_in_process(RedisClient.open(RedisSettings(url=redis_url))) as api:
        accepted = await api.post("/v1/jobs", BODY)
        path = f"/v1/jobs/{accepted.json()['id']}/stream"
        poll = await api.client.get(path, params={"offset": "-1", "live": "long-poll"})
        assert (poll.status_code, poll.content, poll.headers["Stream-Up-To-Date"]) == (204, b"", "true")
        assert "Stream-Closed" not in poll.headers and "Stream-Cursor" in poll.headers
        events = (await api.client.get(path, params={"offset": "-1", "live": "sse"})).text
        assert events.startswith("event: control\ndata:{") and "streamClosed" not in events


# --- the Stream-Url of streamed answers: where it stands, who may read it, and that a replay costs nothing -----------


CHAT = {"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"model": "sim", "prompt": "x", "max_tokens": 4}),
        ("/v1/responses", {"model": "sim", "input": "x", "max_output_tokens": 4}),
    ],
)
def test_a_streamed_answer_says_where_it_can_be_resumed(house: House, path: str, body: dict[str, Any]) -> None:
    status, headers, _ = house.post(path, body | {"stream": True})
    job_id = headers["x-job-id"]
    assert (status, headers["stream-url"]) == (200, f"/v1/jobs/{job_id}/stream")
    messages = json.loads(house.get(headers["stream-url"])[1])
    assert (len(messages), messages[-1]["event"]) == (5, "completed")
    assert "stream-url" not in house.post(path, body)[1]
    again = [f"/v1/jobs/{job_id}/events"]
    if path == "/v1/responses":
        again.append(f"/v1/responses/resp_{job_id}?stream=true")
    for replay in again:
        assert house.request("GET", replay)[1]["stream-url"] == headers["stream-url"]


def test_calls_of_tools_are_the_same_after_every_offset(house: House) -> None:
    """What a part of a call says depends on those before it, which a resumed reader does not get again."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}
    called = CHAT | {"tools": [tool], "tool_choice": "required", "max_tokens": 99, "stream": True}
    headers = house.post("/v1/chat/completions", called)[1]
    whole = json.loads(house.get(headers["stream-url"])[1])
    events = house.get(f"/v1/jobs/{headers['x-job-id']}/events")[1].decode()
    shown = {id_: json.loads(data) for id_, data in re.findall(r"^id: (.+)\ndata: (.+)$", events, re.MULTILINE)}
    assert sum("tool_calls" in each["data"] for each in whole) > 1
    for place, each in enumerate(whole, 1):
        assert shown[each["id"]] == each["data"]
        rest = house.get(f"{headers['stream-url']}?offset={offset_of(read_cursor(each['id']))}")[1]
        assert json.loads(rest) == whole[place:]


def test_reading_a_stream_again_counts_no_tokens(house: House) -> None:
    """Neither as an answer's nor as a tenant's."""
    url = house.post("/v1/chat/completions", CHAT | {"stream": True})[1]["stream-url"]
    usage = "/admin/tenants"

    def metered() -> list[str]:
        lines = house.get("/metrics")[1].decode().splitlines()
        return [line for line in lines if re.match(r"\w*(token|stream_resumes)\w*[{ ]", line)]

    before, used = metered(), house.get(usage)[1]
    assert any("token" in line for line in before) and json.loads(used)["data"][0]["jobs"]
    for query in ("", "?offset=-1&live=long-poll", "?offset=-1&live=sse"):
        assert house.get(url + query)[0] == 200
    assert (metered(), house.get(usage)[1]) == (before, used)
