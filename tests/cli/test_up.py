"""`penstock up` as people meet it: real processes, from the first line to the last."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
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
from cli_instance import said_here
from house import eventually
from redis import Redis
from terminals import OnTerminal

from bench.penstock import MODEL
from bench.recovery.shows import Reader
from cli.log_lines import START
from penstock import __version__

pytestmark = pytest.mark.slow

ROLES = ["redis", "api", "worker", "scheduler", "offline"]
TOKENS = "20"
TWO_WORKERS = """
[models.toy]
engine = "sim"
min_workers = 1
max_workers = 2
options = {slots = 1, step_ms = 100}
[scheduler]
tick_s = 0.2
interactive_s = 0.5
"""


class Up:
    """One `penstock up --engine sim` in a folder of its own, on any free port."""

    def __init__(self, folder: Path, *options: str, **environ: str) -> None:
        self.folder = folder
        self.data_dir = folder / "data"
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        self.environ |= {"PENSTOCK_SIM_STEP_MS": "2", "PENSTOCK_SIM_PREFILL_MS": "2", "PYTHONPATH": path()} | environ
        self.errors = folder / "errors"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*penstock(), "up", "--engine", "sim", "--port", "0", "--data-dir", str(self.data_dir), *options],
                stdout=subprocess.PIPE,
                stderr=errors,
                env=self.environ,
                cwd=folder,
                text=True,
            )
        self.block: list[str] = []

    def ready(self) -> Up:
        """Wait for the ready block."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.block.append(line.rstrip("\n"))
            if line.startswith("  Stop"):
                return self
        raise AssertionError(self.said())

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command about this instance."""
        return run(*words, "--data-dir", str(self.data_dir), cwd=self.folder, env=self.environ)

    def ps(self) -> list[dict[str, Any]]:
        """The processes, as programs see them; none when nothing runs."""
        return listed("--data-dir", str(self.data_dir))

    def pids(self) -> dict[str, int]:
        """Process ids by name, once every process is ready; one that a test has stopped is silent."""
        found = eventually(
            lambda: (rows := self.ps()) and all(row["state"] in ("ready", "silent") for row in rows) and rows
        )
        assert isinstance(found, list)
        return {row["id"]: row["pid"] for row in found}

    def state_of(self, job_id: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port_of(self)}/v1/jobs/{job_id}") as answer:
            return str(json.load(answer)["status"])

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
            self.process.wait(timeout=60)
        assert self.process.stdout is not None
        self.process.stdout.close()


def path() -> str:
    """Where the packages are, for processes that start in another folder."""
    return os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])


def penstock() -> list[str]:
    return [sys.executable, "-m", "cli"]


def run(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """One command, to its end."""
    return subprocess.run([*penstock(), *words], check=False, capture_output=True, text=True, **options)


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
    """An instance for tests that only look."""
    up = Up(tmp_path_factory.mktemp("shared"), "--model", "toy").ready()
    yield up
    up.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Start instances one after the other in the same folder."""
    started: list[Up] = []

    def begin(*options: str, **environ: str) -> Up:
        started.append(Up(tmp_path, *options, **environ))
        return started[-1]

    yield begin
    for up in started:
        up.close()


# --- looking ---------------------------------------------------------------------------------------------------------


def test_ready_block(shared: Up) -> None:
    """Golden but for numbers, folders and the secret; nothing of a library is on the screen."""
    shapes = [
        r"ready in \d+\.\d s   engine sim   model toy   1 worker",
        r"  API      http://127\.0\.0\.1:\d+/v1",
        r"  Console  http://127\.0\.0\.1:\d+/console#link=[\w-]{22}",
        r"           \(logs you in once, within an hour; later: \S+ -m cli console --data-dir data\)",
        r"  Kept     data  \(queue and results survive a restart\)",
        r"  Log      data/logs",
        r"",
        r"  Try      curl -N http://127\.0\.0\.1:\d+/v1/chat/completions "
        r"-H 'Content-Type: application/json' -d '\{.*\}'",
        r"           \S+ -m cli chat --data-dir data \"What is a penstock\?\"",
        r"  Stop     Ctrl-C \(finishes running jobs, again to stop now\)",
    ]
    assert len(shared.block) == len(shapes)
    for line, shape in zip(shared.block, shapes, strict=True):
        assert re.fullmatch(shape, line), line
    phases = re.compile(r"penstock \S+|(redis|api|worker|scheduler|offline)-1: .+")
    assert all(phases.fullmatch(line) for line in shared.said().strip().split("\n"))


def test_the_lines_to_try_can_be_pasted(shared: Up) -> None:
    """What is shown works as it stands, in the shell that `up` was started from: `penstock` need not be on the PATH."""
    command = shared.block[7].removeprefix("  Try      ")
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("data: [DONE]")
    words = ["sh", "-c", shared.block[8].strip()]
    chat = subprocess.run(words, capture_output=True, text=True, check=True, cwd=shared.folder, env=shared.environ)
    assert len(chat.stdout.split()) > 10


def opened(link: str) -> int:
    """The status that a browser gets which opens a link to the console."""
    url, _, secret = link.partition("/console#link=")
    body, headers = json.dumps({"link": secret}).encode(), {"Content-Type": "application/json", "Origin": url}
    with (
        suppress(urllib.error.HTTPError) as _,
        urllib.request.urlopen(urllib.request.Request(f"{url}/console/session", body, headers)) as answer,
    ):
        return int(answer.status)
    return 401


LINK = re.compile(r"http://\S+/console#link=[\w-]{22}(?![\w-])")


def test_the_link_to_the_console_logs_in_once(tmp_path: Path) -> None:
    """At a terminal with no room for it, too: whole, as the lines to try are; neither a log nor the state has it. A
    terminal that knows no escapes gets none."""
    digest = hashlib.sha256(b"sk-ops").hexdigest()
    (tmp_path / "penstock.toml").write_text(f'[keys.ops]\nsha256 = "{digest}"\ntenant = "ops"\nadmin = true\n')
    statuses: list[int] = []

    def stop(seen: str) -> bool:
        if "  Stop" not in seen:
            return False
        (found,) = LINK.findall(seen)
        statuses.extend(map(opened, (found, found)))
        logs = "".join(log.read_text() for log in (tmp_path / ".penstock" / "logs").iterdir())
        assert found.partition("=")[2] not in logs
        assert found.partition("=")[2] not in (tmp_path / ".penstock" / "run" / "state.json").read_text()
        assert re.search(
            r"^curl -N http\S+ \\\n  -H '.*' \\\n  -H .* \\\n  -d '\{[^']*\}'$", seen.replace("\r", ""), re.MULTILINE
        )
        return True

    seen = on_terminal(tmp_path, stop, PENSTOCK_SIM_LOAD_MS="0", COLUMNS="40", TERM="dumb")
    assert statuses == [200, 401] and "\x1b" not in seen


def test_ps(shared: Up) -> None:
    """Of the folder: one object per line, in the order of the roles, with at least these fields, and every process
    lives. By --redis-url: the same, as they say of themselves. For people: the last line says whether it serves."""
    shared.pids()
    rows = shared.ps()
    assert [row["role"] for row in rows] == ROLES
    for row in rows:
        assert row.keys() >= {"role", "id", "pid", "state", "since"}
        assert row["state"] == "ready"
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", row["since"])
        assert alive(row["pid"])
    state = json.loads((shared.data_dir / "run" / "state.json").read_text())
    assert [row["role"] for row in listed("--redis-url", state["redis_url"])] == ROLES[1:]
    done = shared.run("ps")
    assert done.stdout.split()[:5] == ["ROLE", "ID", "PID", "STATE", "SINCE"]
    assert done.stderr.startswith("ready at http://127.0.0.1:")


def test_chat_submit_and_jobs(shared: Up) -> None:
    """An answer, the same answer from the queue, and the job it was."""
    said = shared.run("chat", "hello", "--max-tokens", TOKENS)
    assert said.returncode == 0
    assert len(said.stdout.split()) == int(TOKENS)
    waited = shared.run("submit", "hello", "--wait", "--max-tokens", TOKENS)
    followed = shared.run("submit", "hello", "--follow", "--max-tokens", TOKENS)
    assert said.stdout == waited.stdout == followed.stdout
    job_id = shared.run("submit", "hello", "--max-tokens", TOKENS, "--priority", "batch").stdout.strip()
    assert shared.run("jobs", "events", job_id).stdout == said.stdout
    assert shared.run("jobs", "result", job_id).stdout == said.stdout
    job = json.loads(shared.run("jobs", "show", job_id, "--json").stdout)
    assert (job["status"], job["priority"]) == ("completed", "batch")
    listed = shared.run("jobs", "ls", "--status", "completed", "--json", "--limit", "1").stdout.strip().split("\n")
    assert [json.loads(line)["id"] for line in listed] == [job_id]


def test_taken_port(shared: Up, tmp_path: Path) -> None:
    """By whom it is taken and which one is free, in at most four lines and without a traceback."""
    port = shared.block[1].split(":")[-1].removesuffix("/v1")
    done = run("up", "--engine", "sim", "--port", port, "--data-dir", str(tmp_path), env=shared.environ)
    assert done.returncode == 1
    error = done.stderr[done.stderr.index("error:") :].strip().split("\n")
    assert error[0] == f"error: port {port} is taken"
    assert f"pid {shared.process.pid}" in error[1]
    assert error[2].startswith("next:  penstock up ") and "--engine sim" in error[2]  # as typed
    assert len(error) <= 4


def test_doctor_knows_its_instance(shared: Up) -> None:
    """The port is ours and the embedded server keeps what it is given."""
    report = json.loads(shared.run("doctor", "--json").stdout)
    found = {check["name"]: check for check in report["checks"]}
    assert found["port"]["detail"].startswith("ours")
    assert found["redis"]["status"] == "ok"
    assert not any(name.startswith("redis ") for name in found)


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
    assert up.run("ps").returncode == 3


def test_down_says_what_it_waits_for_and_an_interrupt_loses_nothing(start: Any) -> None:
    """`down` counts the running jobs, as the terminal of `up` does; a signal to `up` ends the wait. A long job is then
    still there, and finished in the next life."""
    up = start("--sim-step-ms", "500", PENSTOCK_REDIS_LEASE_MS="1000").ready()
    job_id = up.run("submit", "hello", "--max-tokens", "200").stdout.strip()
    eventually(lambda: up.state_of(job_id) == "in_progress")
    command = [*penstock(), "down", "--data-dir", str(up.data_dir)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=up.environ, text=True) as down:
        assert down.stderr is not None
        assert [down.stderr.readline() for _ in range(2)] == ["draining\n", "draining: 1 job to finish\n"]
        assert "draining 1 job, Ctrl-C again to stop now" in up.said()
        up.process.send_signal(signal.SIGINT)
        assert down.wait(60) == 0
    assert up.end() == 130
    again = start("--sim-step-ms", "20", PENSTOCK_REDIS_LEASE_MS="1000").ready()
    done = again.run("jobs", "events", job_id)
    assert done.returncode == 0
    assert len(again.run("jobs", "result", job_id).stdout.split()) == 200
    a_running_job_is_finished_first(again)


def a_running_job_is_finished_first(up: Up) -> None:
    """Ctrl-C during an answer: the answer comes to its end, then everything stops."""
    chat = subprocess.Popen(
        [*penstock(), "chat", "hello", "--max-tokens", "100", "--data-dir", str(up.data_dir)],
        stdout=subprocess.PIPE,
        env=up.environ,
        text=True,
    )
    assert chat.stdout is not None
    first = chat.stdout.read(1)
    up.process.send_signal(signal.SIGINT)
    answer = first + chat.stdout.read()
    assert chat.wait() == 0
    assert len(answer.split()) == 100
    assert up.end() == 0
    assert "draining 1 job," in up.said()
    chat.stdout.close()


def test_killed_up_leaves_no_process(start: Any) -> None:
    """SIGKILL of the parent: every child ends by itself, and the next start is not in the way of the last. It has -v,
    which puts what the processes log on stderr, each line under its name; Ctrl-C ends it as SIGTERM does."""
    up = start().ready()
    pids = up.pids()
    up.process.kill()
    up.end()
    eventually(lambda: not any(map(alive, pids.values())))
    assert up.run("ps").returncode == 3
    again = start("-v").ready()
    assert again.pids().keys() == pids.keys()
    eventually(lambda: "worker-1: ready" in again.said())
    ends_cleanly(again, signal.SIGINT)


def test_killed_children_come_back(start: Any) -> None:
    """SIGKILL of each role in turn: another process takes its place, and answers go on. A store that hangs is told, and
    that it answers again. After all that it ends cleanly."""
    up = start().ready()
    before = up.pids()
    for name in ("worker-1", "scheduler-1", "api-1", "redis-1"):
        os.kill(before[name], signal.SIGKILL)
        eventually(lambda name=name: up.pids()[name] != before[name])
        said = eventually(lambda: (done := up.run("chat", "hello", "--max-tokens", TOKENS)).returncode == 0 and done)
        assert isinstance(said, subprocess.CompletedProcess)
        assert len(said.stdout.split()) == int(TOKENS)
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


LONG_LEASE = {"PENSTOCK_REDIS_LEASE_MS": "600000"}
"""Longer than any test may take: what waits for the lease to lapse fails it."""


def port_of(up: Up) -> int:
    return int(up.block[1].split(":")[-1].removesuffix("/v1"))


async def streaming(up: Up, tokens: int = 150) -> tuple[Reader, asyncio.Task[None]]:
    """A chat that some tokens have come of."""
    reader = Reader("hello", tokens)
    task = asyncio.create_task(reader.chat(port_of(up)))
    while len(reader.came) < 5:
        assert not task.done(), reader
        await asyncio.sleep(0.01)
    return reader, task


def at_work(up: Up) -> list[str]:
    """The workers that run a job, as they said last."""
    state = json.loads((up.data_dir / "run" / "state.json").read_text())
    return [str(row["id"]) for row in listed("--redis-url", state["redis_url"]) if row["running"]]


def holder(up: Up) -> str:
    """The worker that runs a job, where none ran one before."""
    found = eventually(lambda: at_work(up))
    assert isinstance(found, list)
    return str(found[0])


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_killed_workers_jobs_wait_for_no_lease(start: Any, workers: int) -> None:
    """The stream goes on with each token once, by the worker's restart or by another worker; the loss is counted. But
    SIGSTOP is no death: while the other worker is killed and comes back, nobody takes the stopped one's job."""
    up = start("--model", MODEL, "--workers", f"{workers}", "--sim-step-ms", "20", **LONG_LEASE).ready()
    pids = up.pids()
    reader, task = await streaming(up)
    os.kill(pids[await asyncio.to_thread(holder, up)], signal.SIGKILL)
    async with asyncio.timeout(120):
        await task
    assert reader.is_exact and reader.ended == "completed" and reader.resets == 0
    words = r"is ready again after \d+\.\d s; 1 job continued"
    await asyncio.to_thread(eventually, lambda: re.search(words, up.said()))
    page = http.client.HTTPConnection("127.0.0.1", port_of(up), timeout=60)
    page.request("GET", "/metrics")
    counted = page.getresponse().read().decode()
    page.close()
    assert "penstock_lapsed_workers_total 1.0" in counted and "penstock_lease_reclaims_total 1.0" in counted
    if workers == 2:
        await a_stopped_worker_keeps_its_lease(up)


async def a_stopped_worker_keeps_its_lease(up: Up) -> None:
    pids = await asyncio.to_thread(up.pids)
    await asyncio.to_thread(eventually, lambda: not at_work(up))  # else the one of before seems to hold the next job
    reader, task = await streaming(up)
    stopped = await asyncio.to_thread(holder, up)
    (other,) = {"worker-1", "worker-2"} - {stopped}
    os.kill(pids[stopped], signal.SIGSTOP)
    try:
        os.kill(pids[other], signal.SIGKILL)
        await asyncio.to_thread(eventually, lambda: up.pids()[other] != pids[other])
        job = json.loads(up.run("jobs", "ls", "--json").stdout.splitlines()[0])  # the newest
        assert (job["status"], job["attempts"]) == ("in_progress", 1)
    finally:
        os.kill(pids[stopped], signal.SIGCONT)
    async with asyncio.timeout(120):
        await task
    assert reader.is_exact and reader.resets == 0
    assert json.loads(up.run("jobs", "show", job["id"], "--json").stdout)["attempts"] == 1


# --- other ways to start ---------------------------------------------------------------------------------------------


def test_model_that_cannot_be_loaded_ends_it(start: Any, tmp_path: Path) -> None:
    """A model file that only begins as one: tried, told once with its cause, exit 1, nothing left."""
    (tmp_path / "broken.gguf").write_text("GGUF, no model")
    up = start("--engine", "llamacpp", PENSTOCK_LLAMACPP_PATH=str(tmp_path / "broken.gguf"))
    assert up.end() == 1
    said = up.said()
    assert said.count("error:") == 1
    assert "broken.gguf" in said
    assert "next:  penstock doctor" in said
    assert not (up.data_dir / "run").exists()


def test_the_admin_commands_work_without_any_setting(shared: Up) -> None:
    """They send the token of the data folder by themselves; others of this machine do not get in."""
    token, state = shared.data_dir / "run" / "admin-token", shared.data_dir / "run" / "state.json"
    assert token.stat().st_mode & 0o777 == 0o600 and len(token.read_text()) >= 43
    for words in (("scale", "status"), ("scale", "log"), ("scale", "resume", "toy"), ("dlq", "ls"), ("webhooks", "ls")):
        code, errors = said_here(*words, "--data-dir", str(shared.data_dir))[1:]
        assert code == 0, (words, errors)
    url = json.loads(state.read_text())["url"]
    elsewhere = {**shared.environ, "PENSTOCK_DATA_DIR": str(shared.data_dir)}
    assert run("dlq", "ls", "--url", url, env=elsewhere, cwd=shared.folder).returncode == 0
    other_key = {**elsewhere, "PENSTOCK_API_KEY": "sk-of-some-other-server"}
    assert run("dlq", "ls", env=other_key, cwd=shared.folder).returncode == 0
    stranger = {name: value for name, value in elsewhere.items() if name != "PENSTOCK_DATA_DIR"}
    refused = run("dlq", "ls", "--url", url, env=stranger, cwd=shared.folder)
    assert refused.returncode == 4 and "--data-dir" in refused.stderr
    by_hand = stranger | {"PENSTOCK_API_KEY": token.read_text()}
    assert run("dlq", "ls", "--url", url, env=by_hand, cwd=shared.folder).returncode == 0


def test_the_admin_token_is_told_to_nobody(shared: Up) -> None:
    """Processes are given its hash, in a file that their owner alone may read: neither is in an argv or a log."""
    token = (shared.data_dir / "run" / "admin-token").read_text()
    known = hashlib.sha256(token.encode()).hexdigest()
    settings = (shared.data_dir / "run" / "settings.json").read_text()
    assert known in settings and token not in settings
    for pid in shared.pids().values():
        for what in ("cmdline", "environ"):
            said = Path(f"/proc/{pid}/{what}").read_bytes().decode(errors="replace")
            assert token not in said and known not in said
    for log in (shared.data_dir / "logs").iterdir():
        assert token not in (text := log.read_text()) and known not in text, log


def test_no_workers(start: Any) -> None:
    """--workers 0 starts none, and is ready without."""
    up = start("--workers", "0").ready()
    assert "0 workers" in up.block[0]
    assert [row["role"] for row in up.ps()] == ["redis", "api", "scheduler", "offline"]


def test_several_api_processes_and_a_redis_of_ones_own(start: Any, redis_url: str) -> None:
    """They share the port; a configured Redis is used and not supervised."""
    up = start("--api-processes", "2", PENSTOCK_REDIS_URL=redis_url).ready()
    assert sorted(up.pids()) == ["api-1", "api-2", "offline-1", "scheduler-1", "worker-1"]
    assert any("in Redis at 127.0.0.1:" in line for line in up.block)
    assert up.run("chat", "hello", "--max-tokens", TOKENS).returncode == 0


def test_pool_follows_the_backlog(start: Any, tmp_path: Path) -> None:
    """More waiting jobs than the workers there are should bear: another one is started, up to the most."""
    (tmp_path / "penstock.toml").write_text(TWO_WORKERS)
    up = start().ready()
    url = json.loads((up.data_dir / "run" / "state.json").read_text())["url"]
    job = {"model": "toy", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 100}
    for _ in range(6):
        asked = urllib.request.Request(f"{url}/v1/jobs", json.dumps(job).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked) as answer:
            assert answer.status == 202
    eventually(lambda: sum(row["role"] == "worker" for row in up.ps()) == 2)
    up.process.send_signal(signal.SIGINT)
    eventually(lambda: "again to stop now" in up.said())
    up.process.send_signal(signal.SIGINT)
    up.end()


def test_detach_and_down(tmp_path: Path) -> None:
    """It returns when ready; `down` drains it and returns when it has ended."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    here: dict[str, Any] = {"cwd": tmp_path, "env": environ | {"PYTHONPATH": path()}}
    done = run("up", "--engine", "sim", "--port", "0", "--detach", **here)
    try:
        assert done.returncode == 0, done.stderr
        assert done.stdout.rstrip().endswith("-m cli down")
        (link,) = LINK.findall(done.stdout)
        assert link.partition("=")[2] not in (tmp_path / ".penstock" / "logs" / "up.out").read_text()
        assert [opened(link) for _ in range(2)] == [200, 401]
        again = run("up", "--engine", "sim", "--port", "0", "--detach", **here)
        assert again.returncode == 1
        assert "already running" in again.stderr
    finally:  # a detached instance outlives this test otherwise
        down = run("down", **here)
    assert down.returncode == 0
    assert run("ps", **here).returncode == 3
    assert not (tmp_path / ".penstock" / "run").exists()


def test_a_start_shows_phases_with_seconds_and_can_be_interrupted(tmp_path: Path) -> None:
    """On a terminal every silence has a named phase and a clock. After Ctrl-C everything that was started ends, without
    waiting for what it was loading."""
    pattern, pids = re.compile(r"worker-1: \w.*weights.*  [1-9]\.\d s"), list[int]()

    def shown(seen: str) -> bool:
        if not pattern.search(seen):
            return False
        pids.extend(row["pid"] for row in listed("--data-dir", str(tmp_path / ".penstock")) if row["pid"])
        return True

    seen = on_terminal(tmp_path, shown, TERM="xterm", NO_COLOR="1")
    assert pattern.search(seen), seen
    assert len(pids) >= 3 and not any(map(alive, pids))


def on_terminal(folder: Path, until: Callable[[str], bool], **environ: str) -> str:
    """What a person sees of a start, by default a very slow one, ended by Ctrl-C once they have seen enough."""
    words, columns = ["-m", "cli", "up", "--engine", "sim", "--port", "0"], int(environ.pop("COLUMNS", "80"))
    given = {"PENSTOCK_SIM_LOAD_MS": "100000", "PYTHONPATH": path(), "FORCE_COLOR": ""} | environ
    with OnTerminal(words, folder, columns=columns, environ=given) as screen:
        screen.until(until)
        screen.interrupt()
        assert screen.end() == 0
    return screen.seen


def test_redis_that_never_answers_ends_the_start(start: Any) -> None:
    """Here one in the background. After a bounded wait, which it shows, with the fix, said once."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    up = start("--detach", "--redis-url", f"redis://127.0.0.1:{port}/0")
    eventually(lambda: f"waiting for Redis at 127.0.0.1:{port}, at most 10 s" in up.said())
    assert "starting: waiting for Redis" in said_here("ps", "--data-dir", str(up.data_dir))[2]
    assert up.end() == 3
    assert up.said().count("error: ") == 1
    assert f"error: no Redis can be used at 127.0.0.1:{port}\ncause: Redis does not answer" in up.said()
    assert "next:  start it, or correct redis.url (set by " in up.said()
    assert not (up.data_dir / "run").exists()
    said = [json.loads(line)["message"] for line in up.run("logs", "--role", "up").stdout.splitlines()]
    assert said[0] == START % __version__
    assert said[-1].startswith(f"penstock up ends: no Redis can be used at 127.0.0.1:{port}; Redis does not answer")


def test_ctrl_c_ends_the_wait_for_redis(start: Any) -> None:
    """At once, and cleanly."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    up = start("--redis-url", f"redis://127.0.0.1:{port}/0")
    eventually(lambda: "waiting for Redis" in up.said())
    up.process.send_signal(signal.SIGINT)
    assert up.end() == 0 and "error: " not in up.said()


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


def holding(folder: Path, secret: str) -> set[str]:
    """Names of the files in a folder that hold a secret."""
    return {path.name for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()}


def test_no_password_is_on_a_command_line(shared: Up) -> None:
    """Every user of a machine can read those. Logs have none either, and what has it is for the owner alone."""
    url = json.loads((shared.data_dir / "run" / "state.json").read_text())["redis_url"]
    password = url.split(":")[2].split("@")[0]
    lines = family(shared.process.pid)
    assert set(shared.pids().values()) < set(lines) and len(password) > 16
    assert [line for line in lines.values() if password.encode() in line] == []
    assert holding(shared.data_dir, password) == {"valkey.conf", "settings.json", "state.json"}
    for name in ("redis/valkey.conf", "run/settings.json", "run/state.json"):
        assert (shared.data_dir / name).stat().st_mode & 0o077 == 0
    assert shared.data_dir.stat().st_mode & 0o077 == 0


def test_a_typed_password_is_not_passed_on(tmp_path: Path, redis_url: str) -> None:
    """Whoever types one is told who sees it; the processes that stay have it from their settings."""
    with Redis.from_url(redis_url) as admin:
        admin.execute_command("ACL", "SETUSER", "typed", "on", ">canary-password", "~*", "&*", "+@all")
        try:
            url = redis_url.replace("redis://", "redis://typed:canary-password@")
            where = ["--data-dir", str(tmp_path / "data")]
            environ = {**os.environ, "PYTHONPATH": path()}
            words = ["up", "--detach", "--engine", "sim", "--port", "0", "--redis-url", url, *where]
            done = run(*words, env=environ, cwd=tmp_path)
            try:
                assert done.returncode == 0, done.stderr
                assert "every user of this machine can read the password" in done.stderr
                assert "canary-password" not in done.stdout + done.stderr
                state = json.loads((tmp_path / "data" / "run" / "state.json").read_text())
                lines = family(state["pid"])
                assert state["redis_url"] == url and len(lines) >= len(ROLES)
                assert [line for line in lines.values() if b"canary-password" in line] == []
                assert holding(tmp_path / "data", "canary-password") == {"settings.json", "state.json"}
            finally:
                run("down", "--now", *where, env=environ, cwd=tmp_path)
        finally:
            admin.execute_command("ACL", "DELUSER", "typed")


def test_a_crash_loop_names_the_job_and_its_dead_letter(tmp_path: Path) -> None:
    """By the screen, by the doctor, and in the log of that job: from its request to the end of its third worker."""
    up = Up(tmp_path, PENSTOCK_SIM_FAULTS="true", PENSTOCK_REDIS_LEASE_MS="1000").ready()
    try:
        job = up.run("submit", "[[crash@3]]").stdout.strip()
        eventually(lambda: up.state_of(job) == "failed")
        named = f"worker-1 died running {job}, which is a dead letter now\ncause: killed by SIGKILL ("
        show = f"penstock dlq show --data-dir {up.data_dir} {job}"
        eventually(lambda: named in up.said())
        assert f"next:  {show}; its log is" in up.said()
        found = up.run("doctor").stdout
        assert f"job: worker-1 died 3 times running job {job}, which was given up\n      {show}" in found
        assert job in up.run("dlq", "show", job).stdout
        lines = [json.loads(line) for line in up.run("logs", "--job", job).stdout.splitlines()]
        kinds = {"worker": ["jobs claimed", "a job is continued", "a job runs alone"], "api": ["request"]}
        for role, messages in kinds.items():
            said = [line["message"] for line in lines if line["service"] == role]
            assert all(any(each.startswith(message) for each in said) for message in messages), (role, said)
        assert [line["worker"] for line in lines if "is given up" in line["message"]] == [
            f"worker-1@{socket.gethostname()}"
        ]
        assert "crash@3" not in "".join(path.read_text() for path in (up.data_dir / "logs").iterdir())
    finally:
        up.close()
