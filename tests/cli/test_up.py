"""`penstock up` as people meet it: real processes, from the first line to the last."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from cli_instance import said_here
from house import eventually, free_port
from redis import Redis
from terminals import OnTerminal

from bench.penstock import MODEL
from bench.recovery import Reader
from penstock import __version__

pytestmark = pytest.mark.slow

ROLES = ["redis", "api", "worker", "scheduler", "offline"]
TOKENS = "20"
ROOT = Path(__file__).parents[2]
PENSTOCK = [sys.executable, "-m", "cli"]


class Up:
    """One `penstock up --engine sim` in a folder of its own, on any free port."""

    def __init__(self, folder: Path, *options: str, **environ: str) -> None:
        self.folder, self.data_dir, self.errors = folder, folder / "data", folder / "errors"
        self.environ = outside() | {"PENSTOCK_SIM_STEP_MS": "2", "PENSTOCK_SIM_PREFILL_MS": "2"} | environ
        command = [*PENSTOCK, "up", "--engine", "sim", "--port", "0", "--data-dir", str(self.data_dir), *options]
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, env=self.environ, cwd=folder, text=True
            )
        self.block: list[str] = []

    def ready(self) -> Up:
        """Wait for the ready block."""
        for line in self.process.stdout:
            self.block.append(line.rstrip("\n"))
            if line.startswith("  Stop"):
                self.said_first = self.said()
                return self
        raise AssertionError(self.said())

    @property
    def port(self) -> int:
        return int(self.block[1].split(":")[-1].removesuffix("/v1"))

    @property
    def state(self) -> dict[str, Any]:
        return dict(json.loads((self.data_dir / "run" / "state.json").read_text()))

    def run(self, *words: str) -> tuple[str, int, str]:
        """What a command about this instance says, its exit code, and its errors."""
        return said_here(*words, "--data-dir", str(self.data_dir))

    def chat(self, *options: str) -> subprocess.CompletedProcess[str]:
        """`penstock chat hello`, in a process of its own: it handles signals."""
        return run("chat", "hello", "--data-dir", str(self.data_dir), *options, env=self.environ, cwd=self.folder)

    def ps(self) -> list[dict[str, Any]]:
        """The processes, as programs see them; none when nothing runs."""
        return listed("--data-dir", str(self.data_dir))

    def pids(self) -> dict[str, int]:
        """Process ids by name, once every process is ready; one that a test has stopped is silent."""
        found = eventually(
            lambda: (rows := self.ps()) and all(row["state"] in ("ready", "silent") for row in rows) and rows
        )
        return {row["id"]: row["pid"] for row in found}

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return bytes(answer.read())

    def state_of(self, job_id: str) -> str:
        return str(json.loads(self.get(f"/v1/jobs/{job_id}"))["status"])

    def said(self) -> str:
        """What it wrote on stderr so far."""
        return self.errors.read_text()

    def end(self) -> int:
        """Its exit code."""
        return self.process.wait(timeout=60)

    def close(self) -> None:
        """Leave nothing behind, whatever the test did."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.end()
        self.process.stdout.close()


def outside() -> dict[str, str]:
    """Variables of a process that starts in another folder and is told nothing of Penstock."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {name: each for name, each in os.environ.items() if not name.startswith("PENSTOCK_")} | {"PYTHONPATH": path}


def run(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """One command in a process of its own, to its end."""
    return subprocess.run([*PENSTOCK, *words], check=False, capture_output=True, text=True, **options)


def listed(*where: str) -> list[dict[str, Any]]:
    """What `penstock ps --json` says."""
    return [json.loads(line) for line in said_here("ps", "--json", *where)[0].splitlines()]


def alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """An instance for tests that look, and for one whose worker crashes and comes back."""
    up = Up(tmp_path_factory.mktemp("shared"), "--model", "toy", PENSTOCK_SIM_FAULTS="true").ready()
    yield up
    up.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    """Start instances one after the other in the same folder."""
    started: list[Up] = []

    def begin(*options: str, **environ: str) -> Up:
        started.append(Up(tmp_path, *options, **environ))
        return started[-1]

    yield begin
    for up in started:
        up.close()


# --- looking ---------------------------------------------------------------------------------------------------------


def test_the_ready_block_is_short_and_has_the_link_once(shared: Up) -> None:
    """Before it each line is a phase: nothing of a library is on the screen."""
    assert len(shared.block) == 10 and len(LINK.findall("\n".join(shared.block))) == 1
    phases = re.compile(r"penstock \S+|(redis|api|worker|scheduler|offline)-1: .+")
    assert all(phases.fullmatch(line) for line in shared.said_first.strip().split("\n"))


def test_the_lines_to_try_can_be_pasted(shared: Up) -> None:
    """What is shown works as it stands, in the shell that `up` was started from: `penstock` need not be on the PATH."""
    command = shared.block[7].removeprefix("  Try      ")
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("data: [DONE]")
    words = ["sh", "-c", shared.block[8].strip()]
    chat = subprocess.run(words, capture_output=True, text=True, check=True, cwd=shared.folder, env=shared.environ)
    assert len(chat.stdout.split()) > 10


def test_ps(shared: Up) -> None:
    """Of the folder: one object per line, in the order of the roles, with at least these fields, and every process
    lives. By --redis-url: the same, as they say of themselves. For people: the last line says whether it serves."""
    shared.pids()
    rows = shared.ps()
    assert [row["role"] for row in rows] == ROLES
    for row in rows:
        assert row.keys() >= {"role", "id", "pid", "state", "since"} and row["state"] == "ready"
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", row["since"]) and alive(row["pid"])
    assert [row["role"] for row in listed("--redis-url", shared.state["redis_url"])] == ROLES[1:]
    table, _, note = shared.run("ps")
    assert table.split()[:5] == ["ROLE", "ID", "PID", "STATE", "SINCE"]
    assert note.startswith("ready at http://127.0.0.1:")


# --- ending ----------------------------------------------------------------------------------------------------------


def ends_cleanly(up: Up, number: signal.Signals) -> None:
    """Exit 0, no process, no temporary file; the queue, the logs and the lock's file stay."""
    pids = up.pids()
    up.process.send_signal(number)
    assert up.end() == 0
    assert "draining, Ctrl-C again to stop now" in up.said()
    assert not any(map(alive, pids.values()))
    left = sorted(entry.name for entry in up.data_dir.iterdir())
    assert left == ["files", "lock", "logs", "name", "records", "redis"]
    assert up.run("ps")[1] == 3


def test_no_life_loses_a_job_of_the_one_before_or_leaves_a_process(start: Callable[..., Up]) -> None:
    """Three lives of one folder: the first is interrupted in its drain, the second is killed, the third is not in the
    way of either and finishes what runs."""
    up = start("--sim-step-ms", "500", PENSTOCK_REDIS_LEASE_MS="1000").ready()
    job_id = up.run("submit", "hello", "--max-tokens", "200")[0].strip()
    eventually(lambda: up.state_of(job_id) == "in_progress")
    an_interrupt_ends_the_wait_of_down(up)
    up = start("--sim-step-ms", "20", PENSTOCK_REDIS_LEASE_MS="1000").ready()
    assert up.run("jobs", "events", job_id)[1] == 0
    assert len(up.run("jobs", "result", job_id)[0].split()) == 200
    pids = up.pids()
    up.process.kill()
    up.end()
    eventually(lambda: not any(map(alive, pids.values())))
    assert up.run("ps")[1] == 3
    up = start("--sim-step-ms", "20").ready()
    assert up.pids().keys() == pids.keys()
    a_running_job_is_finished_first(up)


def an_interrupt_ends_the_wait_of_down(up: Up) -> None:
    """`down` counts the running jobs, as the terminal of `up` does; a signal to `up` ends the wait."""
    command = [*PENSTOCK, "down", "--data-dir", str(up.data_dir)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=up.environ, text=True) as down:
        assert [down.stderr.readline() for _ in range(2)] == ["draining\n", "draining: 1 job to finish\n"]
        assert "draining 1 job, Ctrl-C again to stop now" in up.said()
        up.process.send_signal(signal.SIGINT)
        assert down.wait(60) == 0
    assert up.end() == 130


def a_running_job_is_finished_first(up: Up) -> None:
    """Ctrl-C during an answer: the answer comes to its end, then everything stops."""
    command = [*PENSTOCK, "chat", "hello", "--max-tokens", "100", "--data-dir", str(up.data_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=up.environ, text=True) as chat:
        first = chat.stdout.read(1)
        up.process.send_signal(signal.SIGINT)
        assert len((first + chat.stdout.read()).split()) == 100 and chat.wait() == 0
    assert up.end() == 0 and "draining 1 job," in up.said()


LONG_LEASE = {"PENSTOCK_REDIS_LEASE_MS": "60000"}
"""Longer than these tests wait for anything: what waits for the lease to lapse fails them."""
WAIT_S = 45


async def streaming(up: Up, tokens: int = 150) -> tuple[Reader, asyncio.Task[None]]:
    """A chat that some tokens have come of."""
    reader = Reader("hello", tokens)
    task = asyncio.create_task(reader.chat(up.port))
    while len(reader.came) < 5:
        assert not task.done(), reader
        await asyncio.sleep(0.01)
    return reader, task


def at_work(up: Up) -> list[str]:
    """The workers that run a job, as they said last."""
    return [str(row["id"]) for row in listed("--redis-url", up.state["redis_url"]) if row["running"]]


def holder(up: Up) -> str:
    """The worker that runs a job, where none ran one before."""
    return eventually(lambda: at_work(up))[0]


async def a_killed_workers_jobs_wait_for_no_lease(up: Up) -> None:
    """The stream goes on with each token once, by the worker's restart or by another worker; the loss is counted."""
    pids = up.pids()
    reader, task = await streaming(up)
    os.kill(pids[await asyncio.to_thread(holder, up)], signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        await task
    assert reader.is_exact and reader.ended == "completed" and reader.resets == 0
    words = r"worker-\d is ready again after \d+\.\d s"
    await asyncio.to_thread(eventually, lambda: re.search(words, up.said()))
    counted = up.get("/metrics").decode()
    assert "penstock_lapsed_workers_total 1.0" in counted and "penstock_lease_reclaims_total 1.0" in counted


def test_killed_children_come_back(start: Callable[..., Up]) -> None:
    """SIGKILL of each role in turn: another process takes its place, and answers go on. A store that hangs is told, and
    that it answers again. After all that it ends cleanly."""
    up = start("--model", MODEL, "--sim-step-ms", "20", **LONG_LEASE).ready()
    before = up.pids()
    asyncio.run(a_killed_workers_jobs_wait_for_no_lease(up))
    assert up.pids()["worker-1"] != before["worker-1"]
    assert "worker-1 ended (killed by SIGKILL); starting it again" in up.said()
    for name in ("scheduler-1", "api-1", "redis-1"):
        os.kill(before[name], signal.SIGKILL)
        eventually(lambda name=name: up.pids()[name] != before[name])
        answer = eventually(lambda: (done := up.chat("--max-tokens", TOKENS)).returncode == 0 and done.stdout)
        assert len(str(answer).split()) == int(TOKENS)
        assert f"{name} ended (killed by SIGKILL); starting it again" in up.said()
        eventually(lambda name=name: re.search(rf"{name} is ready again after \d+\.\d s", up.said()))
    store, said_before = up.pids()["redis-1"], len(up.said())
    os.kill(store, signal.SIGSTOP)
    try:
        eventually(lambda: "the store (redis-1) is away (Redis does not answer" in up.said()[said_before:])
    finally:
        os.kill(store, signal.SIGCONT)
    eventually(lambda: re.search(r"the store \(redis-1\) is back after \d+\.\d s", up.said()[said_before:]))
    ends_cleanly(up, signal.SIGTERM)


async def test_a_stopped_worker_keeps_its_lease_and_a_killed_one_does_not(
    start: Callable[..., Up], redis_url: str
) -> None:
    """SIGSTOP is no death: while the other worker is killed and comes back, nobody takes the stopped one's job. All of
    it with a Redis of one's own."""
    own = LONG_LEASE | {"PENSTOCK_REDIS_URL": redis_url}
    up = start("--model", MODEL, "--workers", "2", "--sim-step-ms", "20", **own).ready()
    await a_killed_workers_jobs_wait_for_no_lease(up)
    pids = await asyncio.to_thread(up.pids)
    await asyncio.to_thread(eventually, lambda: not at_work(up))  # else the one of before seems to hold the next job
    reader, task = await streaming(up)
    stopped = await asyncio.to_thread(holder, up)
    (other,) = {"worker-1", "worker-2"} - {stopped}
    os.kill(pids[stopped], signal.SIGSTOP)
    try:
        os.kill(pids[other], signal.SIGKILL)
        await asyncio.to_thread(eventually, lambda: up.pids()[other] != pids[other])
        job = json.loads(up.run("jobs", "ls", "--json")[0].splitlines()[0])  # the newest
        assert (job["status"], job["attempts"]) == ("in_progress", 1)
    finally:
        os.kill(pids[stopped], signal.SIGCONT)
    async with asyncio.timeout(WAIT_S):
        await task
    assert reader.is_exact and reader.resets == 0
    assert json.loads(up.run("jobs", "show", job["id"], "--json")[0])["attempts"] == 1


# --- other ways to start ---------------------------------------------------------------------------------------------


def test_model_that_cannot_be_loaded_ends_it(start: Callable[..., Up], tmp_path: Path) -> None:
    """A model file that only begins as one: tried, told once with its cause, exit 1, nothing left."""
    (tmp_path / "broken.gguf").write_text("GGUF, no model")
    up = start("--engine", "llamacpp", PENSTOCK_LLAMACPP_PATH=str(tmp_path / "broken.gguf"))
    assert up.end() == 1
    said = up.said()
    assert said.count("error:") == 1 and "broken.gguf" in said and "next:  penstock doctor" in said
    assert not (up.data_dir / "run").exists()


def test_over_tls_its_own_commands_trust_its_certificate_alone(
    start: Callable[..., Up], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it has another name than the address; whoever knows only its authority needs the name."""
    authority = Authority(tmp_path / "authority")
    certificate, key = authority.pair("localhost")
    files = {"PENSTOCK_API_TLS_CERTIFICATE": str(certificate), "PENSTOCK_API_TLS_KEY": str(key)}
    up = start("--api-processes", "2", **files).ready()
    assert f"https://127.0.0.1:{up.port}/v1" in up.block[1] and up.state["url"].startswith("https://")
    for words in (("submit", "hello", "--wait", "--max-tokens", "2"), ("probe", "api")):
        assert up.run(*words)[1] == 0, words
    by_url = ("jobs", "ls", "--url", f"https://localhost:{up.port}")
    monkeypatch.chdir(tmp_path / "authority")
    assert said_here(*by_url)[1] != 0
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    assert said_here(*by_url)[1] == 0


def test_a_certificate_without_its_key_ends_it(start: Callable[..., Up], tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    files = {"PENSTOCK_API_TLS_CERTIFICATE": str(authority.pair("one")[0])}
    up = start(**files, PENSTOCK_API_TLS_KEY=str(authority.pair("two")[1]))
    assert up.end() == 2 and "tls_certificate" in up.said() and "its own first" in up.said()


def test_the_admin_commands_work_without_any_setting(shared: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    """They send the token of the data folder by themselves; others of this machine do not get in."""
    token = shared.data_dir / "run" / "admin-token"
    assert token.stat().st_mode & 0o777 == 0o600 and len(token.read_text()) >= 43
    for words in (("scale", "status"), ("scale", "log"), ("scale", "resume", "toy"), ("dlq", "ls"), ("webhooks", "ls")):
        _, code, errors = shared.run(*words)
        assert code == 0, (words, errors)
    by_url = ("dlq", "ls", "--url", shared.state["url"])
    monkeypatch.chdir(shared.folder)
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(shared.data_dir))
    assert said_here(*by_url)[1] == 0
    monkeypatch.setenv("PENSTOCK_API_KEY", "sk-of-some-other-server")
    assert said_here("dlq", "ls")[1] == 0
    monkeypatch.delenv("PENSTOCK_DATA_DIR")
    monkeypatch.delenv("PENSTOCK_API_KEY")
    _, code, errors = said_here(*by_url)
    assert code == 4 and "--data-dir" in errors
    monkeypatch.setenv("PENSTOCK_API_KEY", token.read_text())
    assert said_here(*by_url)[1] == 0


def test_the_admin_token_is_told_to_nobody(shared: Up) -> None:
    """Processes are given its hash, in a file that their owner alone may read: neither is in an argv or a log."""
    token = (shared.data_dir / "run" / "admin-token").read_text()
    known = hashlib.sha256(token.encode()).hexdigest()
    settings = (shared.data_dir / "run" / "settings.json").read_text()
    assert known in settings and token not in settings
    files = [Path(f"/proc/{pid}/{what}") for pid in shared.pids().values() for what in ("cmdline", "environ")]
    for file in (*files, *(shared.data_dir / "logs").iterdir()):
        text = file.read_bytes().decode(errors="replace")
        assert token not in text and known not in text, file


def opened(link: str) -> int:
    """The status that a browser gets which opens a link to the console."""
    url, _, secret = link.partition("/console#link=")
    body, headers = json.dumps({"link": secret}).encode(), {"Content-Type": "application/json", "Origin": url}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/console/session", body, headers)) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


LINK = re.compile(r"http://\S+/console#link=[\w-]{22}(?![\w-])")


def test_in_the_background_with_a_redis_of_ones_own(tmp_path: Path, redis_url: str) -> None:
    """It returns when ready, and `down` when it has ended. Several API processes share the port; --workers 0 starts
    none, and is ready without; the Redis is used and not supervised."""
    here: dict[str, Any] = {"cwd": tmp_path, "env": outside()}
    words = ("up", "--detach", "--engine", "sim", "--port", "0", "--workers", "0", "--api-processes", "2")
    with Redis.from_url(redis_url) as admin:
        admin.execute_command("ACL", "SETUSER", "typed", "on", ">canary-password", "~*", "&*", "+@all")
    url = redis_url.replace("redis://", "redis://typed:canary-password@")
    try:
        done = run(*words, "--redis-url", url, **here)
        assert done.returncode == 0, done.stderr
        assert "0 workers" in done.stdout and "in Redis at 127.0.0.1:" in done.stdout
        assert done.stdout.rstrip().endswith("-m cli down")
        a_typed_password_is_not_passed_on(done, tmp_path / ".penstock", url)
        the_link_to_the_console_logs_in_once(done.stdout, tmp_path / ".penstock")
        rows = listed("--data-dir", str(tmp_path / ".penstock"))
        assert [row["role"] for row in rows] == ["api", "api", "scheduler", "offline"]
        again = run(*words, **here)
        assert again.returncode == 1 and "already running" in again.stderr
    finally:  # a detached instance outlives this test otherwise
        down = run("down", **here)
        with Redis.from_url(redis_url) as admin:
            admin.execute_command("ACL", "DELUSER", "typed")
    assert down.returncode == 0
    assert said_here("ps", "--data-dir", str(tmp_path / ".penstock"))[1] == 3
    assert not (tmp_path / ".penstock" / "run").exists()


def a_typed_password_is_not_passed_on(done: subprocess.CompletedProcess[str], home: Path, url: str) -> None:
    """Whoever types one is told who sees it; the processes that stay have it from their settings."""
    assert "every user of this machine can read the password" in done.stderr
    assert "canary-password" not in done.stdout + done.stderr
    state = json.loads((home / "run" / "state.json").read_text())
    lines = family(state["pid"])
    assert state["redis_url"] == url and len(lines) >= len(ROLES)
    assert [line for line in lines.values() if b"canary-password" in line] == []
    assert holding(home, "canary-password") == {*SETTINGS, "state.json"}


def the_link_to_the_console_logs_in_once(shown: str, home: Path) -> None:
    """Neither a log nor the state has it."""
    (link,) = LINK.findall(shown)
    assert holding(home, link.partition("=")[2]) == set()
    assert [opened(link) for _ in range(2)] == [200, 401]


def test_a_start_shows_phases_with_seconds_and_can_be_interrupted(tmp_path: Path) -> None:
    """On a terminal every silence has a named phase and a clock. After Ctrl-C everything that was started ends, without
    waiting for what it was loading."""
    pattern, words = re.compile(r"worker-1: \w.*weights.*  [1-9]\.\d s"), ["-m", "cli", "up", "--engine", "sim"]
    environ = outside() | {"PENSTOCK_SIM_LOAD_MS": "100000", "FORCE_COLOR": "", "TERM": "xterm", "NO_COLOR": "1"}
    with OnTerminal([*words, "--port", "0"], tmp_path, environ=environ) as screen:
        screen.until(pattern.search)
        pids = [row["pid"] for row in listed("--data-dir", str(tmp_path / ".penstock")) if row["pid"]]
        screen.interrupt()
        assert screen.end() == 0
    assert len(pids) >= 3 and not any(map(alive, pids))


def test_redis_that_never_answers_ends_the_start(start: Callable[..., Up]) -> None:
    """Here one in the background. After a bounded wait, which it shows, with the fix, said once."""
    port = free_port()
    up = start("--detach", "--redis-url", f"redis://127.0.0.1:{port}/0")
    eventually(lambda: f"waiting for Redis at 127.0.0.1:{port}, at most 10 s" in up.said())
    assert "starting: waiting for Redis" in said_here("ps", "--data-dir", str(up.data_dir))[2]
    assert up.end() == 3
    assert up.said().count("error: ") == 1
    assert f"error: no Redis can be used at 127.0.0.1:{port}\ncause: Redis does not answer" in up.said()
    assert "next:  start it, or correct redis.url (set by " in up.said()
    assert not (up.data_dir / "run").exists()
    said = [json.loads(line)["message"] for line in up.run("logs", "--role", "up")[0].splitlines()]
    assert said[0] == f"penstock {__version__} starts"
    assert said[-1].startswith(f"penstock up ends: no Redis can be used at 127.0.0.1:{port}; Redis does not answer")


# --- passwords -------------------------------------------------------------------------------------------------------


def family(pid: int) -> dict[int, bytes]:
    """The command line of a process and of all it has started, and what these have."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found, fresh = {pid}, {pid}
    while fresh := {child for child, parent in parents.items() if parent in fresh} - found:
        found |= fresh
    return {each: Path(f"/proc/{each}/cmdline").read_bytes() for each in found if Path(f"/proc/{each}").exists()}


SETTINGS = ("settings.json", *(f"settings-{role}.json" for role in ROLES[1:]))
"""Everything, and what each role gets of it."""


def holding(folder: Path, secret: str) -> set[str]:
    """Names of the files in a folder that hold a secret."""
    return {path.name for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()}


def test_no_password_is_on_a_command_line(shared: Up) -> None:
    """Every user of a machine can read those. Logs have none either, and what has it is for the owner alone."""
    password = shared.state["redis_url"].split(":")[2].split("@")[0]
    lines = family(shared.process.pid)
    assert set(shared.pids().values()) < set(lines) and len(password) > 16
    assert [line for line in lines.values() if password.encode() in line] == []
    assert holding(shared.data_dir, password) == {"valkey.conf", *SETTINGS, "state.json"}
    for name in ("redis/valkey.conf", "run/state.json", "", *(f"run/{each}" for each in SETTINGS)):
        assert (shared.data_dir / name).stat().st_mode & 0o077 == 0


def test_a_crash_loop_names_the_job_and_its_dead_letter(shared: Up) -> None:
    """By the doctor, and in the log of that job: from its request to the end of its third worker."""
    job = shared.run("submit", "[[crash@3]]")[0].strip()
    eventually(lambda: shared.state_of(job) == "failed", seconds=60)
    found = shared.run("doctor")[0]
    words = f"job: worker-1 died 3 times running job {job}, which was given up\n      "
    words += f"penstock dlq show --data-dir {shared.data_dir} {job}"
    assert words in found
    assert job in shared.run("dlq", "show", job)[0]
    lines = [json.loads(line) for line in shared.run("logs", "--job", job)[0].splitlines()]
    kinds = {"worker": ["jobs claimed", "a job is continued", "a job runs alone"], "api": ["request"]}
    for role, messages in kinds.items():
        said = [line["message"] for line in lines if line["service"] == role]
        assert all(any(each.startswith(message) for each in said) for message in messages), (role, said)
    by = [line["worker"] for line in lines if "is given up" in line["message"]]
    assert by == [f"worker-1@{socket.gethostname()}"]
    assert holding(shared.data_dir / "logs", "crash@3") == set()
