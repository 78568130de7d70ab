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

from api.routes import ROUTES
from bench.chaos.asks import Ask, Budget, ClientView
from bench.chaos.checker import check
from bench.chaos.clients import Clients
from bench.chaos.history import ClientHistory, Life, of_kind
from bench.chaos.readings import CANCEL, FOREIGN, LIST, Readings, opened
from bench.chaos.rows.clients import has_expired, was_in
from bench.chaos.rows.engines import DONE, fault_of_stream
from bench.chaos.rows.failover import judge_loss
from bench.chaos.rows.operations import holds_some, judge_cut, judge_jump
from bench.chaos.rows.overload import CAPACITY, Controls, judge_overload
from bench.chaos.rows.store import ACCEPTED, FloodResult, judge_flood, judge_full
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


def ended_so(shown: int, state: str, refused: int, begun: bool) -> bool:
    return has_expired(ClientView(1, Ask("p"), shown=shown, state=state, refused=refused), begun=begun)


def left_in(phase: str, *times: float | None) -> bool:
    """A client left at 10; when its job was created, started, had a token and ended."""
    names = ("created_at", "started_at", "first_token_at", "completed_at")
    return was_in(phase, dict(zip(names, times, strict=False)), 10.0)


def is_right(shown: str, code: str, attempts: int) -> bool:
    return fault_of_stream(shown, code, '{"a": 1}', attempts) == ""


@pytest.mark.parametrize(
    ("judge", "seen", "verdict"),
    [
        # F08: by the job's own times, whether its client left in this phase.
        *[(left_in, seen, True) for seen in (("accept",), ("accept", 11.0), ("queue", 8, None), ("queue", 8, 11.0))],
        *[(left_in, seen, False) for seen in (("accept", 9.0), ("queue", 8, 9.0), ("queue",), ("prefill", 8, 11.0))],
        *[(left_in, ("prefill", 8, 9.0, token), bit) for token, bit in ((11.0, True), (9.5, False))],
        *[(left_in, ("decode", 8, 9.0, 9.5, end), bit) for end, bit in ((11.0, True), (9.9, False))],
        *[(left_in, ("last", 8.0, 9.0, *token), bool(token)) for token in ((9.5, 9.9), ())],
        # F16: what runs was begun and stopped; what waits is told so by its events, or refused.
        *[(ended_so, seen, True) for seen in ((3, "expired", 0, True), (0, "expired", 0, False), (0, "", 408, False))],
        *[(ended_so, (shown, state, 0, True), False) for shown, state in ((0, "expired"), (3, "completed"))],
        (ended_so, (0, "", 503, False), False),
        # F36: after a kill a stream that has shown some of an answer must not go on with another one.
        *[(is_right, ('{"a": 1}', DONE, attempts), True) for attempts in (1, 2)],
        *[(is_right, ('{"a"', "resume_impossible", attempts), attempts > 1) for attempts in (1, 2)],
        *[(is_right, seen, False) for seen in (('{"a"{"a": 1}', DONE, 2), ("", "resume_impossible", 2))],
        *[(is_right, ('{"a"', code, 2), False) for code in ("", "internal_error")],
        # F17 and F18: one of the processes held a job when it was told to end.
        (holds_some, (["one", "two"], ["two", "three"]), True),
        *[(holds_some, (["one", "two"], others), False) for others in (["three"], [])],
    ],
)
def test_a_fault_that_did_not_bite_is_no_trial(
    judge: Callable[..., bool], seen: tuple[Any, ...], verdict: bool
) -> None:
    assert judge(*seen) is verdict


@pytest.mark.parametrize(
    ("path", "answers"),
    [
        ("/v1/jobs/{job}", {404: False, 503: False, 429: False, 200: True, 410: True, 403: True}),
        ("/v1/jobs/{job}/timing", {200: True}),
        ("/v1/jobs/{job}/result", {409: True, 425: True}),
        (CANCEL[1], {202: True, 404: False}),
        (LIST, {404: True, 500: False}),
    ],
)
def test_another_tenant_is_shown_nothing_of_a_job(path: str, answers: dict[int, bool]) -> None:
    """A list that names it, its timing, its result, and a cancel that tells that there is none to be had."""
    assert {status: opened("job_1", path, status, b"") for status in answers} == answers
    for body, shown in ((b'{"data": []}', False), (b'{"data": [{"id": "job_1"}]}', True)):
        assert opened("job_1", LIST, 200, body) is shown


def test_what_is_left_and_what_met_nothing_fails_the_soak(stage: FaultTestbed) -> None:
    """Logs are counted by themselves; the keys of dead workers are kept for an hour."""

    judge_keys(stage, held(log=2, worker=2, job=5), held(log=2, worker=9, job=5))
    judge_kills(stage, [True, True])
    assert stage.wrong == []
    judge_keys(stage, held(log=2, worker=2, job=5), held(log=3, worker=2, job=5))
    judge_kills(stage, [True, False])
    assert [why.split(" of ")[0] for why in stage.wrong] == ["3 logs", "1"]


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


def test_each_way_to_a_job_is_tried_with_a_strangers_key() -> None:
    ways = [(route.method, route.path.replace("{job_id}", "{job}")) for route in ROUTES if "{job_id}" in route.path]
    of_callers = {way for way in ways if way[1].startswith("/v1/jobs/")}
    assert len(of_callers) >= 6 and of_callers <= set(FOREIGN)
