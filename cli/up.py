"""`penstock up`: starts and supervises the processes of one machine, also in the background, and says what happens.

They are Redis, API, workers, scheduler and the offline process; they are started in order, and drained."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from api.auth.console import ConsoleAccess, link_path
from api.auth.keys import Keyring, check_exposure, check_keyless, issuer_of
from api.settings import ApiSettings, OidcSettings
from api.tls import Certificate
from cli.deployment import (
    Deployment,
    check_plugins,
    environment,
    listening,
    load_deployment,
    saved_deployment,
    with_upstream,
)
from cli.embedded import machine_memory, start_embedded
from cli.instance import WILDCARDS, DataDir, Instance, UpSettings, problem_of, url_of
from cli.options import Command, completed, config_option, own_command, short_path, warn_of_password
from cli.output import ERROR_INDENT, Exit, Problem, ProgressLine, error_block, note, write_or_drop
from cli.registry import connected, place, unreachable
from cli.supervisor import Child, LeaseRelease, PoolSupervisor, Supervisor, follow
from penstock import __version__
from penstock.config import ENGINES, FLAGS, ConfigError
from penstock.files import open_private
from penstock.text import counted
from streaming.errors import Loading, Unavailable
from streaming.fleet.plans import Plans
from streaming.fleet.processes import ConsoleSessions, Fleet
from streaming.jobs.reaper import Reaper
from streaming.jobs.waiting import Backlog
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings
from streaming.store.identity import enter_store
from telemetry import logs
from telemetry.metrics import Metrics
from workers.engines.registry import is_plugin

MIN_CRASHES = 3
"""Consecutive failures after which a process counts as crash-looping."""
QUESTION = "What is a penstock?"


class Screen:
    """Prints the lines of one `up`, and logs every event, repeated ones included."""

    def __init__(self, progress: ProgressLine) -> None:
        self.progress = progress
        self._looping: set[str] = set()
        """Processes that were reported to be crash-looping, until they are ready."""
        self._lost_at: dict[str, float] = {}
        """Since when (monotonic) each process is not there, or what it waits for."""

    def noticed(self, child: Child, *, starting: bool) -> None:
        """Report a process that exited by itself, once that it keeps doing so, and that it is back; and a worker whose
        servers are away. While everything is `starting`, a crash loop may end `up`, which then reports it."""
        status, name = child.status, child.program.id
        if status.state == "restarting" and status.pid is None:
            log.warning("%s ended (%s), failure %d", name, status.cause, status.failures)
            self._lost_at.setdefault(name, time.monotonic())
            if status.failures == 1 or not (looping(child) or status.failed_starts):
                self.say_when(f"{name} ended ({status.cause}); starting it again")
            elif looping(child) and not starting and name not in self._looping:
                self._looping.add(name)
                self.progress.say(completed("\n".join(error_block(crash_loop(child)))), ERROR_INDENT)
        elif status.state == "ready":
            self._looping.discard(name)
            self.waits(f"the server of {name}", status.away)
            if name in self._lost_at:
                self._say_back(name, "is ready again")

    def waits(self, what: str, why: str) -> None:
        """Report that something which processes wait for is away, and that it is back (`why`: "")."""
        if why and what not in self._lost_at:
            self._lost_at[what] = time.monotonic()
            log.warning("%s is away: %s", what, why)
            self.say_when(f"{what} is away ({why}); accepted jobs wait")
        elif not why and what in self._lost_at:
            self._say_back(what, "is back")

    def _say_back(self, what: str, how: str) -> None:
        words = f"{what} {how} after {time.monotonic() - self._lost_at.pop(what):.1f} s"
        log.info("%s", words)
        self.say_when(words)

    def say_when(self, text: str) -> None:
        """Print a line with the time."""
        self.progress.say(f"{time.strftime('%H:%M:%S')} {text}")


def looping(child: Child) -> bool:
    """Whether a process is crash-looping."""
    return child.status.failures >= MIN_CRASHES


def crash_loop(child: Child) -> Problem:
    """The error for a crash-looping process."""
    program, status = child.program, child.status
    next_step, starts = f"penstock doctor; its log is {program.log}", status.failed_starts
    said = f"did not start {starts} times in a row" if starts > 1 else f"ended {status.failures} times in a row"
    return Problem(f"{program.id} {said}", cause=status.cause, next_step=next_step, code="crash_loop")


def show_ready(instance: Instance, console_path: str, *, detached: bool = False, keyed: bool = False) -> None:
    """Print the ready block to stdout, with the next commands last; what is to be copied is one line.

    Args:
        console_path: at which the console logs its reader in; "": none.
        keyed: whether a request needs a key.
    """
    if not sys.stdout.isatty() and not stat.S_ISFIFO(os.fstat(sys.stdout.fileno()).st_mode):
        console_path = ""  # a log, which others may read
    command, here = own_command(), Path(instance.data_dir)
    workers = sum(entry.role == "worker" for entry in instance.processes)
    option = "" if here == UpSettings().data_dir.absolute() else f" --data-dir {shlex.quote(short_path(here))}"
    hint = "logs you in once, within an hour; later" if console_path else "logged in"
    kept = f"in Redis at {place(instance.redis_url)}"
    if any(entry.role == "redis" for entry in instance.processes):
        kept = f"{short_path(here)}  (queue and results survive a restart)"
    body = {"model": instance.models[0], "stream": True, "messages": [{"role": "user", "content": QUESTION}]}
    key = ' -H "Authorization: Bearer $PENSTOCK_API_KEY"' if keyed else ""
    stop = f"{command} down{option}" if detached else "Ctrl-C (finishes running jobs, again to stop now)"
    trust = f" --cacert {shlex.quote(short_path(Path(instance.certificate)))}" if instance.certificate else ""
    curl = f"curl -N{trust} {instance.url}/v1/chat/completions -H 'Content-Type: application/json'{key}"
    outside = f"  API      {instance.outside_url}/v1 (other machines)\n" if instance.outside_url else ""
    write_or_drop(
        sys.stdout,
        f"ready in {instance.ready_s:.1f} s   engine {instance.engine}   model {', '.join(instance.models)}   "
        f"{counted(workers, 'worker')}{'' if workers else ': nothing answers until one starts'}\n"
        f"  API      {instance.url}/v1\n{outside}"
        f"  Console  {instance.url}{console_path or '/console'}\n"
        f"           ({hint}: {command} console{option})\n"
        f"  Kept     {kept}\n"
        f"  Log      {short_path(here / 'logs')}\n\n"
        f"  Try      {curl} -d {shlex.quote(json.dumps(body, separators=(',', ':')))}\n"
        f'           {command} chat{option} "{QUESTION}"\n'
        f"  Stop     {stop}\n",
    )


def phase_of(children: list[Child]) -> str:
    """What `up` waits for, or "": a process that reports a phase, else the first that is not ready."""
    waiting = [child for child in children if child.status.state in ("starting", "restarting")]
    if not waiting:
        return ""
    child = next((child for child in waiting if child.status.detail), waiting[0])
    if child.status.state == "restarting":
        return f"{child.program.id}: waiting to start it again"
    return f"{child.program.id}: {child.status.detail or 'starting'}"


ANSWER_TIMEOUT_S = 10.0
ANSWER_RETRY_DELAY_S = 0.25
COUNT_TIMEOUT_S = 0.5
RELEASE_TIMEOUT_S = 1.0
"""At the end: for the leases of workers that had to be killed."""
DRAINED_FIRST = ("api", "worker", "scheduler", "offline")
"""Roles that are drained together, before Redis."""


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
        self._lease_release: LeaseRelease | None = None
        self._closing = contextlib.AsyncExitStack()
        self._began = 0.0
        self._interrupts = 0
        self._instance = Instance(
            version=__version__,
            pid=os.getpid(),
            state="starting",
            phase="starting",
            url=url_of(WILDCARDS.get(deployment.api.host, deployment.api.host), self._port, deployment.api.scheme),
            certificate=str(deployment.api.tls_certificate.absolute()) if deployment.api.tls_certificate else "",
            outside_url=outside_url(deployment.api, self._port),
            redis_url=deployment.redis_url or "",
            data_dir=str(home.path),
            engine=deployment.engines,
            models=deployment.model_names,
            started=time.time(),
        )

    def publish_phase(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Show and publish what is done before the first process starts: `ps` shows it then, and `down` can end it."""
        if total:
            self._screen.progress.amount(phase, done, total)
        if phase != self._instance.phase:
            self._publish(phase=phase)

    async def run(self, weights: Path | None) -> int:
        """Start everything, run until stopped, and drain. Returns the exit code. Raises Problem if the start fails."""
        self._began = time.monotonic()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores it
                loop.add_signal_handler(number, self._interrupt)
        async with self._closing:
            try:
                await self._start(weights)
                await self._serve()
            finally:
                await self._stop()
        return Exit.DONE if self._interrupts < 2 else Exit.INTERRUPTED

    # --- up ----------------------------------------------------------------------------------------------------------

    async def _start(self, weights: Path | None) -> None:
        redis_url = self._deployment.redis_url or await self._start_redis()
        if self._interrupts:
            return
        try:
            redis = self._deployment.config.section("redis", RedisSettings, {"url": redis_url})
            self._store_client = RedisClient.open(redis)
        except ValueError as error:
            raise ConfigError("redis.url", str(error), "e.g. redis://127.0.0.1:6379/0") from None
        self._closing.push_async_callback(self._store_client.close)
        metrics = Metrics.start(str(self._home.metrics), "up")
        self._closing.callback(metrics.close)
        reaper, fleet = Reaper(self._store_client, metrics), Fleet(self._store_client)
        self._lease_release = LeaseRelease(reaper, fleet)
        await self._enter(self._store_client, redis_url)
        if self._interrupts:
            return
        deployment, home = self._deployment, self._home
        deployment.save(home, redis_url=redis_url, port=self._port, weights=weights)
        self._publish(redis_url=redis_url)
        for program in deployment.programs(home, self._listeners):
            self._supervisor.start(program)
        for name, shape, settings in deployment.pools:
            worker = partial(deployment.worker_program, home, model=name, shape=shape)
            self._pools.append(PoolSupervisor(self._supervisor, name, settings, worker, shape))
            self._pools[-1].fill()
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
                    what = f"no Redis can be used at {place(redis_url)}"
                    raise unreachable(what, error, self._deployment.config, None) from None
                self._publish(phase=f"waiting for Redis at {place(redis_url)}, at most {ANSWER_TIMEOUT_S:.0f} s")
            else:
                return
            await asyncio.sleep(ANSWER_RETRY_DELAY_S)

    async def _start_redis(self) -> str:
        memory = int(machine_memory() * self._deployment.up.redis_memory)
        embedded, child = await start_embedded(self._home, self._supervisor, memory)
        self._closing.callback(embedded.clean_up)
        self._closing.push_async_callback(self._supervisor.stop, "redis")
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
        self._screen.progress.phase("")
        show_ready(self._instance, await console_path(self._home), keyed=bool(self._deployment.keys))
        assert self._store_client is not None
        # The same after a crash, to get the same share.
        by = f"up@{socket.gethostname()}:{self._home.path}/{self._home.name()}"
        following = asyncio.create_task(follow(self._pools, Plans(self._store_client), by, self._note_store))
        rotating = asyncio.create_task(self._supervisor.keep_rotating())
        self._supervisor.guard(following)
        self._supervisor.guard(rotating)
        try:
            await self._supervisor.until(lambda: self._interrupts > 0)
        finally:
            following.cancel()
            rotating.cancel()

    def _note_store(self, why: str) -> None:
        """Called in each round: report that Redis is unavailable (`why`) or available again (""). The exit of an
        embedded one is reported as that of a process."""
        server = next(iter(self._supervisor.of("redis")), None)
        what = f"the store ({server.program.id})" if server else f"Redis at {place(self._instance.redis_url)}"
        if server is None or not why or server.status.state == "ready":
            self._screen.waits(what, why)

    def _changed(self, child: Child) -> None:
        if self._lease_release is not None and child.program.role == "worker":
            self._lease_release.noticed(child)
        self._screen.noticed(child, starting=self._instance.state == "starting")
        self._publish()

    def _publish(self, **changes: Any) -> None:
        """Write the state that other commands read, and show the phase."""
        children = list(self._supervisor.children.values())
        entries = tuple(child.status for child in children if child.status.state != "stopped")
        now = msgspec.structs.replace(self._instance, processes=entries, **changes)
        phase = phase_of(children) if now.state == "starting" and children else now.phase
        self._instance = msgspec.structs.replace(now, phase=phase)
        if now.state != "draining":
            self._screen.progress.phase(self._instance.phase)
        try:
            self._home.write(self._instance)
        except OSError as error:  # a full disk must not take down what still runs
            log.warning("the state cannot be written: %s", error)

    # --- down --------------------------------------------------------------------------------------------------------

    def _interrupt(self) -> None:
        """Handle Ctrl-C. First: drain. Second: kill the processes. Third: kill Redis too."""
        self._interrupts += 1
        if self._interrupts == 2:
            self._screen.progress.say("stopping now; unfinished jobs stay in the queue")
        if self._interrupts >= 2:
            self._supervisor.kill(*DRAINED_FIRST, *(("redis",) if self._interrupts > 2 else ()))
        self._supervisor.wake()

    async def _stop(self) -> None:
        jobs = 0  # that workers hold, as far as the store says it in time
        if self._interrupts and self._store_client is not None:
            with contextlib.suppress(Unavailable, TimeoutError):
                async with asyncio.timeout(COUNT_TIMEOUT_S):
                    lanes = await Backlog(self._store_client).lanes(self._deployment.model_names)
                    jobs = sum(lane.running for lane in lanes)
        if self._interrupts:
            running = f" {counted(jobs, 'job')}" if jobs else ""
            self._screen.progress.say(f"draining{running}, Ctrl-C again to stop now")
            self._screen.progress.phase("draining")
        self._publish(state="draining", phase=f"{counted(jobs, 'job')} to finish" if jobs else "")
        await self._supervisor.stop(*DRAINED_FIRST)
        if self._lease_release is not None:
            await self._lease_release.close(RELEASE_TIMEOUT_S)


async def console_path(home: DataDir) -> str:
    """Make a link to the console for whoever started the instance of this folder: the path at which it logs in, once;
    "" if nobody may administer. It is a secret, so it is kept nowhere."""
    saved = saved_deployment(home.settings)  # with the admin token of this start
    keyring = Keyring(saved.keys, saved.api.admin_token_sha256)
    if keyring.administrator is None:
        return ""
    async with connected(saved.config.section("redis", RedisSettings)) as client:
        try:
            return link_path(await ConsoleAccess(keyring, ConsoleSessions(client)).link(keyring.administrator))
        except Unavailable as error:
            log.warning("no link to the console: %s", error)
            return ""


def _any_ready(children: list[Child]) -> bool:
    """Whether one of the children is ready. Raises Problem if all of them keep crashing."""
    if all(looping(child) for child in children):
        raise crash_loop(children[0])
    return any(child.status.state == "ready" for child in children)


def outside_url(api: ApiSettings, port: int) -> str:
    """URL for other machines of a server that listens on all addresses: with the first of `api.hosts`, else with this
    machine's name. "" for a server that listens on a single address."""
    name = api.hosts[0] if api.hosts else socket.gethostname()
    return url_of(name, port, api.scheme) if api.host in WILDCARDS else ""


POLL_INTERVAL_S = 0.05

log = logging.getLogger(__name__)


@click.command(cls=Command)
@click.option("--host", help="Address to listen on [127.0.0.1]; any other needs an API key in the settings.")
@click.option("--port", type=int, help="Port of the API [8000]; 0: any free one.")
@click.option("--data-dir", help="Queue, weights, logs and state [.penstock].")
@click.option("--redis-url", callback=warn_of_password, help="A Redis or Valkey of yours, not the embedded one.")
@click.option("--engine", help=f"Engine of the model: {', '.join(ENGINES)}, or a plug-in [llamacpp].")
@click.option("--model", help="Name of the model served.")
@click.option("--upstream", help="Serve this OpenAI-compatible server, e.g. http://127.0.0.1:8080/v1.")
@click.option("--workers", type=click.IntRange(0), help="Workers of every model; 0 starts none.")
@click.option("--api-processes", type=click.IntRange(1, 64), help="API processes sharing the port [1].")
@click.option("--sim-step-ms", type=float, help="Simulated engine: time of one step [15].")
@click.option("--sim-prefill-ms", type=float, help="Simulated engine: time of a prefill [25].")
@click.option("--sim-slots", type=int, help="Simulated engine: requests at once [256].")
@click.option("--sim-kv-tokens", type=int, help="Simulated engine: tokens its KV cache holds.")
@config_option
@click.option("--detach", is_flag=True, help="Return when it is ready; `penstock down` stops it.")
def up(config: Path | None, detach: bool, **flags: Any) -> int:
    """Start Redis (embedded), API, workers and scheduler, and keep them running.

    Settings come from penstock.toml, then PENSTOCK_* variables, then these flags.

    \b
    Examples:
      penstock up
      penstock up --engine sim --workers 2
      penstock up --port 9000 --detach
      penstock up --upstream http://127.0.0.1:8080/v1
      PENSTOCK_REDIS_URL=redis://127.0.0.1:6379/0 penstock up
    """
    note(f"penstock {__version__}")
    flags = with_upstream(flags, os.environ)
    deployment = load_deployment({FLAGS[name]: value for name, value in flags.items()}, os.environ, Path.cwd(), config)
    with deployment.config.sources.naming():
        keyring = Keyring(deployment.keys, issuer=issuer_of(deployment.config.section("oidc", OidcSettings)))
        check_exposure(deployment.api.host, keyring)
        check_keyless(deployment.api, keyring)
        Certificate.of(deployment.api)
        deployment.check_model_files()
        deployment.check_upstreams()
    home = DataDir(deployment.up.data_dir)
    with ProgressLine() as progress:
        if detach:
            url = flags.pop("redis_url")
            given = {"config": config, **flags}  # to give again, without --detach
            words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
            return start_detached(home, words, progress, keyed=bool(deployment.keys), redis_url=url)
        with home.lock(), listening(deployment.api.host, deployment.api.port) as listeners:
            return _run(deployment, home, listeners, progress)


def _run(deployment: Deployment, home: DataDir, listeners: Sequence[socket.socket], progress: ProgressLine) -> int:
    home.prepare()
    try:
        with open_private(home.log("up"), "a") as file:
            logs.setup("up", "info", file)
            log.info("penstock %s starts", __version__)
            try:
                machine = Machine(deployment, home, listeners, Screen(progress))
                weights = _fetch(home, machine) if deployment.needs_weights else None
                _check_engines(deployment, home, machine)
                return asyncio.run(machine.run(weights))
            except (Problem, ConfigError) as error:
                ended = problem_of(error) if isinstance(error, ConfigError) else error
                words = filter(None, (ended.message, ended.cause, ended.next_step))
                log.error("penstock up ends: %s", "; ".join(words))
                raise
    finally:
        home.clear()


def _check_engines(deployment: Deployment, home: DataDir, machine: Machine) -> None:
    """Raises ConfigError for a plug-in that no worker could build."""
    if not any(is_plugin(model.engine) for model in deployment.models.values()):
        return
    machine.publish_phase("checking the engines")
    deployment.write(home)
    with deployment.config.sources.naming():
        for _, _, error in check_plugins(deployment, home):
            if error is not None:
                raise error


def _fetch(home: DataDir, machine: Machine) -> Path:
    """Fetch the default model. Ctrl-C or SIGTERM ends the command."""
    from workers.engines.llamacpp.weights import WeightsError, fetch  # noqa: PLC0415 - imports a converter, not needed by other engines

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return fetch(home.weights, machine.publish_phase)
    except WeightsError as error:
        raise Problem(str(error), code="weights") from None
    finally:
        signal.signal(signal.SIGTERM, before)


def start_detached(
    home: DataDir, arguments: Sequence[str], progress: ProgressLine, *, keyed: bool, redis_url: str | None
) -> int:
    """Start `up` in a new session. Returns its exit code if it exits, else 0 once it is ready.

    `redis_url` is passed in the environment, because it may hold a password and every user of the machine can read a
    process's arguments.
    """
    environ = environment() if redis_url is None else {**environment(), "PENSTOCK_REDIS_URL": redis_url}
    output, argv = home.logs / "up.out", [sys.executable, "-P", "-m", "cli", "up", *arguments]
    with home.lock():  # else it would empty the output of the one that runs
        home.logs.mkdir(mode=0o700, exist_ok=True)
        with open_private(output, "wb") as file:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environ, start_new_session=True
            )
    instance: Instance | None = None
    try:
        while process.poll() is None and (instance is None or instance.state != "ready"):
            time.sleep(POLL_INTERVAL_S)
            now = home.read()
            instance = now if now is not None and now.pid == process.pid else None
            progress.phase(instance.phase if instance is not None else "")
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    progress.end()
    if instance is None or instance.state != "ready":
        # Without its first line, the version, which was shown already.
        write_or_drop(sys.stderr, output.read_text(errors="replace").partition("\n")[2])
        return process.returncode
    show_ready(instance, asyncio.run(console_path(home)), detached=True, keyed=keyed)
    return Exit.DONE
