"""What the rows judge by themselves: a fault that did not bite and a figure that is wrong are found."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fault_testbed import stage

from bench.chaos.asks import Ask, Budget, ClientView
from bench.chaos.checker import check
from bench.chaos.clients import Clients
from bench.chaos.cluster import PenstockCluster
from bench.chaos.history import ClientHistory, Life, of_kind
from bench.chaos.readings import CANCEL, LIST, Readings, opened
from bench.chaos.rows.clients import was_in
from bench.chaos.rows.failover import count_resets, judge_loss
from bench.chaos.rows.memory import ACCEPTED, FloodResult, judge_flood, judge_full
from bench.chaos.rows.operations import holds_some, is_at_work, readers_of
from bench.chaos.rows.overload import CAPACITY, Controls, judge_overload
from bench.chaos.rows.partition import judge_cut, judge_jump
from bench.chaos.rows.real import DONE, fault_of_stream
from bench.chaos.rows.requests import has_expired
from bench.chaos.rows.workers import MAX_HEALTH_MS, asking, judge_health
from bench.chaos.soak import StoreUsage, judge_keys, judge_kills
from bench.chaos.stage import FaultTestbed

__all__ = ["stage"]


@asynccontextmanager
async def answering(*answers: bytes | None) -> AsyncIterator[int]:
    """A server that gives each connection the next of these answers (None: it says nothing and waits), and hangs up on
    those behind the last."""
    left, open_now = list(answers), set[asyncio.Task[None]]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_now.add(task)
        with suppress(OSError, EOFError):  # who asked may have gone
            await reader.readuntil(b"\r\n\r\n")
            said = left.pop(0) if left else b""
            if said is None:
                await reader.read()
            else:
                writer.write(said)
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
        assert await readings.put_unread(Ask("p", chat=False), port) != ACCEPTED
        assert await readings.cancel("job_1", port) == ""
    assert await readings.put_unread(Ask("p", chat=False), port) != ACCEPTED
    assert await readings.cancel("job_1", port) == ""
    assert [event["event"] for event in stage.history.events] == ["unknown"] * 4
    assert [violation.kind for violation in check(stage.history.events, budget=Budget(unanswered=3))] == ["unanswered"]
    async with answering(http(202)) as port:
        assert await Readings(stage.history, [port]).put_unread(Ask("p", chat=False), port) == ACCEPTED


def whole(status: int, body: bytes) -> bytes:
    """A whole answer to a request that became a job."""
    return http(status, body).replace(b"\r\n", b"\r\nX-Job-Id: job_1\r\n", 1)


def stream(*blocks: bytes) -> bytes:
    """The same, of server-sent events."""
    return whole(200, b"".join(block + b"\n\n" for block in blocks))


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


AWAY = http(503).replace(b"\r\n", b"\r\nretry-after-ms: 1\r\n", 1)


@pytest.mark.parametrize("answers", [[None], [AWAY, None]], ids=["silent", "refused"])
async def test_a_client_without_an_answer_gives_up_aloud(stage: FaultTestbed, answers: list[bytes | None]) -> None:
    """A server that says nothing more, also after a refusal; then nobody listens."""
    async with answering(*answers) as port:
        clients = Clients(stage.history, [port], patience_s=0.3)
        await clients.run(clients.tell(Ask("p")))
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
    """Neither a connection that breaks nor a refusal ends the asking; one that is open when the readers are done
    counts as well."""
    async with answering(http(200), b"", http(503), None) as port:
        async with asking(port) as waits, asyncio.timeout(10):
            while len(waits) < 3:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
        assert waits[0] < math.inf and waits[1:3] == [math.inf, math.inf]
        assert len(waits) == 4 and 90 <= waits[3] < math.inf


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
        *[("/v1/jobs/{job}", status, b"", False) for status in (404, 503, 429)],
        *[("/v1/jobs/{job}", status, b"", True) for status in (200, 410, 403)],
        ("/v1/jobs/{job}/timing", 200, b"", True),
        *[("/v1/jobs/{job}/result", status, b"", True) for status in (409, 425)],
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


def play(stage: FaultTestbed, *, before: int = 1, after: int = 1, attempts: int = 1) -> None:
    """A reader who was shown so many tokens before the fault and after it, and how often its job was begun."""
    history = stage.history
    history.add("ask", req=1, prompt="p", tokens=9, may=["completed"], key="", reads=True, tenant="first")
    history.add("accepted", req=1, job="job_1", status=200, ms=1)
    for _ in range(before):
        history.add("token", req=1, text="a", id="")
    stage.fault("something")
    history.add("rollback", since=0.0)
    for _ in range(after):
        history.add("token", req=1, text="a", id="")
    history.add("final", job="job_1", attempts=attempts)
    for second, event in enumerate(history.events, 1):
        event["t"] = float(second)


def cut(stage: FaultTestbed, swallowed: int) -> None:
    judge_cut(stage, [1], swallowed)


def loss(stage: FaultTestbed, worker_died: bool) -> None:
    judge_loss(stage, [1], 0.0, worker_died=worker_died)


def jump(stage: FaultTestbed, worker_died: bool) -> None:
    judge_jump(stage, [1], worker_died=worker_died)


@pytest.mark.parametrize(
    ("judge", "seen", "played", "missed"),
    [
        (cut, 1, {}, 0),
        (cut, 0, {}, 1),  # nothing was swallowed
        (cut, 1, {"before": 0}, 1),  # nobody read
        (loss, False, {}, 0),
        (loss, True, {"attempts": 2}, 0),
        (loss, True, {}, 1),  # the worker held nothing
        (loss, False, {"before": 0}, 1),
        (jump, False, {}, 0),
        (jump, True, {"attempts": 2}, 0),
        (jump, True, {}, 1),
    ],
)
def test_a_fault_that_met_no_message_no_reader_or_no_job_is_no_trial(
    stage: FaultTestbed, judge: Callable[[FaultTestbed, Any], None], seen: Any, played: dict[str, int], missed: int
) -> None:
    """F07, also where the role is the scheduler; F05 and F05b; F12, which was read across all the same."""
    play(stage, **played)
    judge(stage, seen)
    assert stage.missed == missed


async def test_readers_are_those_of_the_process_that_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F18 and the soak: a reader at the other API process proves nothing, nor does one who has ended."""
    history = ClientHistory(tmp_path / "history.jsonl")
    cluster = PenstockCluster(tmp_path, history, "redis://127.0.0.1:1", apis=2, workers=2)
    first, second = cluster.ports

    async def endless() -> ClientView:
        await asyncio.sleep(60)
        raise AssertionError

    def reader(req: int, port: int, **how: Any) -> ClientView:
        view = ClientView(req, Ask("p"), job=f"job_{req}", port=port, **how)
        cluster._begun.append((view, asyncio.create_task(endless())))
        return view

    for req, how in enumerate(({"shown": 1}, {"shown": 3, "state": "completed"}, {}), 1):
        reader(req, first, **how)
    api, other = cluster.apis
    assert (cluster.readers_at(first), cluster.readers_at(second)) == ([1], [])
    assert [readers_of(cluster, child) for child in (api, other, cluster.scheduler)] == [[1], [], [1]]

    async def holders() -> list[Any]:
        return [cluster.workers[1]]

    monkeypatch.setattr(cluster, "holders", holders)
    found = [await is_at_work(cluster, child) for child in cluster.children]
    assert found == [True, False, True, True, False]
    await cluster.close()
    history.close()


def test_a_kill_that_met_nothing_fails_the_soak(stage: FaultTestbed) -> None:
    judge_kills(stage, [True, True])
    assert stage.wrong == [] and stage.figures["kills"] == 2
    judge_kills(stage, [True, False])
    assert len(stage.wrong) == 1


SPENT_S = 20.0


def flood(served: float, *, refusal_ms: float = 5.0, first_token_s: float = 0.1, lowest: float = 0.06) -> list[Life]:
    """A flood in which this share of the capacity was served."""
    done, numbers = round(served * CAPACITY * SPENT_S), count()
    lives = []
    for number in range(done):
        lane = "batch" if number < lowest * done else "interactive"
        life = Life({"t": 0.0, "prompt": f"{lane} {next(numbers)}"}, job=f"job_{number}")
        if lane == "interactive":
            life.events = [{"t": first_token_s, "event": "token"}]
        lives.append(life)
    refused = Life({"t": 0.0, "prompt": f"batch {next(numbers)}"})
    refused.events = [{"t": 0.0, "event": "refused", "ms": refusal_ms, "retry_after": "1"}]
    return [*lives, refused]


@pytest.mark.parametrize(
    ("lives", "bare", "wrong"),
    [
        (flood(0.95), Controls(10, 1.0 * CAPACITY), ""),
        (flood(0.89), Controls(10, 1.0 * CAPACITY), "jobs/s served"),
        (flood(0.95), Controls(10, 2.0 * CAPACITY), ""),
        (flood(0.82), Controls(10, 0.9 * CAPACITY), ""),
        (flood(0.79), Controls(10, 0.9 * CAPACITY), "jobs/s served"),
        (flood(0.95), Controls(10, 0), "bare queue"),
        (flood(0.95, refusal_ms=41), Controls(10, CAPACITY), "refusal p99"),
        (flood(0.95, refusal_ms=41), Controls(11, CAPACITY), ""),
        (flood(0.95, first_token_s=0.7), Controls(10, CAPACITY), "TTFT p99"),
        (flood(0.95, lowest=0.04), Controls(10, CAPACITY), "lowest lane"),
    ],
)
def test_a_flood_is_held_against_its_bounds_and_its_controls(
    stage: FaultTestbed, lives: list[Life], bare: Controls, wrong: str
) -> None:
    """A bare queue that the machine holds up lowers what is due; one that serves more than the capacity raises
    nothing."""
    judge_overload(stage, flood(0.3), lives, SPENT_S, bare)
    assert len(stage.wrong) == bool(wrong) and all(wrong in why for why in stage.wrong), stage.wrong
