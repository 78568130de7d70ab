"""What `penstock up` says of processes that end and of their jobs, and how long its start waits for the store."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cli_instance import a_state
from hand import Hand, lapse
from msgspec.structs import replace

from cli import up as machine
from cli.deployment import load_deployment
from cli.instance import DataDir
from cli.output import ProgressLine
from cli.supervisor import Child, Program, counts_after
from cli.up import Machine, Screen, fates_of, in_words, ready_block
from streaming.errors import Loading, Unavailable
from streaming.ids import new_job_id
from streaming.jobs.job import Job, Text
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.order import Priority
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings
from streaming.store.identity import enter_store


def watched(role: str = "worker") -> tuple[Child, io.StringIO, Screen]:
    """A process, what the screen says of it, and the screen."""
    program = Program(role=role, id=f"{role}-1", argv=(), log=Path(f"{role}-1.log"), env={})
    stream = io.StringIO()
    return Child(program, lambda _child: None), stream, Screen(ProgressLine(stream, {}))


def test_a_death_is_reported_once_it_is_known_what_the_worker_ran() -> None:
    """Jobs that were given up with it each time, a crash loop once; neither while that is unknown."""
    child, stream, screen = watched()

    def says(given_up: list[str], failures: int) -> list[str]:
        before, cause = len(stream.getvalue()), "killed by SIGKILL"
        child.status = replace(child.status, state="restarting", alike=failures, was_ready=True, cause=cause)
        screen.noticed(child, starting=False, releasing=True)
        assert "error" not in stream.getvalue()[before:]
        screen.released(child, given_up, starting=False)
        return stream.getvalue()[before:].splitlines()

    assert [line[9:] for line in says([], 2)] == ["worker-1 ended (killed by SIGKILL); starting it again"]
    message, cause, step = says(["job_1"], 3)
    assert message == "error: worker-1 died running job_1, which is a dead letter now"
    assert "killed by SIGKILL (" in cause and step.startswith("next:  penstock dlq show job_1;")
    assert says(["job_1", "job_2"], 4)[0] == "error: worker-1 died running job_1, job_2, which are dead letters now"
    assert says([], 5) == []
    child.status = replace(child.status, state="ready")
    screen.noticed(child, starting=False)
    assert says([], 6)[0] == "error: worker-1 ended 6 times, each soon after its start"


def test_each_kind_of_crash_loop_is_reported_once_with_its_own_cause() -> None:
    """A worker that was killed, and whose engine then does not start: the report must not stay with the kills. The
    figures in a cause, such as an address, make no other kind."""
    child, stream, screen = watched()

    def says(cause: str, *, was_ready: bool = False) -> list[str]:
        before = len(stream.getvalue())
        counts = counts_after(child.status, was_ready=was_ready, ran_s=1.0)
        child.status = replace(child.status, state="restarting", cause=cause, **counts)
        screen.noticed(child, starting=False)
        return [line.partition(" (")[0] for line in stream.getvalue()[before:].splitlines()[:2]]

    kills = [says("killed by SIGKILL", was_ready=True) for _ in range(3)]
    assert [line[9:] for line in kills[0] + kills[1]] == ["worker-1 ended"] * 2, "each one, until it is a loop"
    assert kills[2:] == [["error: worker-1 ended 3 times, each soon after its start", "cause: killed by SIGKILL"]]
    first, *more = [says(f"no device at 0x{number}f") for number in range(4)]
    assert first[0].endswith(" worker-1 ended")
    assert more == [[], ["error: worker-1 did not start 3 times in a row", "cause: no device at 0x2f"], []]
    assert says("no weights") == ["error: worker-1 did not start 5 times in a row", "cause: no weights"]


def test_who_comes_back_is_told_with_the_time_that_it_took() -> None:
    """Once for each loss that was told, and never at the first start."""
    child, _, screen = watched("api")

    def recovered(state: str, **changes: object) -> str:
        child.status = replace(child.status, state=state, **changes)
        return screen.noticed(child, starting=False)

    assert recovered("ready", pid=1) == ""
    for _ in range(2):
        counts = counts_after(child.status, was_ready=True, ran_s=1.0)
        assert recovered("restarting", pid=None, cause="killed by SIGKILL", **counts) == ""
        assert recovered("starting", pid=2) == ""
        assert recovered("ready", pid=2).startswith("api-1 is ready again after 0.")
        assert recovered("ready", pid=2) == ""


def test_what_is_waited_for_is_told_when_it_goes_and_when_it_is_back() -> None:
    """A worker's server; each once."""
    child, stream, screen = watched()
    for away in ("", "http://a refuses", "http://a refuses", "", ""):
        child.status = replace(child.status, state="ready", away=away)
        assert screen.noticed(child, starting=False) == ""
    gone, back = stream.getvalue().splitlines()
    assert "worker-1 is away (http://a refuses)" in gone and "worker-1 is back after 0." in back


def test_a_narrow_terminal_gets_whole_what_is_to_be_copied() -> None:
    """The link to the console is one line, which the terminal continues; the request to try is as many as it has
    arguments."""
    link = f"http://127.0.0.1:1/console#link={'x' * 22}"
    state = a_state(DataDir(Path("data")), ready_s=1.0)
    lines = ready_block(state, link.partition(":1")[2], keyed=True, width=40)
    assert link in lines and "  Console" in lines
    shown = "\n".join(lines)
    assert re.search(r"^curl -N http\S+ \\\n  -H '.*' \\\n  -H .* \\\n  -d '\{[^']*\}'$", shown, re.MULTILINE)


async def test_what_became_of_the_jobs_of_a_lost_worker(wire: RedisClient) -> None:
    """One went on where it was, one began again, one still waits, one was cancelled."""
    jobs, hands = [new_job_id(0) for _ in range(4)], list[Hand]()
    for job_id in jobs:
        await Queue(wire).put(Job(id=job_id, model="sim", tenant="t", priority=Priority.BATCH, prompt=Text(("x",))))
        hands.append(await Hand.claiming(wire, "worker-1@here"))
        await hands[-1].write("abc")
    for hand in hands:
        await lapse(wire, hand.lease)
    await Queue(wire).cancel(jobs[3])
    continuing, beginning = await Hand.claiming(wire, "worker-1@there"), await Hand.claiming(wire, "worker-1@here")
    await beginning.lease.restart(jobs[1], beginning.claim.number)
    assert (continuing.claim.job.id, beginning.claim.job.id) == (jobs[0], jobs[1])
    fates = fates_of(await JobReader(wire).records(jobs, bodies=False), "worker-1@here")
    assert fates == {"continued": 1, "begun again": 1, "waiting": 1, "cancelled": 1}
    assert in_words(fates) == "1 job continued, 1 begun again, 1 waiting, 1 cancelled" and in_words({}) == ""


LOADING = b"-LOADING Redis is loading the dataset in memory\r\n"


@pytest.fixture
async def loading_url() -> AsyncIterator[str]:
    """A server that answers every command by saying that it reads its data."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while sent := await reader.read(65536):
            writer.write(LOADING * len(re.findall(rb"\*\d+\r\n", sent)))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"


@pytest.fixture
def starting(tmp_path: Path) -> Machine:
    """A machine whose store is not entered."""
    home = DataDir(tmp_path / "data")
    home.make_private()
    home.prepare()
    deployment = load_deployment({("up", "engine"): "sim"}, {}, tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return Machine(deployment, home, [listener], Screen(ProgressLine(io.StringIO(), {}, quiet=True)))


async def test_redis_that_reads_its_data_says_so(loading_url: str) -> None:
    client = RedisClient.open(RedisSettings(url=loading_url))
    try:
        with pytest.raises(Loading):
            await enter_store(client)
    finally:
        await client.close()


async def test_a_redis_that_reads_its_data_is_waited_for(
    starting: Machine, wire: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no time left for one that does not answer."""
    answers = [Loading("it reads its data")] * 3

    async def enter(client: RedisClient) -> None:
        if answers:
            raise answers.pop()

    monkeypatch.setattr(machine, "enter_store", enter)
    monkeypatch.setattr(machine, "ANSWER_TIMEOUT_S", -1.0)
    monkeypatch.setattr(machine, "ANSWER_RETRY_DELAY_S", 0.0)
    await starting._enter(wire, "redis://user:secret@there:1/0")
    assert answers == []


async def test_ctrl_c_ends_the_wait_for_redis(
    starting: Machine, wire: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def enter(client: RedisClient) -> None:
        starting._interrupt()
        raise Unavailable("it does not answer")

    monkeypatch.setattr(machine, "enter_store", enter)
    monkeypatch.setattr(machine, "ANSWER_RETRY_DELAY_S", 0.0)
    async with asyncio.timeout(60):
        await starting._enter(wire, "redis://there:1/0")


async def test_what_cannot_be_shown_ends_neither_supervision_nor_drain(starting: Machine, tmp_path: Path) -> None:
    """The reader of stderr, a `tee`, has exited: a process that dies is started again, and drained in the end."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        starting._screen.progress = ProgressLine(stream, {})
        program = Program(role="worker", id="worker-1", argv=("sleep", "600"), log=tmp_path / "log", env={})
        child = starting._supervisor.start(program)
        async with asyncio.timeout(30):
            await starting._supervisor.until(lambda: child.status.pid is not None)
            assert child.status.pid is not None
            os.kill(child.status.pid, signal.SIGKILL)
            await starting._supervisor.until(lambda: child.status.restarts == 1 and child.status.pid is not None)
            starting._interrupt()
            await starting._stop()
    assert starting._supervisor.children == {}
