"""Systems that are compared: workers that run one-token jobs, and the command whose callers put them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from bench.environments import ROOT, Environment, Installable, Ready, Say
from bench.jobs.callers import BEGIN, END, CallerPlan
from bench.penstock import Penstock
from bench.processes import Processes

MANY = 1_000_000

SPARE_S = 60.0
"""For a client to start, beyond its plan."""


class ClientFailed(RuntimeError):
    """The callers' process came to grief."""


@dataclass(frozen=True, slots=True)
class ServingJobs:
    """A system that is ready. `client` takes the words of a Plan."""

    processes: Processes
    client: Sequence[str | Path]
    url: str
    environ: Mapping[str, str] = field(default_factory=dict)


class JobsReading(msgspec.Struct, frozen=True, kw_only=True):
    """What a client told, and what the other processes cost meanwhile."""

    jobs: int
    seconds: float
    wrong: list[str]
    p50_ms: float | None
    p99_ms: float | None
    client_cpu_s: float
    cpu: dict[str, float] = {}
    """CPU seconds of each process but the client."""


class JobsSystem(Installable, Protocol):
    """One of those compared."""

    @property
    def most_callers(self) -> int:
        """With more it does less."""

    def serve(self, folder: Path, redis_url: str) -> AbstractContextManager[ServingJobs]:
        """Ready inside the `with`; every process has ended behind it. Raises Died."""


@dataclass(frozen=True)
class PenstockJobs(Ready):
    """Penstock through HTTP; the form of its callers' requests is bench.jobs.frontend's."""

    name: str
    title: str
    form: str
    apis: int
    most_callers: int = MANY

    @contextmanager
    def serve(self, folder: Path, redis_url: str) -> Iterator[ServingJobs]:
        settings = {"sim.step_ms": 0, "sim.prefill_ms": 0, "telemetry.metrics_dir": folder / "metrics"}
        (folder / "metrics").mkdir()
        with Penstock(folder, apis=self.apis, redis_url=redis_url, settings=settings) as penstock:
            yield ServingJobs(
                penstock.processes, [sys.executable, "-m", "bench.jobs.frontend", self.form], penstock.url
            )


@dataclass(frozen=True)
class PeerQueue:
    """A task queue of other people's, at the settings that suit this work best."""

    name: str
    title: str
    environment: Environment
    worker: Sequence[str]
    """Words behind its Python; `{url}` stands for Redis."""
    client: str
    """Module of its callers."""
    workers: int = 1
    most_callers: int = MANY
    environ: Mapping[str, str] = field(default_factory=dict)

    def prepare(self, say: Say) -> None:
        self.environment.prepare(say)

    @contextmanager
    def serve(self, folder: Path, redis_url: str) -> Iterator[ServingJobs]:
        python = self.environment.prepare(lambda _: None)
        environ = {"PYTHONPATH": str(ROOT), "BENCH_REDIS_URL": redis_url, "TZ": "UTC", **self.environ}
        with Processes(folder) as processes:
            for number in range(1, self.workers + 1):
                words = [word.format(url=redis_url) for word in self.worker]
                processes.start(f"worker-{number}", [python, *words], environ)
            yield ServingJobs(processes, [python, "-m", self.client], redis_url, environ)


def measure(serving: ServingJobs, store: Processes, plan: CallerPlan) -> JobsReading:
    """Let the callers work. Raises ClientFailed, Died."""
    argv = [str(word) for word in (*serving.client, *plan.words)]
    environ = {**serving.processes.environ, **serving.environ}
    with (
        (serving.processes.folder / "client.log").open("ab") as log,
        subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, env=environ, cwd=serving.processes.folder) as client,
    ):
        limit = threading.Timer(plan.warmup_s + plan.seconds + SPARE_S, client.kill)
        limit.start()
        try:
            before = _cost_at(BEGIN, client, serving, store)
            after = _cost_at(END, client, serving, store)
            told = json.loads(_line(client, serving))
        finally:
            limit.cancel()
            client.kill()
    serving.processes.check()
    if not told["jobs"]:
        raise ClientFailed(f"not one job was answered: {told['wrong']}")
    return msgspec.convert({**told, "cpu": {name: after[name] - before[name] for name in after}}, JobsReading)


def _cost_at(mark: str, client: subprocess.Popen[bytes], serving: ServingJobs, store: Processes) -> dict[str, float]:
    line = _line(client, serving)
    if line != mark:
        raise ClientFailed(f"the callers said {line[:200]!r}, not {mark!r}")
    return {**store.cpu_s(), **serving.processes.cpu_s()}


def _line(client: subprocess.Popen[bytes], serving: ServingJobs) -> str:
    assert client.stdout is not None
    line = client.stdout.readline().decode(errors="replace").strip()
    if not line:
        said = (serving.processes.folder / "client.log").read_bytes()[-2000:].decode(errors="replace").strip()
        raise ClientFailed(f"the callers ended without a word: {said}")
    return line


CHAT, STREAM, JOBS = "penstock", "penstock-stream", "penstock-jobs"

CELERY = Environment(
    name="celery",
    packages=("celery==5.7.0", "redis[hiredis]==8.1.0", "gevent==26.9.0", "packaging==26.3"),
)
ARQ = Environment(name="arq", packages=("arq==0.28.0", "redis[hiredis]==5.3.1", "uvloop==0.23.0"))
TASKIQ = Environment(
    name="taskiq",
    packages=("taskiq==0.13.0", "taskiq-redis==1.2.4", "redis[hiredis]==8.1.0", "uvloop==0.23.0"),
)
TASKIQ_OPTIONS = ("--workers", "1", "--max-async-tasks", "256", "--log-level", "WARNING")


def systems(cores: int) -> list[JobsSystem]:
    """All of them; those that can use several processes get one per core."""
    return [
        PenstockJobs(CHAT, f"Penstock, a chat answered in one piece, {cores} API processes, 1 worker", "chat", cores),
        PenstockJobs(STREAM, f"Penstock, a chat streamed, {cores} API processes, 1 worker", "stream", cores),
        PenstockJobs(JOBS, f"Penstock, POST /v1/jobs?wait, {cores} API processes, 1 worker", "jobs", cores),
        _celery("celery-prefork", f"Celery, {cores} prefork processes", "prefork", cores),
        _celery("celery-threads", "Celery, 8 threads", "threads", 8),
        PeerQueue(
            "arq",
            f"arq, {cores} workers of 256 jobs; results polled for every 200 ms",
            ARQ,
            ("-m", "bench.jobs.peers.arq_worker", "{url}"),
            "bench.jobs.peers.arq_client",
            workers=cores,
            environ={"BENCH_POLL_S": "0.2"},
        ),
        PeerQueue(
            "taskiq",
            "taskiq on a Redis list, 1 worker process of 256 tasks; results polled for every 50 ms",
            TASKIQ,
            ("-m", "taskiq", "worker", "bench.jobs.peers.taskiq_app:broker", *TASKIQ_OPTIONS),
            "bench.jobs.peers.taskiq_client",
            environ={"BENCH_POLL_S": "0.05"},
        ),
    ]


def _celery(name: str, title: str, pool: str, concurrency: int) -> PeerQueue:
    options = ("--pool", pool, "--concurrency", str(concurrency), "--loglevel", "WARNING")
    lean = ("--without-gossip", "--without-mingle", "--without-heartbeat")
    words = ("-m", "celery", "-A", "bench.jobs.peers.celery_app", "worker", *options, *lean)
    return PeerQueue(name, f"{title}, 64 callers", CELERY, words, "bench.jobs.peers.celery_client", most_callers=64)
