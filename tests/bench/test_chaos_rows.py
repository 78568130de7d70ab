"""What the rows judge by themselves: a fault that did not bite and a figure that is wrong are found."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from fault_testbed import stage

from bench.chaos.asks import Ask, Budget, ClientView
from bench.chaos.checker import check
from bench.chaos.clients import Clients
from bench.chaos.history import ClientHistory, of_kind
from bench.chaos.processes import RedisServer
from bench.chaos.readings import CANCEL, LIST, Readings, opened
from bench.chaos.rows.clients import was_in
from bench.chaos.rows.failover import count_resets
from bench.chaos.rows.memory import ACCEPTED, FloodResult, judge_flood, judge_full
from bench.chaos.rows.operations import holds_some
from bench.chaos.rows.real import DONE, fault_of_stream
from bench.chaos.rows.requests import has_expired
from bench.chaos.rows.store import kill_subscriptions
from bench.chaos.rows.workers import MAX_HEALTH_MS, asking, judge_health
from bench.chaos.soak import StoreUsage, judge_keys
from bench.chaos.stage import FaultTestbed

__all__ = ["stage"]


@asynccontextmanager
async def answering(*answers: bytes) -> AsyncIterator[int]:
    """A server that gives each connection the next of these answers, and hangs up on those behind the last."""
    left, open_now = list(answers), set[asyncio.Task[None]]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_now.add(task)
        with suppress(OSError, EOFError):  # who asked may have gone
            await reader.readuntil(b"\r\n\r\n")
            writer.write(left.pop(0) if left else b"")
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        await asyncio.gather(*open_now)


def http(status: int, body: bytes = b"{}") -> bytes:
    return b"HTTP/1.1 %d OK\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


async def test_a_question_without_an_answer_reaches_the_judge(stage: FaultTestbed) -> None:
    """A job that nobody reads, and a cancel: the connection breaks, or is never made."""
    async with answering() as port:
        readings = Readings(stage.history, [port])
        await readings.put_unread(Ask("p", chat=False), port)
        assert await readings.cancel("job_1", port) == ""
    await readings.put_unread(Ask("p", chat=False), port)
    assert await readings.cancel("job_1", port) == ""
    assert [event["event"] for event in stage.history.events] == ["unknown"] * 4
    assert [violation.kind for violation in check(stage.history.events, budget=Budget(unanswered=3))] == ["unanswered"]


def stream(*blocks: bytes) -> bytes:
    """A whole answer of server-sent events."""
    return http(200, b"".join(block + b"\n\n" for block in blocks)).replace(b"\r\n", b"\r\nX-Job-Id: job_1\r\n", 1)


SOME = b'data: {"choices": [{"delta": {"content": "a"}}]}'
END = b'event: completed\nid: 1:2:-\ndata: {"usage": {"prompt_tokens": 1, "completion_tokens": 1}}'
CUT = "ended without an end"


@pytest.mark.parametrize(
    ("answers", "cuts"),
    [
        ([stream(SOME, b"data: [DONE]")], []),
        ([stream(SOME), stream(END)], [CUT]),
        ([stream(SOME), stream(b"event: queued\nid: 1:1:-\ndata: {}"), stream(END)], [CUT, CUT]),
        ([stream(SOME, b'data: {"error": {"code": "draining"}}'), stream(END)], ["draining"]),
        ([stream(SOME, b'data: {"error": {"code": "stream_reset"}}'), stream(END)], []),
        ([stream(SOME), stream(b"event: stream.reset\nid: 2:0:-\ndata: {}"), stream(END)], [CUT, CUT]),
    ],
)
async def test_a_stream_that_ends_without_an_end_is_broken_off(
    stage: FaultTestbed, answers: list[bytes], cuts: list[str]
) -> None:
    """However neatly its connection was closed. The client reads on, and the judge counts it."""
    async with answering(*answers) as port:
        clients = Clients(stage.history, [port], patience_s=10.0)
        told = await clients.run(clients.tell(Ask("p")))
    assert told.state == "completed"
    assert [event["why"] for event in of_kind(stage.history.events, "cut")] == cuts


FINISH = b'data: {"choices": [{"delta": {}, "finish_reason": "%b"}]}'
DONE_BLOCK = b"data: [DONE]"


@pytest.mark.parametrize(
    ("blocks", "finish", "wrong"),
    [
        ([SOME, FINISH % b"length", DONE_BLOCK], ["length"], set()),
        ([SOME, FINISH % b"stop", DONE_BLOCK], ["stop"], {"wrong_end"}),
        ([SOME, DONE_BLOCK], [], {"wrong_end"}),
        ([SOME, FINISH % b"length", SOME, DONE_BLOCK], ["length"], {"error"}),
    ],
)
async def test_why_a_text_ended_reaches_the_judge(
    stage: FaultTestbed, blocks: list[bytes], finish: list[str], wrong: set[str]
) -> None:
    """It is as long as was asked for, and nothing comes behind that word."""
    async with answering(stream(*blocks)) as port:
        clients = Clients(stage.history, [port], patience_s=10.0)
        await clients.run(clients.tell(Ask("p")))
    assert [event["finish"] for event in of_kind(stage.history.events, "end")] == [finish]
    found = {violation.kind for violation in check(stage.history.events)}
    assert found & {"wrong_end", "error"} == wrong


def whole(status: int, body: bytes) -> bytes:
    return http(status, body).replace(b"\r\n", b"\r\nX-Job-Id: job_1\r\n", 1)


async def test_a_whole_answer_is_read_and_one_that_a_drain_cuts_off_is_read_on(stage: FaultTestbed) -> None:
    """F18: the second is told where its job is, and follows the events."""
    message = b'{"choices": [{"message": {"content": "ab"}, "finish_reason": "length"}], "usage": %b}'
    usage = b'{"prompt_tokens": 1, "completion_tokens": 2}'
    cut_off = whole(503, b'{"error": {"code": "draining"}}')
    async with answering(whole(200, message % usage), cut_off, stream(END)) as port:
        clients = Clients(stage.history, [port], patience_s=10.0)
        told = [await clients.run(clients.tell(Ask("p", whole=True))) for _ in range(2)]
    assert [(view.state, view.usage) for view in told] == [("completed", (1, 2)), ("completed", (1, 1))]
    assert [event["text"] for event in of_kind(stage.history.events, "token")] == ["ab"]
    assert [event["why"] for event in of_kind(stage.history.events, "cut")] == ["draining"]


@pytest.mark.parametrize("refusals", [0, 1])
async def test_a_client_without_an_answer_gives_up_aloud(stage: FaultTestbed, refusals: int) -> None:
    """A server that says nothing more, also after a refusal; then nobody listens."""
    silent = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal refusals
        refusals -= 1
        if refusals >= 0:
            writer.write(http(503).replace(b"\r\n", b"\r\nretry-after-ms: 1\r\n", 1))
        else:
            await silent.wait()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        clients = Clients(stage.history, [server.sockets[0].getsockname()[1]], patience_s=0.3)
        await clients.run(clients.tell(Ask("p")))
        silent.set()
    await clients.run(clients.tell(Ask("p")))
    gave_up = of_kind(stage.history.events, "gave_up")
    assert [event["req"] for event in gave_up] == [1, 2]
    assert sum(violation.kind == "unanswered" for violation in check(stage.history.events)) == 2


@pytest.mark.parametrize(
    ("flood", "wrong"),
    [
        (FloodResult(503, 400, 0.7), 0),
        (FloodResult(503, 0, 0.1), 2),  # admission refuses everything
        (FloodResult(503, 3, 0.3), 1),
        (FloodResult(429, 400, 0.7), 1),
        (FloodResult(0, 3000, 0.7), 1),
    ],
)
def test_a_flood_must_be_taken_before_it_is_refused(stage: FaultTestbed, flood: FloodResult, wrong: int) -> None:
    """F14: an admission that takes nothing keeps the store empty, too."""
    judge_flood(stage, flood)
    assert len(stage.wrong) == wrong, stage.wrong


@pytest.mark.parametrize(
    ("status", "code", "good"),
    [(503, "no_capacity", True), (503, "draining", False), (429, "queue_full", False)],
)
def test_a_full_store_is_what_every_refusal_says(stage: FaultTestbed, status: int, code: str, good: bool) -> None:
    """F14 and F32: another reason is another fault."""
    stage.history.add("refused", req=1, status=503, code="no_capacity", ms=1, retry_after="1")
    stage.history.add("refused", req=2, status=status, code=code, ms=1, retry_after="1")
    judge_full(stage)
    assert (stage.wrong == []) is good


@pytest.mark.parametrize(
    ("phase", "view", "bit"),
    [
        ("accept", {}, True),
        ("accept", {"created_at": 11.0}, True),
        ("accept", {"created_at": 9.0}, False),
        ("last", {"created_at": 8.0, "started_at": 9.0, "first_token_at": 9.5, "completed_at": 9.9}, True),
        ("last", {"created_at": 8.0, "started_at": 9.0, "first_token_at": None}, False),
        ("queue", {"started_at": None}, True),
        ("queue", {"started_at": 11.0}, True),
        ("queue", {"started_at": 9.0}, False),
        ("queue", {}, False),
        ("prefill", {"started_at": 9.0, "first_token_at": 11.0}, True),
        ("prefill", {"started_at": 9.0, "first_token_at": 9.5}, False),
        ("prefill", {"started_at": 11.0}, False),
        ("decode", {"started_at": 9.0, "first_token_at": 9.5, "completed_at": 11.0}, True),
        ("decode", {"started_at": 9.0, "first_token_at": 9.5, "completed_at": 9.9}, False),
    ],
)
def test_a_client_that_left_too_late_or_too_soon_left_in_another_phase(
    phase: str, view: dict[str, float | None], bit: bool
) -> None:
    """F08, by the job's own times; the client left at 10."""
    assert was_in(phase, view, 10.0) is bit


@pytest.mark.parametrize(
    ("shown", "state", "refused", "begun", "bit"),
    [
        (3, "expired", 0, True, True),
        (0, "expired", 0, True, False),
        (3, "completed", 0, True, False),
        (0, "expired", 0, False, True),
        (0, "", 408, False, True),
        (0, "", 503, False, False),
    ],
)
def test_a_deadline_that_stopped_nothing_is_no_trial(
    shown: int, state: str, refused: int, begun: bool, bit: bool
) -> None:
    """F16: what runs was begun and stopped; what waits is told so by its events, or refused."""
    told = ClientView(1, Ask("p"), shown=shown, state=state, refused=refused)
    assert has_expired(told, begun=begun) is bit


@pytest.mark.parametrize(
    ("waits", "bare", "holds"),
    [
        ([1.0, MAX_HEALTH_MS], [], True),
        ([1.0, MAX_HEALTH_MS + 1], [], False),
        ([1.0, MAX_HEALTH_MS + 1], [1.0], True),
        ([math.inf], [1.0], False),
        ([], [], False),
    ],
)
def test_an_api_process_that_stands_still_fails_the_row(
    stage: FaultTestbed, waits: list[float], bare: list[float], holds: bool
) -> None:
    """F30: beside a bare server. No answer at all is the longest."""
    judge_health(stage, waits, bare)
    assert (stage.wrong == []) is holds


async def test_a_health_check_without_an_answer_has_waited_for_ever() -> None:
    """Neither a connection that breaks nor a refusal ends the asking."""
    async with answering(http(200), b"", http(503)) as port, asking(port) as waits:
        async with asyncio.timeout(10):
            while len(waits) < 3:
                await asyncio.sleep(0.01)
    assert waits[0] < math.inf and waits[1:3] == [math.inf, math.inf]


@pytest.mark.parametrize(
    ("shown", "code", "attempts", "good"),
    [
        ('{"a": 1}', DONE, 1, True),
        ('{"a": 1}', DONE, 2, True),
        ('{"a"{"a": 1}', DONE, 2, False),
        ('{"a"', "resume_impossible", 2, True),
        ('{"a"', "resume_impossible", 1, False),
        ("", "resume_impossible", 2, False),
        ('{"a"', "", 2, False),
        ('{"a"', "internal_error", 2, False),
    ],
)
def test_a_stream_of_json_shows_the_result_or_says_that_it_cannot(
    shown: str, code: str, attempts: int, good: bool
) -> None:
    """F36: after a kill a stream that has shown some of an answer must not go on with another one."""
    assert (fault_of_stream(shown, code, '{"a": 1}', attempts) == "") is good


@pytest.mark.parametrize(
    ("path", "status", "body", "shown"),
    [
        ("/v1/jobs/{job}", 404, b"", False),
        ("/v1/jobs/{job}", 200, b"", True),
        ("/v1/jobs/{job}/timing", 200, b"", True),
        ("/v1/jobs/{job}/result", 409, b"", True),
        ("/v1/jobs/{job}", 410, b"", True),
        ("/v1/jobs/{job}", 403, b"", True),
        ("/v1/jobs/{job}/result", 425, b"", True),
        ("/v1/jobs/{job}", 503, b"", False),
        ("/v1/jobs/{job}", 429, b"", False),
        (LIST, 404, b"", True),
        (LIST, 500, b"", False),
        (CANCEL[1], 202, b"", True),
        (CANCEL[1], 404, b"job_1", False),
        (LIST, 200, b'{"data": []}', False),
        (LIST, 200, b'{"data": [{"id": "job_1"}]}', True),
    ],
)
def test_another_tenant_is_shown_nothing_of_a_job(path: str, status: int, body: bytes, shown: bool) -> None:
    """A list that names it, its timing, its result, and a cancel that tells that there is none to be had."""
    assert opened("job_1", path, status, body) is shown


@pytest.mark.parametrize(
    ("status", "code", "kinds"),
    [
        (404, "job_not_found", set()),
        (410, "result_expired", {"crossed"}),
        (403, "forbidden", {"crossed"}),
        (500, "internal_error", {"error"}),
        (503, "something_new", {"error"}),
        (429, "queue_full", {"error", "refused"}),  # it does not say when to come back
    ],
)
async def test_every_answer_to_another_tenant_is_judged(
    stage: FaultTestbed, status: int, code: str, kinds: set[str]
) -> None:
    """That there is no such job is all it may be told; that the server is in trouble counts as with the owner."""
    stage.history.add("ask", req=1, prompt="p", tokens=0, may=["failed"], key="", reads=False, tenant="first")
    stage.history.add("accepted", req=1, job="job_1", status=202, ms=1)
    async with answering(http(status, msgspec.json.encode({"error": {"code": code}}))) as port:
        await Readings(stage.history, [port]).try_as_other("job_1", port, *CANCEL)
    found = {violation.kind for violation in check(stage.history.events, budget=Budget())}
    assert found - {"lost", "unserved"} == kinds


def held(**keys: int) -> StoreUsage:
    return StoreUsage(Counter(keys), Counter(keys))


def test_the_log_of_a_dead_worker_that_outlives_its_minute_is_found(stage: FaultTestbed) -> None:
    """The soak counts logs by themselves; the keys of dead workers are kept for an hour."""
    judge_keys(stage, held(log=2, worker=2, job=5), held(log=2, worker=9, job=5))
    assert stage.wrong == []
    judge_keys(stage, held(log=2, worker=2, job=5), held(log=3, worker=2, job=5))
    assert len(stage.wrong) == 1 and "3 logs" in stage.wrong[0]


def test_every_event_that_a_client_is_told_reaches_the_judge(tmp_path: Path) -> None:
    """A second `started`, and an end with the id of the last delta."""

    def told(*blocks: tuple[str, str, dict[str, Any]]) -> set[str]:
        history = ClientHistory(tmp_path / "history.jsonl")
        clients = Clients(history, [])
        reader = clients.tell(Ask("p", 0, chat=False, reads=False))
        history.add("accepted", req=reader.req, job="job_1", status=202, ms=1)
        for name, event_id, data in blocks:
            clients.take_event(reader, {"event": name, "id": event_id, "data": msgspec.json.encode(data).decode()})
        assert reader.cursor == blocks[-1][1]
        history.close()
        return {violation.kind for violation in check(history.events)} - {"lost"}  # nobody reads it afterwards

    usage = {"usage": {"prompt_tokens": 1, "completion_tokens": 0}, "finish_reasons": ["length"]}
    queued, started = ("queued", "1:1:-", {}), ("started", "1:2:w-1", {})
    delta = ("delta", "1:3:w-1", {"text": ""})
    assert told(queued, started, delta, ("completed", "1:4:w-1", usage)) == set()
    assert told(queued, started, started, ("completed", "1:3:w-1", usage)) == {"numbering"}
    assert told(queued, started, delta, ("completed", "1:3:w-1", usage)) == {"numbering"}
    assert told(queued, started, ("completed", "1:3:w-1", {})) == {"accounting", "wrong_end"}


def test_a_store_that_lost_data_must_have_been_told_of(stage: FaultTestbed) -> None:
    """F05 fails if no reader was told stream.reset."""
    count_resets(stage)
    assert stage.wrong == ["no reader was told stream.reset"]
    stage.wrong.clear()
    stage.history.add("reset", req=1, code="stream.reset")
    count_resets(stage)
    assert stage.wrong == [] and stage.figures["readers told to begin anew"] == 1


async def test_a_health_check_that_is_still_open_counts() -> None:
    """A process that hangs when the readers are done is seen."""

    over = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            await reader.read()
        writer.close()
        over.set()

    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server:
        async with asking(server.sockets[0].getsockname()[1]) as waits:
            await asyncio.sleep(0.1)
            assert waits == []
        await over.wait()
    assert len(waits) == 1 and waits[0] >= 90


async def test_a_broken_connection_is_no_job_that_was_accepted(stage: FaultTestbed) -> None:
    """F14 waits for a 202; neither a refusal nor no answer at all is one."""
    async with answering(http(503), b"", http(202)) as port:
        readings = Readings(stage.history, [port])
        found = [await readings.put_unread(Ask("p", chat=False), port) for _ in range(3)]
        assert [status == ACCEPTED for status in found] == [False, False, True]
    assert await readings.put_unread(Ask("p", chat=False), port) != ACCEPTED, "nobody listens"


async def test_fifty_ends_without_an_end_are_more_than_a_row_allows(stage: FaultTestbed) -> None:
    async with answering(*[stream(SOME), stream(END)] * 50) as port:
        clients = Clients(stage.history, [port], patience_s=10.0)
        for number in range(50):
            await clients.run(clients.tell(Ask(f"p {number}")))
    found = check(stage.history.events, budget=Budget(broken=40))
    assert "broken" in {violation.kind for violation in found}


@pytest.mark.parametrize(("answer", "killed"), [(b"0", 0), (b"2", 2)])
async def test_subscriptions_that_were_cut_are_counted(answer: bytes, killed: int) -> None:
    """F19 repeats a trial in which there were none."""

    class ClientView:
        async def command(self, *words: str) -> bytes:
            assert words == ("CLIENT", "KILL", "TYPE", "pubsub")
            return answer

    assert await kill_subscriptions(cast(RedisServer, ClientView())) == killed


def test_a_worker_that_held_nothing_is_no_trial() -> None:
    """F17 and F18: the bite is a job that one of the processes held when it was told to end."""
    workers: list[Any] = ["one", "two", "three"]
    assert holds_some(workers[:2], workers[1:]) and not holds_some(workers[:2], workers[2:])
    assert not holds_some(workers, [])


async def test_a_way_that_opens_a_foreign_job_is_written_down(stage: FaultTestbed) -> None:
    """And only such a one."""
    named = msgspec.json.encode({"data": [{"id": "job_1"}]})
    async with answering(http(404), http(200), http(200, named)) as port:
        readings = Readings(stage.history, [port])
        for way in (CANCEL, CANCEL, ("GET", LIST)):
            await readings.try_as_other("job_1", port, *way)
    assert [event["path"] for event in of_kind(stage.history.events, "crossed")] == [f"POST {CANCEL[1]}", f"GET {LIST}"]
