"""Engines before any worker is started: whether plug-ins can be built, what upstream servers are, and the model of
`penstock up --upstream`.

A plug-in is built in a process of its own, as a worker would, because it may import heavy libraries, take long, or
crash.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from cli.deployment import Deployment
from cli.instance import DataDir
from cli.output import Problem
from cli.progress import ProgressLine
from cli.supervisor import signal_name
from penstock.config import ConfigError
from streaming.fleet.plans import pool_name
from streaming.fleet.settings import MODEL_NAME
from workers.engines.registry import is_plugin
from workers.engines.upstream.http import ServerAddress, UpstreamClient
from workers.engines.upstream.places import keys_of
from workers.engines.upstream.server import ProbeFailed, ServerFacts, ServerProbe
from workers.engines.upstream.settings import UpstreamSettings, url_problem

CHECK_TIMEOUT_S = 120.0
ERROR = "error: "
MANUAL = "see docs/engines.md"


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """What was found of one pool's engine. `error` is None if it can be built."""

    pool: str
    engine: str
    error: ConfigError | None


def check_plugins(deployment: Deployment, home: DataDir) -> Iterator[EngineCheck]:
    """Check the plug-in engine of each pool. `home.settings` must be saved."""
    for name, model in deployment.models.items():
        for shape, pool in model.pools.items():
            if is_plugin(pool.engine):
                program = deployment.worker_program(home, "engine-check", name, shape)
                key = f"models.{name}.engine"
                error = _error(key, [*program.argv, "--check"], program.env)
                if error is not None and error.key == key and not deployment.config.source(key):
                    error = ConfigError("up.engine", error.problem, error.hint)
                yield EngineCheck(pool_name(name, shape), pool.engine, error)


def _error(key: str, argv: Sequence[str], env: Mapping[str, str]) -> ConfigError | None:
    """What the worker says of its settings, or how else it ended; `key` is the engine's setting."""
    try:
        done = subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=CHECK_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return ConfigError(key, f"the engine was not built within {CHECK_TIMEOUT_S:.0f} s", MANUAL)
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        name = signal_name(-done.returncode)
        return ConfigError(key, f"the process that built the engine was killed by {name}", MANUAL)
    try:
        return ConfigError(*msgspec.json.decode(done.stdout.rpartition(b"\n\n")[2], type=tuple[str, str, str]))
    except msgspec.DecodeError:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
    ended = f"the process that built the engine exited with {done.returncode}"
    return ConfigError(key, lines[-1].removeprefix(ERROR) if lines else ended, MANUAL)


KEY_VARIABLES = "PENSTOCK_UPSTREAM_KEY_ENV"
MAX_NAMED = 8
START_TIMEOUT_S = 600.0
"""How long `up` waits for a server that says that it is not ready: large models take minutes to load."""
RETRY_DELAY_S = 0.5
NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._:/-]+")


@dataclass(frozen=True, slots=True)
class ServerLook:
    """What was found of one server. `facts` is None if it cannot be used."""

    pool: str
    url: str
    facts: ServerFacts | None
    problem: str = ""


def with_upstream(flags: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """The flags of `up` with what --upstream implies: the engine, and the name of the server's only model. Raises
    Problem."""
    url, engine = flags.get("upstream"), flags.get("engine")
    if url is None:
        return dict(flags)
    if engine not in (None, "upstream"):
        raise Problem(f"--upstream needs no --engine {engine}", next_step="leave out one of them", code="usage")
    name = flags.get("model") or environ.get("PENSTOCK_MODEL")
    if name is None:
        first, *_ = [part.strip() for part in url.split(",") if part.strip()] or [""]
        if problem := url_problem(first):
            raise Problem(f"--upstream: {problem}", code="usage")
        name = _only_model(first, environ)
    return {**flags, "engine": "upstream", "model": name}


def _only_model(url: str, environ: Mapping[str, str]) -> str:
    """The name of the only model of a server, as a name here. Raises Problem."""
    try:
        settings = UpstreamSettings(urls=(url,), key_env=tuple(environ.get(KEY_VARIABLES, "").split(",")[:1]))
    except ValueError:
        settings = UpstreamSettings(urls=(url,))
    try:
        keys = keys_of(settings, "upstream")
        names = _names_of(url, settings, keys[0].secret if keys else "", environ)
    except ConfigError as error:
        raise Problem(str(error), code="usage") from None
    except ProbeFailed as error:
        hint = "start it, correct the address, or name its model with --model to wait for it"
        if error.lasting:
            hint = f"put its key into a variable, and the variable's name into {KEY_VARIABLES}"
        raise Problem(f"{url} cannot be used: {error}", next_step=hint, code="unreachable") from None
    if len(names) != 1:
        shown = ", ".join(names[:MAX_NAMED]) or "none that it names"
        raise Problem(f"{url} has {len(names)} models: {shown}", next_step="name one with --model", code="usage")
    return own_name(names[0])


def _names_of(url: str, settings: UpstreamSettings, key: str, environ: Mapping[str, str]) -> list[str]:
    """The names of a server's models. Waits while it says that it is not ready, at most START_TIMEOUT_S, and shows for
    how long. Raises ProbeFailed."""
    until = time.monotonic() + START_TIMEOUT_S
    with ProgressLine(sys.stderr, environ) as progress:
        while True:
            try:
                return asyncio.run(_names(url, settings, key))
            except ProbeFailed as error:
                if not error.starting or time.monotonic() >= until:
                    raise
                progress.phase(f"waiting for {url}: {error}")
            time.sleep(RETRY_DELAY_S)


def own_name(name: str) -> str:
    """A server's name of a model as a name of ours: of a path its last part, without its ending."""
    last = name.rpartition("/")[2] if name.startswith(("/", ".")) or name.endswith(".gguf") else name
    plain = NOT_IN_NAMES.sub("-", last.removesuffix(".gguf")).strip("._:/-")[:128]
    return plain if MODEL_NAME.fullmatch(plain) else "upstream"


async def _names(url: str, settings: UpstreamSettings, key: str) -> list[str]:
    client = UpstreamClient(ServerAddress.of(url), settings.connect_s, settings.proxy)
    try:
        return await ServerProbe(client, settings, "", key).names()
    finally:
        client.close()


def look(deployment: Deployment) -> Iterator[ServerLook]:
    """Ask every server of every model with the engine `upstream` what it is."""
    for name, model in deployment.models.items():
        for shape, pool in model.pools.items():
            if pool.engine == "upstream":
                settings = deployment.config.section("upstream", UpstreamSettings, pool.options)
                yield from asyncio.run(_look(name, pool_name(name, shape), settings))


async def _look(model: str, pool: str, settings: UpstreamSettings) -> list[ServerLook]:
    try:
        keys = keys_of(settings, f"models.{model}.options")
    except ConfigError as error:
        return [ServerLook(pool, url, None, str(error)) for url in settings.urls]
    return [await _look_at(model, pool, url, settings, keys[0].secret if keys else "") for url in settings.urls]


async def _look_at(model: str, pool: str, url: str, settings: UpstreamSettings, key: str) -> ServerLook:
    client = UpstreamClient(ServerAddress.of(url), settings.connect_s, settings.proxy)
    try:
        return ServerLook(pool, url, await ServerProbe(client, settings, model, key).facts())
    except ProbeFailed as error:
        return ServerLook(pool, url, None, str(error))
    finally:
        client.close()
