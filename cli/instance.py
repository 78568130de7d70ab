"""Data folder of a deployment: its layout, its lock, and the state that a running `penstock up` publishes in it.

Also the settings of `penstock up`: one machine, all roles.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from cli.output import Problem
from penstock.config import ENV_PREFIX, FILE, SECTIONS, TABLES, Config, ConfigError, EngineName, expanded
from penstock.files import file_lock, write_file

LOCK_TIMEOUT_S = 1.0
MAX_LOG_BYTES = 64_000_000
"""A log of this size is put aside, so two of them stay for each process."""
ENGINE_FAILED = "the engine does not start: "
"""How a worker begins the cause of a failed start of its engine."""
OTHER_FOLDER = 'choose another --data-dir, or make it yours: sudo chown -R "$(id -un)" {}'
"""What to do about a data folder that cannot be used."""


SUPERVISED = ("lives", "failures")
"""Fields of a process that are its supervisor's alone."""


class ProcessEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One supervised process, as its supervisor knows it. `penstock ps` shows all fields but SUPERVISED."""

    role: str
    id: str
    pid: int | None
    state: str
    """starting | ready | draining | restarting | failed | stopped"""
    since: float
    """Unix seconds of its start."""
    restarts: int = 0
    model: str = ""
    shape: str = ""
    detail: str = ""
    failed_starts: int = 0
    """How often in a row it has exited before it was ready; 0 once it is."""
    cause: str = ""
    """Why it last exited."""
    away: str = ""
    """The servers that it waits for, each with the reason; "" while one is there."""
    away_since: float = 0.0
    """Since when (Unix seconds)."""
    lives: tuple[str, ...] = ()
    """Ids under which it registers itself in the store: of its newest start, and of the one before."""
    failures: int = 0
    """Consecutive exits before it was ready, or soon after."""

    @property
    def trouble(self) -> str:
        """Why it does not start, for a sentence that begins with its name; "" if nothing is wrong with its start."""
        return f"does not start: {self.cause.removeprefix(ENGINE_FAILED)}" if self.failed_starts else ""


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """State that `up` publishes. It contains the Redis password, so only the owner may read it."""

    version: str
    pid: int
    state: str
    """starting | ready | draining"""
    phase: str
    url: str
    """URL of its API for commands on this machine."""
    redis_url: str
    data_dir: str
    engine: str
    models: tuple[str, ...]
    """The first is the default."""
    started: float
    ready_s: float = 0.0
    outside_url: str = ""
    """URL of its API for other machines; "" if they cannot reach it."""
    certificate: str = ""
    """File of the certificate that its API shows; "": it speaks no TLS."""
    processes: tuple[ProcessEntry, ...] = ()

    def worker_problem(self, model: str = "") -> str:
        """That no worker (of a model) is ready, and why: the trouble of the first that has one, else what the first one
        does. "" if one is ready and its servers are there, or if there are none."""
        workers = [each for each in self.processes if each.role == "worker" and model in ("", each.model)]
        ready = [entry for entry in workers if entry.state == "ready"]
        if not workers or any(not entry.away for entry in ready):
            return ""
        if ready:
            return f"no server is there for {ready[0].id}: {ready[0].away}; jobs are kept until one is back"
        reasons = (f"{entry.id} {entry.trouble}" for entry in workers if entry.trouble)
        return f"no worker is ready: {next(reasons, workers[0].detail or workers[0].state)}"


class DataDir:
    """The folder of one deployment: queue, files, weights, logs, and `run/` while it runs."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.run = self.path / "run"
        self.metrics = self.run / "metrics"
        self.settings = self.run / "settings.json"
        """All of them; each process reads those of its role."""
        self.logs = self.path / "logs"
        self.records = self.path / "records"
        self.redis = self.path / "redis"
        self.weights = self.path / "weights"
        self.files = self.path / "files"
        self.api_key = self.path / "api-key"
        self.admin_token = self.run / "admin-token"
        """The token that /admin requires while no API key is configured; new in each run of `up`."""
        self._state = self.run / "state.json"
        self._lock = self.path / "lock"
        self._name = self.path / "name"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """A context manager that holds the folder's lock. Raises Problem if another process holds it."""
        self.make_private()
        with contextlib.ExitStack() as held:
            try:  # other commands hold the lock for an instant when they look
                held.enter_context(file_lock(self._lock, timeout_s=LOCK_TIMEOUT_S))
            except TimeoutError:
                raise self._already_running() from None
            except OSError as error:
                raise _unwritable(self._lock, error) from None
            yield

    def make_private(self) -> None:
        """Create the folder, or make it private. Raises Problem if it contains files of something else."""
        own = (self.run, self.logs, self.redis, self.weights, self.files, self.api_key, self._name)
        if self.path.is_dir() and self.path.stat().st_mode & 0o077:
            names = {path.name for path in self.path.iterdir()}
            if self._lock.name not in names and not names <= {path.name for path in own}:
                what = f"{self.path} has other files in it, and other users may enter it"
                next_step = f"choose another --data-dir, such as {self.path / '.penstock'}"
                raise Problem(what, cause="a data folder holds the queue and its password", next_step=next_step)
        self._make(self.path)

    def prepare(self) -> None:
        """Recreate `run/`, without the files of a killed run. The caller holds the lock."""
        self.clear()
        for folder in (self.run, self.metrics, self.logs, self.redis):
            self._make(folder)
        try:
            self.rotate_logs()
        except OSError as error:
            raise _unwritable(self.logs, error) from None

    def clear(self) -> None:
        """Remove `run/`."""
        shutil.rmtree(self.run, ignore_errors=True)

    def name(self) -> str:
        """A random name of the folder, the same in each run, because two machines may have the same name and path."""
        if not self._name.exists():
            write_file(self._name, secrets.token_hex(4).encode(), 0o600)
        return self._name.read_text()

    def new_admin_token(self) -> str:
        """Write a random token that only its owner may read. Returns its SHA-256, which other processes get."""
        token = secrets.token_urlsafe(32).encode()
        write_file(self.admin_token, token, 0o600)
        return hashlib.sha256(token).hexdigest()

    def files_of(self, config: Config) -> Path:
        """The folder of files of a deployment with these settings."""
        configured = config.raw.get("files", {}).get("dir")
        return expanded(str(configured)) if configured else self.files

    def settings_of(self, role: str) -> Path:
        """The settings file of the processes of a role."""
        return self.run / f"settings-{role}.json"

    def log(self, name: str) -> Path:
        """The log file of a process."""
        return self.logs / f"{name}.log"

    def rotate_logs(self) -> None:
        """Put long logs aside, and make all readable for their owner only."""
        for path in (*self.logs.glob("*.log"), *self.logs.glob("*.log.1")):
            path.open("ab").close()  # a log of another user's: fail here, and not when a process is to write it
            path.chmod(0o600)
            if path.suffix == ".log":
                put_aside(path)

    def write(self, instance: Instance) -> None:
        """Replace the state in one step: a reader sees the old one or the new one."""
        write_file(self._state, msgspec.json.encode(instance), 0o600)

    def locked(self) -> bool:
        """Whether some process holds the folder's lock."""
        try:
            with file_lock(self._lock, shared=True, create=False, timeout_s=0):
                return False
        except TimeoutError:
            return True
        except OSError:
            return False

    def was_used(self) -> bool:
        """Whether an instance has ever run here."""
        return os.access(self._lock, os.F_OK)

    def read(self) -> Instance | None:
        """The state of the running instance; None if none runs here, or it has not published one yet."""
        if not self.locked():
            return None
        try:
            return msgspec.json.decode(self._state.read_bytes(), type=Instance)
        except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
            return None

    def running(self) -> Instance:
        """The running instance. Raises Problem when there is none."""
        instance = self.read()
        if instance is None:
            what = f"nothing is running in {self.path}"
            raise Problem(what, next_step="penstock up, or name another folder with --data-dir", code="not_running")
        return instance

    def _already_running(self) -> Problem:
        instance = self.read()
        next_step = "penstock ps, penstock down, or a --data-dir (and --port) of its own"
        if instance is None or instance.state == "starting":
            what = f"another penstock is starting in {self.path}{f' (pid {instance.pid})' if instance else ''}"
            return Problem(what, cause=instance.phase if instance else "", next_step=next_step, code="starting")
        what = f"penstock is already running at {instance.url} (pid {instance.pid})"
        return Problem(what, cause=f"it holds {self.path}", next_step=next_step, code="already_running")

    def _make(self, folder: Path) -> None:
        """Create a folder, or change its mode, so that only this user may enter it. Raises Problem."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid != os.geteuid():
                raise Problem(f"{folder} belongs to another user", next_step=OTHER_FOLDER.format(folder))
            folder.chmod(0o700)
            with tempfile.TemporaryFile(dir=folder):  # the file system may be read-only or full
                pass
        except FileExistsError:
            raise Problem(f"{folder} is no folder", next_step="choose another --data-dir") from None
        except OSError as error:
            raise _unwritable(folder, error) from None


def put_aside(log: Path) -> bool:
    """Rename a log that has grown long to `.log.1`, in place of an older one. Returns whether it was so long. Raises
    OSError."""
    is_long = log.stat().st_size >= MAX_LOG_BYTES
    if is_long:
        log.replace(log.with_suffix(".log.1"))
    return is_long


def _unwritable(path: Path, error: OSError) -> Problem:
    """The error for a path of the data folder that this user cannot write."""
    is_here = isinstance(error, PermissionError) and os.access(path, os.F_OK)
    fix = OTHER_FOLDER.format(path) if is_here else "choose another --data-dir"
    return Problem(f"cannot write to {path}", cause=error.strerror or str(error), next_step=fix, code="data_folder")


WILDCARDS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - nothing listens here
"""Wildcard addresses to listen on, and the address to connect to instead."""


def url_of(host: str, port: int, scheme: str = "http") -> str:
    """The URL of a server at this host, which may be an IPv6 address."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class UpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [up]."""

    data_dir: Path = Path(".penstock")
    """Folder of the queue, results, weights, logs and the running instance's state."""
    engine: EngineName = "llamacpp"
    """The engine of the one model served when no [models.<name>] is configured."""
    model: str = ""
    """Name of that model (default: by the engine), or of the configured model that commands use by default."""
    redis_memory: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.25
    """Share of the machine's memory that the embedded server may fill (its `maxmemory`). Rewriting its file may need as
    much again for a while."""
    workers: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Number of workers of every model, which overrides its own settings; 0 starts none."""


def settings_file(folder: Path) -> Path | None:
    """The path of penstock.toml in this folder; None if it does not exist."""
    path = folder / FILE
    return path if path.is_file() else None


def problem_of(error: ConfigError) -> Problem:
    """The error as a command ends with it."""
    message = f"{error.key}: {error.problem}"
    return Problem(message, cause=error.source, next_step=remedy(error), code="settings")


def remedy(error: ConfigError) -> str:
    """The next step: the error's own, or the page of variables if it lists the setting; else ""."""
    section = error.key.partition(".")[0]
    listed = error.key.startswith(ENV_PREFIX) or (section in SECTIONS and section not in TABLES)
    return error.hint or ("penstock help environment" if listed else "")
