"""Fixtures: one real Valkey server for the whole run, emptied for each test, and houses of real processes."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Generator, Iterator
from functools import cache
from pathlib import Path

import pytest
from alone import Alone
from house import LONG_LEASE, House, module_house, redis_process, unstarted
from hypothesis import HealthCheck, settings
from redis import Redis
from watchdog import Watchdog

from penstock.config import hidden
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings
from workers.engines.llamacpp import weights

ROOT = Path(__file__).parents[1]
LONGEST = (
    "cli/test_up.py", "bench/test_entrypoints.py", "cli/test_ps.py", "cli/test_colour_terminal.py",
    "system/test_upstream_tasks.py", "system/test_security_fields.py", "system/test_responses.py", "cli/test_client.py",
    "bench/test_chaos.py", "api/auth/test_access.py", "system/test_canaries.py", "cli/plan/test_plan.py",
    "api/test_bounds.py", "api/test_batches.py", "system/test_conversations.py", "system/", "cli/", "bench/", "docker/",
    "api/",
)  # fmt: skip
"""Where the tests are that take longest, the longest first, by the beginnings of their files."""

LAST_CHARS = 3_000
"""So much is shown of the log of each process of a test that failed."""

SLOW_FILE = "\npytestmark = pytest.mark.slow\n"
"""Stands in a file whose tests are all slow."""


def pytest_configure(config: pytest.Config) -> None:
    """A hanging test ends the run. Properties are tried on the same examples in every run (`make properties`: on new
    ones), and no slow machine fails them. A suite begun in a shell's background or by nohup ignores signals, and so
    would every process it starts: not here. Nor does a shell's variable forbid to keep what source files are compiled
    to: every process of the run would compile them anew."""
    config.pluginmanager.register(Watchdog(os.dup(2)))
    config.pluginmanager.register(Alone())
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    steady = settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("steady", steady)
    settings.register_profile("random", steady, derandomize=False, print_blob=True)
    settings.load_profile(os.environ.get("PENSTOCK_TEST_PROPERTIES", "steady"))
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected lives as long as the run: the garbage collector need not look at it, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test-fast` does not even read the files whose tests are all slow: that is a third of its collection."""
    is_fast = config.getoption("markexpr") == "not slow" and collection_path.suffix == ".py"
    return True if is_fast and SLOW_FILE in collection_path.read_text(encoding="utf-8") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of slow tests begin first: of several processes, none has a long one left when the others have ended."""
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: _rank(item.path) if item.path in slow else len(LONGEST) + 1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the processes of a failed test wrote last: the next run may pass."""
    report = yield
    if report.failed:
        given = [value.folder if isinstance(value, House) else value for value in item.funcargs.values()]
        logs = {log for folder in given if isinstance(folder, Path) for log in folder.glob("*.log")}
        for log in sorted(logs, key=lambda log: log.stat().st_mtime):
            report.sections.append((log.name, log.read_text(encoding="utf-8", errors="replace")[-LAST_CHARS:]))
    return report


@cache
def _rank(file: Path) -> int:
    name = file.relative_to(Path(__file__).parent).as_posix()
    return next((rank for rank, beginning in enumerate(LONGEST) if name.startswith(beginning)), len(LONGEST))


@pytest.fixture(autouse=True)
def _own_secrets() -> Iterator[None]:
    """The secrets of the settings that a test reads are hidden from no other test."""
    before = hidden[:]
    yield
    hidden[:] = before


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A command that runs in this process has it log to a stream of its own, which is gone with the test."""
    root = logging.getLogger()
    handlers, level, hooks = root.handlers[:], root.level, (sys.excepthook, threading.excepthook)
    yield
    sys.excepthook, threading.excepthook = hooks
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The default model, kept between runs; of test processes that run at the same time one fetches it."""
    folder = Path(os.environ.get("PENSTOCK_TEST_CACHE") or Path.home() / ".cache" / "penstock-tests")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return weights.fetch(folder, lambda _what, _done, _of: None)


house = module_house("workers", **LONG_LEASE)
"""An API process and a worker with the simulated engine, for the tests of one module."""


@pytest.fixture
def empty_house(tmp_path: Path) -> Iterator[House]:
    """A server and no process yet, for one test."""
    with unstarted(tmp_path) as house:
        yield house


@pytest.fixture
def real_house(empty_house: House, real_model: Path) -> House:
    """No process yet; its model `small` is the default one, in the embedded engine."""
    pytest.importorskip("xllamacpp")
    settings = f'[models.small]\nengine = "llamacpp"\noptions.path = "{real_model}"\noptions.context = 1024\n'
    (empty_house.folder / "penstock.toml").write_text(settings)
    return empty_house


@pytest.fixture
def json_house(empty_house: House) -> House:
    """No process yet; the engine of its model `m` writes JSON that it cannot continue."""
    settings = '[models.m]\nengine = "json_engine:Json"\noptions.step_ms = 5\n'
    (empty_house.folder / "penstock.toml").write_text(settings)
    folders = (ROOT, ROOT / "examples" / "engine", ROOT / "tests" / "support")
    empty_house.environ["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    return empty_house


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that lives as long as the run."""
    with redis_process(tmp_path_factory.mktemp("valkey"), None, "--appendonly", "yes") as url:
        yield url


@pytest.fixture
def redis_url(redis_server: str) -> str:
    """The same server, emptied."""
    with Redis.from_url(redis_server) as client:
        client.flushall()
    return redis_server


@pytest.fixture
async def wire(redis_url: str) -> AsyncIterator[RedisClient]:
    """A wire of one partition with short leases."""
    wire = RedisClient.open(RedisSettings(url=redis_url, lease_ms=1_000))
    yield wire
    await wire.close()
