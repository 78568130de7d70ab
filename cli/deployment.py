"""Deployment of one machine: its validated settings and models, the command line of every process `up` starts, and
the sockets that its API processes listen on.

Also what can be known of its engines before a worker is started: whether plug-ins can be built, and what upstream
servers are."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from api.settings import ApiSettings, KeySettings, MediaSettings, ModerationSettings, OidcSettings
from cli.instance import DataDir, UpSettings, settings_file
from cli.output import Problem, ProgressLine
from cli.supervisor import Program, signal_name
from offline.settings import OfflineSettings
from penstock import bundle, process
from penstock.config import ENV_PREFIX, Config, ConfigError, build, expanded, load, nearest
from penstock.content import ContentSettings, rules_of
from scheduler.settings import KubernetesSettings, SchedulerSettings, shapes_of
from streaming.batches.file_store import BatchSettings, FilesSettings
from streaming.events import EventSettings, WebhookSettings
from streaming.fleet.aliases import AliasSettings, aliases_of
from streaming.fleet.plans import pool_name
from streaming.fleet.settings import MODEL_NAME, ModelSettings, check_model_names, check_runnable
from streaming.jobs.settings import QuotaSettings, TenantSettings, content_of
from streaming.redis.settings import RedisSettings
from telemetry.records.schema import RecordSettings
from telemetry.settings import TelemetrySettings
from workers.engines.llamacpp.settings import LlamacppSettings
from workers.engines.registry import check_name, check_options, is_plugin, other_models, sections
from workers.engines.trtllm.settings import TrtllmSection
from workers.engines.upstream.endpoints import checked_models, keys_of
from workers.engines.upstream.http import ServerAddress, UpstreamClient
from workers.engines.upstream.server import ProbeFailed, ServerFacts, ServerProbe
from workers.engines.upstream.settings import UpstreamSettings, url_problem
from workers.settings import WorkerSettings

T = TypeVar("T")

ROLES = ("api", "worker", "scheduler", "offline")
TAKE = ("api", "offline")
"""Roles that take requests, or run those of batches and brokers."""
RUN = (*TAKE, "worker")
READ_BY: dict[str, tuple[type[msgspec.Struct], tuple[str, ...]]] = {
    "up": (UpSettings, ROLES),
    "api": (ApiSettings, TAKE),
    "redis": (RedisSettings, ROLES),
    "files": (FilesSettings, TAKE),
    "batch": (BatchSettings, TAKE),
    "offline": (OfflineSettings, ("offline",)),
    "worker": (WorkerSettings, ("worker",)),
    "scheduler": (SchedulerSettings, ("scheduler",)),
    "kubernetes": (KubernetesSettings, ("scheduler",)),
    "telemetry": (TelemetrySettings, ROLES),
    "records": (RecordSettings, ROLES),
    **{engine: (kind, ("worker",)) for engine, kind in sections().items()},
    "models": (ModelSettings, ROLES),
    "aliases": (AliasSettings, TAKE),
    "keys": (KeySettings, ("api",)),
    "oidc": (OidcSettings, ("api",)),
    "webhooks": (WebhookSettings, TAKE),
    "events": (EventSettings, TAKE),
    "quotas": (QuotaSettings, TAKE),
    "tenants": (TenantSettings, RUN),
    "content": (ContentSettings, RUN),
    "moderation": (ModerationSettings, ("api",)),
    "media": (MediaSettings, TAKE),
}
"""Every section of a deployment: the struct that validates it, and the roles whose processes read it, and so get it."""
KINDS = {section: kind for section, (kind, _) in READ_BY.items()}

DEFAULT_MODEL = "smollm2-135m-instruct"
MODEL_FILES = {"llamacpp": "path", "trtllm": "model"}
"""By engine, the option that names its model file or folder."""
GGUF = b"GGUF"
"""The first bytes of a model file of llama.cpp."""
KILL_MARGIN_S = 5.0
"""Time after its drain time before a process is killed."""


@dataclass(frozen=True)
class Deployment:
    """Validated settings. `redis_url` is None if no Redis is configured: `up` then starts an embedded one."""

    config: Config
    up: UpSettings
    api: ApiSettings
    worker: WorkerSettings
    offline: OfflineSettings
    models: dict[str, ModelSettings]
    keys: dict[str, KeySettings]
    redis_url: str | None

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names of all models, the default one first."""
        first = self.up.model or next(iter(self.models))
        return (first, *(name for name in self.models if name != first))

    @property
    def engines(self) -> str:
        """Names of the engines in use, for display."""
        return ", ".join(sorted({model.engine for model in self.models.values()}))

    @property
    def pools(self) -> Iterator[tuple[str, str, ModelSettings]]:
        """Model, shape and settings of every pool of workers."""
        return ((name, *pool) for name, model in self.models.items() for pool in model.pools.items())

    @property
    def needs_weights(self) -> bool:
        """Whether some model uses the default weights."""
        found = (pool for _, _, pool in self.pools if pool.engine == "llamacpp" and pool.most_workers > 0)
        own = self.config.section("llamacpp", LlamacppSettings).path
        return own is None and any(not pool.options.get("path") for pool in found)

    def check_model_files(self) -> None:
        """Check the model files that are set, before workers fail on them again and again. Raises ConfigError."""
        for name, shape, pool in self.pools:
            option = MODEL_FILES.get(pool.engine) if pool.most_workers > 0 else None
            file = option and (pool.options.get(option) or self.config.raw.get(pool.engine, {}).get(option))
            if not option or not file or (pool.engine == "trtllm" and not Path(file).is_absolute()):  # a hub's name
                continue
            key = f"models.{name}.options.{option}" if option in pool.options else f"{pool.engine}.{option}"
            if shape and option in self.models[name].shapes[shape].options:
                key = f"models.{name}.shapes.{shape}.options.{option}"
            path = expanded(file).absolute()
            if not path.exists():
                raise ConfigError(key, f"there is no {path}", "correct the path, or fetch the model first")
            if not os.access(path, os.R_OK):
                raise ConfigError(key, f"{path} cannot be read", "let this user read it")
            if pool.engine == "llamacpp" and not is_gguf(path):
                raise ConfigError(key, f"{path} is not a GGUF file", "fetch it again, or name another file")

    def check_upstreams(self) -> None:
        """Check that each model with the engine `upstream` has addresses, keys if it names any, and fallbacks that can
        answer for it. Raises ConfigError."""
        for name, _, pool in self.pools:
            if pool.engine == "upstream" and pool.most_workers > 0:
                settings = self.config.section("upstream", UpstreamSettings, pool.options)
                list(checked_models(name, settings, other_models(self.config, "upstream")))

    def save(self, home: DataDir, *, redis_url: str, port: int, weights: Path | None) -> None:
        """Write the settings files that the child processes read."""
        config = Config(self.config.raw)
        config.raw.setdefault("redis", {})["url"] = redis_url
        api = config.raw.setdefault("api", {})
        api["port"] = port
        if not self.keys and not self.api.admin_token_sha256:
            api["admin_token_sha256"] = home.new_admin_token()
        config.raw.setdefault("telemetry", {})["metrics_dir"] = str(home.metrics)
        config.raw.setdefault("records", {}).setdefault("dir", str(home.records))
        config.raw.setdefault("files", {}).setdefault("dir", str(home.files))
        if weights is not None:
            config.raw.setdefault("llamacpp", {})["path"] = str(weights)
        self.write(home, config)

    def write(self, home: DataDir, config: Config | None = None) -> None:
        """Write the settings, and beside them those of each role. `config`: None writes them as they are."""
        config = config or self.config
        config.save(home.settings)
        for role in ROLES:
            config.only([name for name, (_, roles) in READ_BY.items() if role in roles]).save(home.settings_of(role))

    @property
    def key_variables(self) -> set[str]:
        """Variables that hold the keys of upstream servers."""
        options = [pool.options for _, _, pool in self.pools if pool.engine == "upstream"]
        return {name for each in options for name in self.config.section("upstream", UpstreamSettings, each).key_env}

    def programs(self, home: DataDir, listeners: Sequence[int]) -> Iterator[Program]:
        """All processes but workers; all API processes share the listening sockets."""
        words = tuple(word for listener in listeners for word in ("--listen-fd", str(listener)))
        grace_s = self.api.drain_s + KILL_MARGIN_S
        for number in range(1, self.api.processes + 1):
            yield self._program("api", f"api-{number}", home, words, fds=tuple(listeners), grace_s=grace_s)
        yield self._program("scheduler", "scheduler-1", home, ())
        grace_s = self.offline.drain_s + KILL_MARGIN_S
        for number in range(1, self.offline.processes + 1):
            yield self._program("offline", f"offline-{number}", home, (), grace_s=grace_s)

    def worker_program(self, home: DataDir, worker_id: str, model: str, shape: str = "") -> Program:
        words = ("--model", model, *(("--shape", shape) if shape else ()))
        grace_s = self.worker.drain_s + KILL_MARGIN_S
        return self._program("worker", worker_id, home, words, model=model, shape=shape, grace_s=grace_s)

    def _program(self, role: str, program_id: str, home: DataDir, words: tuple[str, ...], **more: Any) -> Program:
        package, settings = {"worker": "workers"}.get(role, role), str(home.settings_of(role))
        # -P: so that a folder `api` or `workers` in the current folder is not imported instead of Penstock's.
        argv = (sys.executable, "-P", "-m", package, "--settings", settings, "--id", program_id, *words)
        withheld = set() if role == "worker" and self._may_ask(more["model"]) else self.key_variables
        variables = environment().items()
        env = {name: value for name, value in variables if name not in withheld and not name.startswith(ENV_PREFIX)}
        return Program(role=role, id=program_id, argv=argv, log=home.log(program_id), env=env, **more)

    def _may_ask(self, model: str) -> bool:
        """Whether the workers of a model read keys of servers: they ask upstream servers, or a plug-in knows what."""
        return any(each.engine == "upstream" or is_plugin(each.engine) for each in self.models[model].pools.values())


def load_deployment(
    flags: Mapping[tuple[str, str], Any], environ: Mapping[str, str], folder: Path, file: Path | None = None
) -> Deployment:
    """Merge and validate the settings. `file` defaults to penstock.toml in `folder`. Raises ConfigError."""
    config = load(KINDS, path=file or settings_file(folder), environ=environ, flags=flags)
    with config.sources.naming():
        up = config.section("up", UpSettings)
        models = _models(config, up)
        tenants, default = config.table("tenants", TenantSettings), config.section("api", ApiSettings).default_model
        # These three raise errors.
        rules_of(config.table("content", ContentSettings), content_of(tenants), ["input", "output"])
        config.section("moderation", ModerationSettings).check(models)
        aliases_of(config.table("aliases", AliasSettings), tenants, default, models)
    config.raw["models"] = {name: msgspec.to_builtins(model) for name, model in models.items()}
    config.raw.setdefault("up", {})["data_dir"] = str(up.data_dir.absolute())
    return _of(config, models)


def saved_deployment(path: Path) -> Deployment:
    """The settings with which an instance runs, as `up` has written them. Raises ConfigError."""
    config = Config.saved(path)
    return _of(config, config.table("models", ModelSettings))


def _of(config: Config, models: dict[str, ModelSettings]) -> Deployment:
    return Deployment(
        config=config,
        up=config.section("up", UpSettings),
        api=config.section("api", ApiSettings),
        worker=config.section("worker", WorkerSettings),
        offline=config.section("offline", OfflineSettings),
        models=models,
        keys=config.table("keys", KeySettings),
        redis_url=config.raw.get("redis", {}).get("url"),
    )


def _models(config: Config, up: UpSettings) -> dict[str, ModelSettings]:
    models = config.table("models", ModelSettings)
    if models and config.sources.of("upstream.urls") == "set by the flag --upstream":
        problem = "the settings file configures models of its own, so --upstream would serve none"
        raise ConfigError("upstream.urls", problem, "leave out --upstream, or start in another folder")
    if not models:
        models = {up.model or _default_name(config, up): ModelSettings(engine=up.engine)}
    elif up.model and up.model not in models:
        raise ConfigError("up.model", f"no model {up.model!r} is configured", nearest(up.model, models))
    if up.workers is None:
        check_runnable(models)
    else:
        number = {"min_workers": up.workers, "max_workers": up.workers}
        for name, model in models.items():
            shapes = {each: msgspec.structs.replace(shape, **number) for each, shape in model.shapes.items()}
            models[name] = msgspec.structs.replace(model, **number, shapes=shapes)
    for name, model in models.items():
        check_name(model.engine, f"models.{name}.engine" if config.raw.get("models") else "up.engine")
        check_options(model.engine, model.options, f"models.{name}.options")
        for shape, row in model.shapes.items():
            check_options(model.engine, row.options, f"models.{name}.shapes.{shape}.options")
        shapes_of(name, model)  # raises errors before any process is started
    try:
        check_model_names(models)
    except ValueError as error:
        raise ConfigError("models", str(error)) from None
    return models


def _default_name(config: Config, up: UpSettings) -> str:
    if is_plugin(up.engine):
        return up.engine.rpartition(":")[2].rpartition(".")[2].lower()
    if up.engine != "trtllm":
        return DEFAULT_MODEL if up.engine == "llamacpp" else up.engine
    checkpoint = config.section("trtllm", TrtllmSection).model.rstrip("/")
    if not checkpoint:
        raise ConfigError("trtllm.model", "no checkpoint is set", "e.g. PENSTOCK_TRTLLM_MODEL=/models/llama-8b")
    return checkpoint.rpartition("/")[2]


def is_gguf(path: Path) -> bool:
    """Whether the file begins as a GGUF file does. Raises OSError."""
    if not path.is_file():  # a folder; a pipe would have no end
        return False
    with path.open("rb") as file:
        return file.read(len(GGUF)) == GGUF


def environment() -> dict[str, str]:
    """Variables of this process, with the folder of these packages on the import path."""
    return {**os.environ, "PYTHONPATH": bundle.python_path(os.environ)}


CHECK_TIMEOUT_S = 120.0
MANUAL = "see docs/engines.md"


def check_plugins(deployment: Deployment, home: DataDir) -> Iterator[tuple[str, str, ConfigError | None]]:
    """Build the plug-in engine of each pool as a worker would, but in a process of its own, because it may import heavy
    libraries, take long, or crash. The settings must be written. Yields pool, engine, and why it cannot be built, if
    so."""
    for name, shape, pool in deployment.pools:
        if is_plugin(pool.engine):
            program = deployment.worker_program(home, "engine-check", name, shape)
            key = f"models.{name}.engine"
            error = _error(key, [*program.argv, "--check"], program.env)
            if error is not None and error.key == key and not deployment.config.sources.of(key):
                error = ConfigError("up.engine", error.problem, error.hint)
            yield pool_name(name, shape), pool.engine, error


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
    with contextlib.suppress(msgspec.DecodeError):
        return ConfigError(*msgspec.json.decode(done.stdout.rpartition(b"\n\n")[2], type=tuple[str, str, str]))
    ended = (
        f"was killed by {signal_name(-done.returncode)}" if done.returncode < 0 else f"exited with {done.returncode}"
    )
    lines = done.stderr.decode(errors="replace").strip().splitlines() if done.returncode > 0 else []
    ended = lines[-1].removeprefix("error: ") if lines else f"the process that built the engine {ended}"
    return ConfigError(key, ended, MANUAL)


KEY_VARIABLES = "PENSTOCK_UPSTREAM_KEY_ENV"
MAX_NAMED = 8
START_TIMEOUT_S = 600.0
"""How long `up` waits for a server that says that it is not ready: large models take minutes to load."""
RETRY_DELAY_S = 0.5
NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._:/-]+")


def with_upstream(flags: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """The flags of `up` with what --upstream implies: the engine, and the name of the server's only model. Raises
    Problem, ConfigError."""
    url, engine = flags.get("upstream"), flags.get("engine")
    if url is None:
        return dict(flags)
    if engine not in (None, "upstream"):
        raise Problem(f"--upstream needs no --engine {engine}", next_step="leave out one of them", code="usage")
    name = flags.get("model") or environ.get("PENSTOCK_MODEL")
    if name is None:
        first = next((part.strip() for part in url.split(",") if part.strip()), "")
        if problem := url_problem(first):
            raise Problem(f"--upstream: {problem}", code="usage")
        names = _names_of(first, environ)
        if len(names) != 1:
            shown = ", ".join(names[:MAX_NAMED]) or "none that it names"
            raise Problem(f"{first} has {len(names)} models: {shown}", next_step="name one with --model", code="usage")
        name = own_name(names[0])
    return {**flags, "engine": "upstream", "model": name}


def _names_of(url: str, environ: Mapping[str, str]) -> list[str]:
    """The names of a server's models. Waits while it says that it is not ready, at most START_TIMEOUT_S, and shows for
    how long. Raises Problem, ConfigError."""
    key_env = environ.get(KEY_VARIABLES, "").partition(",")[0]
    settings = build(UpstreamSettings, {"urls": url, "key_env": key_env}, "upstream")
    until = time.monotonic() + START_TIMEOUT_S
    with ProgressLine() as progress:
        while True:
            try:
                return asyncio.run(_ask(url, settings, "upstream", "", ServerProbe.names))
            except ProbeFailed as error:
                if not error.starting or time.monotonic() >= until:
                    hint = "start it, correct the address, or name its model with --model to wait for it"
                    if error.lasting:
                        hint = f"put its key into a variable, and the variable's name into {KEY_VARIABLES}"
                    raise Problem(f"{url} cannot be used: {error}", next_step=hint, code="unreachable") from None
                progress.phase(f"waiting for {url}: {error}")
            time.sleep(RETRY_DELAY_S)


async def _ask(
    url: str,
    settings: UpstreamSettings,
    where: str,
    model: str,
    question: Callable[[ServerProbe], Awaitable[T]],
    adapters: Collection[str] = (),
) -> T:
    """Ask one server something. Raises ProbeFailed; ConfigError, whose key begins with `where`."""
    keys = keys_of(settings, where)
    with contextlib.closing(UpstreamClient(ServerAddress.of(url), settings.connect_s, settings.proxy)) as client:
        return await question(ServerProbe(client, settings, model, keys[0].secret if keys else "", adapters))


def own_name(name: str) -> str:
    """A server's name of a model as a name of ours: of a path its last part, without its ending."""
    last = name.rpartition("/")[2] if name.startswith(("/", ".")) or name.endswith(".gguf") else name
    plain = NOT_IN_NAMES.sub("-", last.removesuffix(".gguf")).strip("._:/-")[:128]
    return plain if MODEL_NAME.fullmatch(plain) else "upstream"


def look(deployment: Deployment) -> Iterator[tuple[str, str, ServerFacts | None, str]]:
    """Ask every server of every model with the engine `upstream` what it is. Yields pool, URL and facts; of a server
    that cannot be used None, and why."""
    for name, shape, pool in deployment.pools:
        if pool.engine != "upstream":
            continue
        settings = deployment.config.section("upstream", UpstreamSettings, pool.options)
        where, adapters = f"models.{name}.options", pool.adapters.values()
        for url in settings.urls:
            facts, problem = None, ""
            try:
                facts = asyncio.run(_ask(url, settings, where, name, ServerProbe.facts, adapters))
            except (ConfigError, ProbeFailed) as error:
                problem = str(error)
            yield pool_name(name, shape), url, facts, problem


# --- the sockets of the API ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Open the sockets that all API processes accept from, for the block. Raises Problem, which names a free port if
    this one is taken."""
    try:
        listeners = process.listen(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            what, next_step = f"port {port} is taken", f"penstock up --port {next_free(host, port + 1)}"
            cause = "another process listens on it"
            raise Problem(what, cause=cause, next_step=next_step, code="port_taken") from None
        what, cause = f"cannot listen on {host}:{port}", error.strerror or str(error)
        raise Problem(what, cause=cause, next_step="choose another --host or --port") from None
    with contextlib.ExitStack() as opened:
        yield [opened.enter_context(each) for each in listeners]


def is_free(host: str, port: int) -> bool:
    """Whether `port` can be bound now."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
        return bool([opened.enter_context(each) for each in process.listen(host, port)])
    return False


def next_free(host: str, port: int) -> int:
    """The first free port among the 200 from `port` on; 0 (any port) if there is none."""
    return next((candidate for candidate in range(port, min(port + 200, 65536)) if is_free(host, candidate)), 0)
