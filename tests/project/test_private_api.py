"""What the product uses of its libraries beyond their documented API, and whether the installed version still has it.

The versions are pinned exactly. To upgrade one of them: compare the modules below in both versions with the files that
use them, change the pin in pyproject.toml, the lock and this table, and run the whole suite.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from dis import get_instructions
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("penstock", "api", "workers", "scheduler", "offline", "planner", "streaming", "telemetry", "cli")


@dataclass(frozen=True, slots=True)
class Private:
    """Names of one class or module of a library that one file of the product uses."""

    library: str
    """Its name as a distribution."""
    module: str
    owner: str
    """The class; "" for the module itself."""
    used_in: str
    attributes: str = ""
    """Set by the library on each instance, or in the module."""
    methods: tuple[str, ...] = ()
    """Called or overridden: the name and its parameters, without annotations and defaults."""

    @property
    def place(self) -> str:
        return f"{self.module}.{self.owner}".rstrip(".")

    @property
    def names(self) -> list[str]:
        return [*self.attributes.split(), *(each.partition("(")[0] for each in self.methods)]


UVICORN, REDIS, PROMETHEUS = "uvicorn", "redis", "prometheus-client"
PINNED = {UVICORN: "0.54.0", REDIS: "8.1.0", PROMETHEUS: "0.26.0"}
HTTP = "uvicorn.protocols.http.httptools_impl"
BOUNDED, CONNECTION = "api/stream/connection.py", "api/stream/connection.py"
REDIS_CONNECTION = "streaming/redis/connection.py"
METRICS = "telemetry/metrics.py"

TABLE = (
    Private(
        UVICORN, HTTP, "HttpToolsProtocol", BOUNDED,
        "client cycle expect_100_continue flow headers loop parser pipeline scope server_state transport url",
        (
            "_start_asgi_task(self, cycle, app)", "connection_made(self, transport)", "connection_lost(self, exc)",
            "data_received(self, data)", "on_message_begin(self)", "on_header(self, name, value)",
            "on_headers_complete(self)", "on_body(self, body)", "on_message_complete(self)",
            "on_response_complete(self)", "shutdown(self)",
        ),
    ),
    Private(
        UVICORN, HTTP, "RequestResponseCycle", BOUNDED,
        "body chunked_encoding default_headers disconnected keep_alive message_event more_body on_response "
        "response_complete response_started transport waiting_for_100_continue",
    ),
    Private(
        UVICORN, "uvicorn.protocols.http.flow_control", "FlowControl", BOUNDED,
        "read_paused", ("pause_reading(self)", "resume_reading(self)"),
    ),
    Private(UVICORN, HTTP, "", CONNECTION, "STATUS_LINE"),
    Private(UVICORN, "uvicorn.server", "ServerState", BOUNDED, "total_requests"),
    Private(
        UVICORN, HTTP, "HttpToolsProtocol", CONNECTION,
        "cycle flow transport", ("connection_made(self, transport)", "pause_writing(self)", "resume_writing(self)"),
    ),
    Private(UVICORN, "uvicorn.protocols.http.flow_control", "FlowControl", CONNECTION, "write_paused"),
    Private(REDIS, "redis.asyncio.connection", "AbstractConnection", REDIS_CONNECTION, "_writer"),
    Private(REDIS, "redis.asyncio.cluster", "RedisCluster", REDIS_CONNECTION, "_initialize nodes_manager"),
    Private(
        REDIS, "redis.asyncio.cluster", "ClusterNode", REDIS_CONNECTION,
        methods=("acquire_connection(self)", "release(self, connection)"),
    ),
    Private(
        REDIS, "redis.asyncio.cluster", "NodesManager", REDIS_CONNECTION,
        methods=(
            "get_node_from_slot(self, slot, read_from_replicas, load_balancing_strategy)", "move_slot(self, e)",
            "aclose(self, attr)",
        ),
    ),
    Private(
        REDIS, "redis.asyncio.sentinel", "SentinelConnectionPool", REDIS_CONNECTION,
        "master_address sentinel_manager service_name", ("get_master_address(self)",),
    ),
    Private(
        REDIS, "redis.asyncio.sentinel", "Sentinel", REDIS_CONNECTION, methods=("discover_master(self, service_name)",)
    ),
    Private(PROMETHEUS, "prometheus_client.values", "", METRICS, "ValueClass MutexValue"),
    Private(PROMETHEUS, "prometheus_client.metrics", "Histogram", METRICS, "_buckets _sum"),
    Private(
        PROMETHEUS, "prometheus_client.multiprocess", "MultiProcessCollector", METRICS,
        methods=("merge(files, accumulate)",),
    ),
)  # fmt: skip

PRIVATE_USE = re.compile(r"(?<!\bself)(?<!\bcls)\.(_[a-z]\w*)")


@pytest.mark.parametrize("library", PINNED)
def test_the_pinned_version_is_installed_and_locked(library: str) -> None:
    pinned, installed = PINNED[library], version(library)
    look_at = "\n".join(f"  {each.place}: used by {each.used_in}" for each in TABLE if each.library == library)
    assert installed == pinned, (
        f"{library} {installed} is installed; the product uses private names of {pinned}. Compare both versions of\n"
        f"{look_at}\nand change the pin in pyproject.toml, requirements.lock and this file, or install {pinned}."
    )
    assert f'"{library}=={pinned}"' in (ROOT / "pyproject.toml").read_text("utf-8")
    lock = (ROOT / "requirements.lock").read_text("utf-8")
    assert re.search(rf"^{library}=={re.escape(pinned)} ", lock, re.MULTILINE)


@pytest.mark.parametrize("private", TABLE, ids=lambda each: f"{each.owner or each.module}-{Path(each.used_in).stem}")
def test_the_library_still_has_the_name(private: Private) -> None:
    """With the same parameters; and the file still uses it, or the table is to be shortened."""
    module = importlib.import_module(private.module)
    owner = getattr(module, private.owner) if private.owner else module
    changed = f"{private.place} of {private.library} has changed: look at what {private.used_in} does with it"
    there = assigned(owner) if private.owner else set(vars(module))
    assert set(private.attributes.split()) <= there, changed
    for method in private.methods:
        found = getattr(owner, method.partition("(")[0], None)
        assert found is not None, f"{changed} ({method} is gone)"
        assert f"{found.__name__}({', '.join(inspect.signature(found).parameters)})" == method, changed
    text = (ROOT / private.used_in).read_text("utf-8")
    assert [name for name in private.names if not re.search(rf"[. ]{name}\b", text)] == [], "no longer used"


@cache
def assigned(owner: type[Any]) -> set[str]:
    """The attributes that a library's class and its bases set on their instances, and what the classes have."""
    found = set[str]()
    for each in owner.__mro__[:-1]:
        found |= vars(each).keys()
        found |= {step.argval for code in codes(each) for step in get_instructions(code) if step.opname == "STORE_ATTR"}
    return found


def codes(owner: type[Any]) -> Iterator[CodeType]:
    """Of the methods that a class itself defines."""
    for value in vars(owner).values():
        if inspect.isfunction(value):
            yield inspect.unwrap(value).__code__


def test_no_other_private_name_of_a_library_is_used() -> None:
    """Of another object: `connection._writer`. What is the product's own is defined in the same file; `_asdict`,
    `_fields` and `_replace` of named tuples, and `_value_` of enumerations, are public."""
    used = set[tuple[str, str]]()
    for path in product_files():
        text = path.read_text("utf-8")
        assert not re.search(r"^ *(?:from|import) \S*\b_[a-z]", text, re.MULTILINE), f"{path} imports a private module"
        text = re.sub(r'"[^"{\n]*"', '""', text)  # the name of a module in a string is no use of it
        own = {"_exit", "_value_", "_asdict", "_fields", "_replace", *re.findall(r"def (_\w+)\(", text)}
        used |= {(path.relative_to(ROOT).as_posix(), name) for name in PRIVATE_USE.findall(text) if name not in own}
    assert used <= {(each.used_in, name) for each in TABLE for name in each.names}


def product_files() -> Iterator[Path]:
    for package in PRODUCT:
        yield from sorted((ROOT / package).rglob("*.py"))
