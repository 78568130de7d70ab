"""What tests build on: real servers and Penstock's roles as real processes, and waiting without luck."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import pytest
from forked import Forked, can_fork
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from bench.penstock import find_server as server_binary
from bench.ports import free_port


@contextmanager
def redis_process(
    folder: Path, port: int | None = None, *options: str, login: Mapping[str, str] | None = None
) -> Iterator[str]:
    """A server of one's own; its address. `login`: of a user who may ping, where not everybody may."""
    port = port or free_port()
    command = [server_binary(), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    said = folder / f"server-{port}.log"
    with said.open("ab") as log, subprocess.Popen([*command, *options], stdout=log, stderr=log) as process:

        def answers() -> object:
            assert process.poll() is None, f"the server ended with {process.returncode}: {said.read_text()[-2000:]}"
            return client.ping()

        try:
            with Redis(port=port, **(login or {})) as client:  # type: ignore[arg-type]
                eventually(answers, RedisConnectionError)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()  # what it has answered is in its file


def end(process: subprocess.Popen[bytes]) -> None:
    """Asked to, then made to."""
    process.terminate()
    try:
        process.wait(3)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def eventually(condition: Callable[[], object], *errors: type[Exception], seconds: float = 60) -> object:
    """Poll until the condition gives something true, less often as it takes longer; these errors count as "not yet"."""
    deadline, pause_s = time.monotonic() + seconds, 0.01
    while True:
        try:
            if value := condition():
                return value
        except errors:
            pass
        assert time.monotonic() < deadline, f"{condition} did not come true in {seconds} s"
        time.sleep(pause_s)
        pause_s = min(0.05, 1.25 * pause_s)


Answer = tuple[int, dict[str, str], bytes]
Client = TypeVar("Client", bound=AbstractContextManager[object])

ADMIN_TOKEN = "admin-token-of-a-test"


LONG_LEASE = {"PENSTOCK_REDIS_LEASE_MS": "20000"}
"""For a worker that nobody starts again, and that no test lets lapse: a machine that stands still for a second takes no
lease from it."""


def key_rows(**tenants: str) -> str:
    """Settings of a key for each of these tenants, which is the tenant's name, with what else its row says."""
    return "".join(
        f'[keys.{name}]\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\ntenant = "{name}"\n{rest}\n'
        for name, rest in tenants.items()
    )


@contextmanager
def unstarted(folder: Path, *options: str) -> Iterator[House]:
    """A house without a process, on a server of its own with these options."""
    with redis_process(folder, None, "--appendonly", "yes", *options) as url, House(url, folder) as house:
        yield house


@contextmanager
def restartable(folder: Path) -> Iterator[tuple[House, Callable[[], None]]]:
    """A house without a process, on a server that writes down whatever it says; and what starts that server anew."""
    port = free_port()
    with ExitStack() as server:

        def start() -> None:
            server.close()
            server.enter_context(redis_process(folder, port, "--appendonly", "yes", "--appendfsync", "always"))

        start()
        with House(f"redis://127.0.0.1:{port}/0", folder) as house:
            yield house, start


@contextmanager
def serving(folder: Path, *roles: str, **environ: str) -> Iterator[House]:
    """A house with an API process and one process of each role, ready to serve if one is a worker, on a server of its
    own."""
    with unstarted(folder) as house:
        house.environ |= environ
        house.start_all(*roles)
        yield house


def module_house(*roles: str, settings: str = "", **environ: str) -> Any:
    """A fixture: such a house for the tests of one module, with this text as its penstock.toml."""

    @pytest.fixture(scope="module")
    def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
        folder = tmp_path_factory.mktemp("house")
        if settings:
            (folder / "penstock.toml").write_text(settings)
        with serving(folder, *roles, **environ) as house:
            yield house

    return house


def start_role(
    role: str, args: Sequence[str], environ: Mapping[str, str], folder: Path, *logs: int, forks: bool = True
) -> subprocess.Popen[bytes]:
    """`python -m <role>`, or a fork that is the same. `logs`: a file descriptor for its output, and one for its errors
    if they go elsewhere."""
    if forks and can_fork(role, environ):
        return Forked(role, args, environ, folder, *logs)
    command = [sys.executable, "-m", role, *args]
    return subprocess.Popen(command, env=environ, cwd=folder, stdout=logs[0], stderr=logs[-1])


class House:
    """Penstock's roles as real processes, each started and ended by the test, on a server of their own."""

    def __init__(self, redis_url: str, folder: Path) -> None:
        self.redis_url, self.folder = redis_url, folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")},
            "PENSTOCK_REDIS_URL": redis_url,
            "PENSTOCK_REDIS_LEASE_MS": "1000",
            "PENSTOCK_SIM_STEP_MS": "2",
            "PENSTOCK_SIM_PREFILL_MS": "2",
            "PENSTOCK_OFFLINE_NICE": "0",  # beside busy tests, a process that lets all others go first hardly runs
            "PENSTOCK_API_ADMIN_TOKEN_SHA256": hashlib.sha256(ADMIN_TOKEN.encode()).hexdigest(),
        }
        self.forks = True
        """Off where a test looks at what only a new interpreter has: its command line, its memory."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._clients = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def closes(self, client: Client) -> Client:
        """This client, closed with the house: a connection left open fails whatever test the collector meets it in."""
        self._clients.enter_context(client)
        return client

    def start(self, role: str, *args: str, **environ: str) -> subprocess.Popen[bytes]:
        """Start a role; its output goes to a file beside the test's data."""
        variables = {**self.environ, **environ}
        with (self.folder / f"{role}-{len(self._processes)}.log").open("wb") as log:
            process = start_role(role, args, variables, self.folder, log.fileno(), forks=self.forks)
        self._processes.append(process)
        return process

    def start_api(self, port: int | None = None, **environ: str) -> subprocess.Popen[bytes]:
        """An API process that answers."""
        process = self.start("api", **{"PENSTOCK_API_PORT": str(port or self.port), **environ})
        eventually(lambda: self.get("/healthz", port)[0] == 200, OSError, seconds=120)
        return process

    def start_all(self, *roles: str) -> None:
        """A process of each role and an API process, ready to serve if one is a worker."""
        for role in roles:
            self.start(role)
        self.start_api()
        if "workers" in roles:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Until some worker can serve."""
        eventually(lambda: self.get("/readyz")[0] == 200, OSError)

    def get(self, path: str, port: int | None = None) -> tuple[int, bytes]:
        """Status and body of a GET."""
        status, _, body = self.request("GET", path, port=port)
        return status, body

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
        """A POST of JSON, or of bytes as they are."""
        return self.request("POST", path, body, headers)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> Answer:
        """Status, headers (lower case) and body of an answer. Where headers are not given, /admin is sent the token."""
        if headers is None and path.startswith("/admin"):
            headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=60)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            kind = {"Content-Type": "application/json"} if data is not None else {}
            connection.request(method, path, data, {**kind, **(headers or {})})
            with connection.getresponse() as response:
                return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def events(self, job_id: str, after: str = "", port: int | None = None) -> list[tuple[str, str, Any]]:
        """Id, name and data of each logged event of a job that has ended, behind one of them."""
        headers = {"Last-Event-ID": after} if after else {}
        _, _, body = self.request("GET", f"/v1/jobs/{job_id}/events", headers=headers, port=port)
        found = []
        for block in body.decode().split("\n\n"):
            fields = dict(line.partition(": ")[::2] for line in block.split("\n"))
            if "id" in fields:
                found.append((fields["id"], fields["event"], json.loads(fields["data"])))
        return found

    def log(self, role: str) -> str:
        """What the processes of a role have written."""
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"{role}-*.log")))

    def _ask_to_end(self, seconds: float) -> None:
        """Those that are still at their work after that time are left as they are."""
        for process in self._processes:
            process.terminate()
        deadline = time.monotonic() + seconds
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """End every process that is left, at once: how they end when they are asked to is for tests to show."""
        self._clients.close()
        if "COVERAGE_PROCESS_CONFIG" in os.environ:  # a process that is killed has told nobody which lines it ran
            self._ask_to_end(seconds=3)
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
