"""One answer by itself, without a server: what is written and when, what is measured, and that it lets go of all."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from starlette.types import Message, Receive

from api.admission import Admitted
from api.openai.errors import Wait
from api.openai.rendering import Facts
from api.openai.schemas import parse, to_job
from api.services import Services
from api.settings import ApiSettings
from api.stream.reply import PING, Reply, StreamReply, WholeReply
from penstock.loops import Turns
from streaming.jobs.codec import Delta, Opening, Run, Section, Terminal, Usage
from streaming.jobs.job import JobState
from streaming.jobs.queue import Accepted
from streaming.jobs.records import Delivered
from streaming.jobs.relay import ReorderBuffer
from streaming.order import Priority
from telemetry.metrics import Metrics
from telemetry.records.writer import NO_RECORDS

RUN = Run("w", 1)
BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


class Client:
    """The other end: what it was sent, and when it was told what by the answer."""

    def __init__(self) -> None:
        self.status, self.written, self.ended = 0, b"", False
        self.headers: dict[bytes, bytes] = {}
        self.connection = SimpleNamespace(
            watch=lambda _on_lost: None,
            carry=lambda _carried: False,
            begin_stream=self._begin,
            end_stream=self._end,
            write_chunk=self._take,
            framed=True,
            transport=None,
        )

    def _begin(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.status, self.headers = 200, dict(headers)

    def _end(self, data: bytes) -> bool:
        assert not self.ended
        self.ended = self._take(data)
        return True

    def _take(self, data: bytes) -> bool:
        self.written += data
        return True

    async def send(self, message: Message) -> None:
        assert not self.ended
        self.status = message.get("status", self.status)
        self.headers |= dict(message.get("headers", ()))
        self.written += message.get("body", b"")
        self.ended = message["type"] == "http.response.body" and not message["more_body"]

    @property
    def said(self) -> str:
        """The text of a stream so far."""
        lines = [
            line.removeprefix("data: ") for line in self.written.decode().splitlines() if line.startswith("data: {")
        ]
        return "".join(each["delta"].get("content", "") for line in lines for each in json.loads(line)["choices"])


class Exchange:
    """A request that was accepted, its client, and the buffer that a worker's tokens come to."""

    def __init__(self, kind: type[Reply], *, eta_ms: int | None = None, **settings: Any) -> None:
        request = parse("chat", json.dumps(BODY | {"stream": kind is StreamReply}).encode())
        job = to_job(request, job_id="j1", tenant="t", ceiling=Priority.INTERACTIVE, reply_to="r", trace={})
        self.client, self.buffer = Client(), ReorderBuffer("j1", whole=kind is WholeReply)
        self.buffer.accepted, self.buffer.openings[RUN] = True, Opening("j1")
        self.metrics, self.noted = Metrics.start("", "api"), list[Delivered]()
        services = SimpleNamespace(
            settings=ApiSettings(**settings),
            facts=Facts,
            metrics=self.metrics,
            records=NO_RECORDS,
            name="api",
            relay=SimpleNamespace(close=lambda _buffer: None),
            store_client=SimpleNamespace(turns=Turns()),
            waits=SimpleNamespace(completions=SimpleNamespace(ended=lambda _model: None)),
            clock=SimpleNamespace(times=lambda moments, _partition: moments, error_us=lambda _partition: 0),
            deliveries=SimpleNamespace(note=lambda _job, delivered: self.noted.append(delivered)),
        )
        wait = None if eta_ms is None else Wait(eta_ms)
        headers = {} if eta_ms is None else {"X-Queue-ETA-Ms": str(eta_ms)}
        admitted = Admitted(job, 0, Accepted("j1", created_ms=1_000), self.buffer, request, headers, False, wait)
        self.reply = kind(cast(Services, services), admitted)

    async def answer(self) -> None:
        state = {"request_id": "r", "received": 0.0, "server_send": self.client.send}
        state |= {"connection": self.client.connection, "head_of": lambda headers: headers}
        scope = {"type": "http", "path": "/v1/chat/completions", "state": state | {"headers": {}}}
        await self.reply(scope, cast(Receive, None), self.client.send)

    def bring(self, *texts: str, tokens: int = 1) -> None:
        """Further tokens, in one frame."""
        for text in texts:
            self.buffer.push(Delta(1, self.buffer.seq + 1, text, (7,), 0, tokens), RUN)
        self.buffer.flush()

    @property
    def told(self) -> dict[str, float]:
        """The errors that were counted, by code."""
        return {each.labels["code"]: each.value for each in samples(self.metrics, "penstock_errors_total")}

    def end(self, state: JobState = JobState.COMPLETED, rows: tuple[Delta, ...] = ()) -> None:
        """The end, with the tokens that were brought, or with these."""
        seq = len(rows) or self.buffer.seq
        self.buffer.end(Terminal("j1", state, seq, ("stop",), Usage(5, 6), sections=(Section(1, RUN),), rows=rows))
        self.buffer.flush()


def samples(metrics: Metrics, name: str) -> list[Sample]:
    families = text_string_to_metric_families(metrics.expose().decode())
    return [sample for family in families for sample in family.samples if sample.name == name]


async def soon(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.parametrize("frames", [[["a"]], [["a", "b"], ["c"], ["d", "e"]]])
async def test_a_stream_says_what_came_and_then_ends(frames: list[list[str]]) -> None:
    """Frame by frame, each as it comes; whatever the last one brings, nothing is owed behind it."""
    exchange = Exchange(StreamReply)
    client = exchange.client
    answering = asyncio.create_task(exchange.answer())
    texts = ""
    for frame in frames:
        exchange.bring(*frame)
        texts += "".join(frame)
        await soon(lambda texts=texts: client.said == texts)
        assert not client.ended
    exchange.end()
    await answering
    assert (client.status, client.said, client.ended) == (200, texts, True)
    assert client.written.endswith(b"data: [DONE]\n\n")
    assert client.headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert client.headers[b"cache-control"] == b"no-cache" and client.headers[b"x-accel-buffering"] == b"no"


async def test_the_relays_callback_writes_head_and_tokens_itself() -> None:
    """No task wakes up: `bring` returns with head and tokens written. If rendering raises, the answer ends with that
    error, also if the buffer is stopped again."""
    exchange, faulty = Exchange(StreamReply), Exchange(StreamReply)
    answering = [asyncio.create_task(each.answer()) for each in (exchange, faulty)]
    await asyncio.sleep(0)
    exchange.bring("a", "b")
    assert (exchange.client.status, exchange.client.said) == (200, "ab")
    exchange.bring("c")
    assert exchange.client.said == "abc"
    exchange.end()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("api.openai.rendering.to_json", None)
        faulty.bring("a")
    faulty.buffer.stop()
    with pytest.raises(TypeError):
        await asyncio.gather(*answering)
    await answering[0]
    assert exchange.client.ended and faulty.client.status == 0


@pytest.mark.parametrize(("eta_ms", "at_once"), [(None, False), (3_599_999, False), (3_600_000, True)])
async def test_who_will_wait_longer_than_the_silence_allowed_gets_the_head_at_once(
    eta_ms: int | None, at_once: bool
) -> None:
    """Else it comes with the first token: a refusal before that has its own status."""
    exchange = Exchange(StreamReply, eta_ms=eta_ms, keep_alive_s=3600)
    answering = asyncio.create_task(exchange.answer())
    if at_once:
        await soon(lambda: exchange.client.written == PING)
        assert (exchange.client.status, exchange.client.headers[b"x-queue-eta-ms"]) == (200, b"3600000")
    else:
        for _ in range(10):
            await asyncio.sleep(0)
        assert exchange.client.status == 0
    exchange.bring("a")
    await soon(lambda: exchange.client.said == "a")
    exchange.bring("b")
    exchange.end()
    await answering
    assert exchange.client.said == "ab"


async def test_a_sign_of_life_comes_when_the_silence_has_lasted_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look in the middle of it puts the next one to its end. The clock is moved on, not the ping back: a clock that
    counts from the machine's start may have had no such moment yet."""
    exchange = Exchange(StreamReply, eta_ms=3_600_000, keep_alive_s=3600)
    reply, answering = exchange.reply, asyncio.create_task(exchange.answer())
    assert isinstance(reply, StreamReply)
    await soon(lambda: exchange.client.written == PING and reply._ping_timer)
    assert reply._ping_timer is not None
    reply._ping_timer.cancel()
    middle = reply._pinged_s + 1800
    with monkeypatch.context() as patched:
        patched.setattr("api.stream.reply.time", SimpleNamespace(monotonic=lambda: middle))
        reply._ping_if_idle()
    left_s = reply._ping_timer.when() - asyncio.get_running_loop().time()
    assert left_s == pytest.approx(1800, abs=600)
    assert exchange.client.written == PING
    exchange.end()
    await answering


@pytest.mark.parametrize(("texts", "status"), [([], 409), (["a"], 200)])
async def test_a_stream_that_fails_tells_it_and_counts_it_once(texts: list[str], status: int) -> None:
    """Before its first token it has the error's status."""
    exchange = Exchange(StreamReply)
    exchange.bring(*texts)
    exchange.end(JobState.CANCELLED)
    await exchange.answer()
    assert exchange.client.status == status and b"job_cancelled" in exchange.client.written
    assert exchange.told == {"job_cancelled": 1}


@pytest.mark.parametrize(
    ("wait_s", "status", "code"), [(0.01, 504, "wait_timeout"), (600.0, 409, "job_cancelled"), (600.0, 200, "")]
)
async def test_a_whole_answer_counts_the_error_that_it_tells_once(wait_s: float, status: int, code: str) -> None:
    exchange = Exchange(WholeReply, wait_s=wait_s)
    if status != 504:
        exchange.end(JobState.CANCELLED if code else JobState.COMPLETED)
    await exchange.answer()
    assert exchange.client.status == status and code.encode() in exchange.client.written
    assert exchange.told == ({code: 1} if code else {})


@pytest.mark.parametrize("kind", [StreamReply, WholeReply])
async def test_the_moments_of_an_answer_are_noted_in_their_order(kind: type[Reply]) -> None:
    """And counted: one first token, and the gaps between it and the others."""
    exchange = Exchange(kind)
    answering = asyncio.create_task(exchange.answer())
    if kind is StreamReply:
        for count in (1, 2, 3):
            exchange.bring("a", tokens=2)
            await soon(lambda said="a" * count: exchange.client.said == said)
    exchange.end(rows=tuple(Delta(1, seq, "a", (7,), 0, 2) for seq in (1, 2, 3)))
    await answering
    (noted,) = exchange.noted
    assert 0 < noted.last_got <= noted.last_sent
    counted = exchange.metrics.answers("chat", "m")
    assert (counted.input._total, counted.output._total) == (5, 6)
    if kind is StreamReply:
        assert 0 < noted.first_got <= noted.first_sent <= noted.last_got
        assert (sum(counted.first_token._counts), sum(counted.per_token._counts)) == (1, 4)


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("frames", [0, 2])
async def test_an_answer_that_is_over_is_let_go_of(frames: int) -> None:
    """At once: no timer for its signs of life holds it."""
    exchange = Exchange(StreamReply, keep_alive_s=3600)
    answering = asyncio.create_task(exchange.answer())
    for _ in range(frames):
        said = exchange.client.said
        exchange.bring("a")
        await soon(lambda said=said: exchange.client.said != said)
    exchange.bring("z")
    exchange.end()
    await answering
    gone = weakref.ref(exchange.reply)
    del answering, exchange.reply
    await asyncio.sleep(0)
    assert gone() is None
