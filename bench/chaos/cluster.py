"""Penstock's roles as real processes on a real server, and the clients that use them."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from redis.exceptions import RedisError

from bench.chaos.asks import Ask, ClientView, configuration
from bench.chaos.clients import Clients
from bench.chaos.history import ClientHistory
from bench.chaos.http import Cut, fetch
from bench.chaos.processes import ManagedProcess, RedisServer, until
from bench.penstock import own_environ
from bench.ports import free_port
from streaming.errors import Unavailable
from streaming.fleet.processes import Fleet
from streaming.ids import partition_of
from streaming.jobs.codec import Usage, decode_terminal
from streaming.keys import partition_key, prefix
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings

LEASE_MS = 1000
QUIET_TIMEOUT_S = 15.0
HELD = ("claims", "lane", "retry", "suspects", "timers", "alone", "owed", "heirs", "open")
"""Kinds of keys that hold something only while jobs run or wait."""
SAMPLE = re.compile(r"^(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
"""Name and value of one sample of a page of metrics."""
GAUGES = ("penstock_lane_waiting", "penstock_lane_running", "penstock_open_streams", "penstock_worker_running")

Begun = tuple[ClientView, "asyncio.Task[ClientView]"]


class PenstockCluster:
    """`start` brings everything up; `close` takes everything down."""

    server: RedisServer
    """The store, where it is one server."""

    def __init__(
        self,
        folder: Path,
        history: ClientHistory,
        url: str,
        *,
        apis: int = 2,
        workers: int = 3,
        models: Sequence[str] = ("sim",),
        lease_ms: int = LEASE_MS,
        environ: Mapping[str, str] | None = None,
        urls: Mapping[str, str] | None = None,
        engine: str = "sim",
    ) -> None:
        self.folder, self.history, self.lease_ms, self.models = folder, history, lease_ms, models
        self._urls, self._engine = dict(urls or {}), engine
        own = {
            "PENSTOCK_REDIS_URL": url,
            "PENSTOCK_REDIS_LEASE_MS": str(lease_ms),
            "PENSTOCK_SIM_STEP_MS": "10",
            "PENSTOCK_SIM_PREFILL_MS": "10",
            "PENSTOCK_SIM_AUTHORS": "true",
            "PENSTOCK_TELEMETRY_METRICS_DIR": str(folder / "metrics"),
            **(environ or {}),
        }
        self.environ = {**own_environ(), **own}
        partitions = int(own.get("PENSTOCK_REDIS_PARTITIONS", "1"))
        self.wire = RedisClient.open(RedisSettings(url=url, lease_ms=lease_ms, partitions=partitions))
        self.apis = [self._api(number + 1) for number in range(apis)]
        self.workers = [self._worker(n + 1, model) for model in models for n in range(workers)]
        self.scheduler = self._child("scheduler-1", "scheduler")
        self._begun: list[Begun] = []
        self.clients = Clients(history, [int(api.environ["PENSTOCK_API_PORT"]) for api in self.apis])
        self.clients.guarded = True

    @property
    def ports(self) -> Sequence[int]:
        return self.clients.ports

    @property
    def children(self) -> list[ManagedProcess]:
        return [self.scheduler, *self.workers, *self.apis]

    def _child(self, name: str, role: str, *args: str, **environ: str) -> ManagedProcess:
        # A role may have a way to the store of its own, through a proxy.
        url = self._urls.get(role, self.environ["PENSTOCK_REDIS_URL"])
        whole = {**self.environ, "PENSTOCK_REDIS_URL": url, **environ}
        return ManagedProcess(name, [sys.executable, "-m", role, *args], whole, self.folder)

    def _api(self, number: int) -> ManagedProcess:
        return self._child(f"api-{number}", "api", "--id", f"api-{number}", PENSTOCK_API_PORT=str(free_port()))

    def _worker(self, number: int, model: str) -> ManagedProcess:
        name = f"worker-{model}-{number}"
        return self._child(name, "workers", "--id", name, "--model", model)

    async def start(self) -> None:
        """Until every API process answers and every worker has its lease."""
        rows = "".join(f'[models.{model}]\nengine = "{self._engine}"\n' for model in self.models)
        (self.folder / "penstock.toml").write_text(rows + configuration())
        (self.folder / "metrics").mkdir()
        await asyncio.gather(*(child.start() for child in self.children))
        await self.ready()

    async def add_worker(self) -> ManagedProcess:
        """One more worker of the first model; it serves when this returns."""
        worker = self._worker(len(self.workers) + 1, self.models[0])
        self.workers.append(worker)
        await worker.start()
        await self.ready()
        return worker

    async def ready(self, seconds: float = 60.0) -> None:
        """Until all kept processes serve, after a fault too. Raises TimeoutError."""
        await until(self._is_ready, seconds, 0.05)

    async def _is_ready(self) -> bool:
        for port, api in zip(self.ports, self.apis, strict=True):
            if api.kept and not await self._answers(port):
                return False
        return await self._workers_ready()

    async def _answers(self, port: int) -> bool:
        try:
            return (await fetch(port, "GET", "/healthz"))[0] == 200
        except Cut:
            return False

    async def _workers_ready(self) -> bool:
        """Every kept worker's own process says so."""
        try:
            found = {p.pid: p.state for p in await Fleet(self.wire).processes("worker")}
        except (Unavailable, msgspec.DecodeError):  # a row may have written what nobody can read
            return False
        return all(found.get(worker.pid) == "ready" for worker in self.workers if worker.kept)

    async def close(self) -> None:
        """End every client that is left, and every process."""
        for _, task in self._begun:
            task.cancel()
        await asyncio.gather(*(task for _, task in self._begun), return_exceptions=True)
        await asyncio.gather(*(child.end() for child in self.children))
        await self.wire.close()

    # --- clients -----------------------------------------------------------------------------------------------------

    def begin(self, asks: Iterable[Ask], *, port: int | None = None) -> list[Begun]:
        """Each request by a client of its own, spread over the API processes or all at one."""
        begun = []
        for number, ask in enumerate(asks):
            told = self.clients.tell(ask)
            at = port or self.ports[number % len(self.ports)]
            begun.append((told, asyncio.create_task(self.clients.run(told, at))))
        self._begun += begun
        return begun

    def forget_clients(self) -> None:
        """Let go of clients that have ended: there are very many in a soak."""
        self._begun = [(told, task) for told, task in self._begun if not task.done()]

    async def all_begun(self, begun: Iterable[Begun]) -> None:
        """Until each has its first token, or is over."""
        await asyncio.gather(*(told.begun.wait() for told, _ in begun))

    async def all_accepted(self, begun: Iterable[Begun]) -> None:
        """Until each is accepted, or is over."""
        await asyncio.gather(*(told.accepted.wait() for told, _ in begun))

    async def finish(self, begun: Sequence[Begun]) -> None:
        """Until every client has been told an end; then each accepted job is read as anybody may."""
        await asyncio.gather(*(task for _, task in begun))
        await asyncio.gather(*(self.clients.read_finally(job) for job in {told.job for told, _ in begun if told.job}))

    # --- looking -----------------------------------------------------------------------------------------------------

    async def holders(self) -> list[ManagedProcess]:
        """Workers that hold jobs now, the one with most jobs first; none while the store does not say."""
        try:
            claims = await self.held("claims")
        except RedisError:
            return []
        held = {key.rpartition(":")[2]: count for key, count in claims.items() if count}
        found = [worker for worker in self.workers if worker.alive and worker.lease() in held]
        return sorted(found, key=lambda worker: -held.get(worker.lease(), 0))  # it may have begun anew

    def readers_at(self, port: int) -> list[int]:
        """The requests of clients that are in the middle of reading at this API process."""
        return [t.req for t, task in self._begun if not task.done() and t.port == port and t.shown and not t.state]

    async def losses(self, job_id: str) -> int:
        """With how many workers the job was lost, as the store counts them; a hand-over is no loss."""
        redis: Any = self.wire.redis
        return int(await redis.hget(partition_key(partition_of(job_id) or 0, "job", job_id), "losses") or 0)

    async def view(self, job_id: str) -> dict[str, Any]:
        """The job as GET shows it to its first tenant. Raises Cut."""
        _, _, body = await fetch(self.ports[0], "GET", f"/v1/jobs/{job_id}")
        return dict(msgspec.json.decode(body))

    async def quiet(self) -> None:
        """Wait until nothing is held any more, and record what still is: it must all be nothing. Raises Cut, RedisError
        where that cannot be known in the end."""
        left: dict[str, float] = {}
        unknown: Exception | None = None
        for _ in range(int(QUIET_TIMEOUT_S / 0.25)):
            try:
                left, unknown = await self.leftovers(), None
            except (Cut, RedisError) as error:
                unknown = error
            if unknown is None and not any(left.values()):
                break
            await asyncio.sleep(0.25)
        if unknown is not None:
            raise unknown
        for what, number in left.items():
            self.history.add("quiet", what=what, number=number)

    async def leftovers(self) -> dict[str, float]:
        """What the processes say they hold, and what lies in the store for jobs that should be over. Raises Cut (also
        where the page of metrics is refused), RedisError."""
        status, _, page = await fetch(self.ports[0], "GET", "/metrics")
        if status != 200:
            raise Cut(f"/metrics: HTTP {status}")
        left = gauges(page.decode())
        for kind in HELD:
            left[kind] = sum((await self.held(kind)).values())
        left["limits"] = await self._unsettled()
        return left

    async def _unsettled(self) -> float:
        """The tokens that the accounts of limits have beyond the usage that the records of ended jobs tell, or below
        it; 0 if records are forgotten meanwhile. Raises RedisError."""
        redis: Any = self.wire.redis
        found = 0.0
        if "PENSTOCK_REDIS_RETENTION_S" in self.environ:
            return found
        for partition in self.wire.partitions:
            async for key in redis.scan_iter(match=partition_key(partition, "account", "*")):
                account = msgspec.msgpack.decode(await redis.get(key))
                found += account["tokens_per_month"]
            async for key in redis.scan_iter(match=partition_key(partition, "job", "*"), count=1000):
                held, record = await redis.hmget(key, "hold", "record")
                usage = decode_terminal(record).usage if held and record else Usage()
                found -= usage.prompt + usage.completion
        return abs(found)

    async def held(self, kind: str) -> dict[str, int]:
        """Keys of a kind, and how much is in each. Raises RedisError."""
        redis: Any = self.wire.redis
        found = {}
        for partition in self.wire.partitions:
            pattern = f"{prefix(partition)}{kind}*"
            async for key in redis.scan_iter(match=pattern, count=1000):
                found[key.decode()] = await self._amount(key)
        return found

    async def _amount(self, key: bytes) -> int:
        """How much a key holds: members, entries, the bytes in a hash of sums, which may not be below nothing either,
        or 1 for a task of a worker that is not there any more."""
        redis: Any = self.wire.redis
        match await redis.type(key):
            case b"none":  # gone meanwhile
                return 0
            case b"string":
                holder = await redis.get(key)
                return int(holder is not None and holder.decode() not in {w.lease() for w in self.workers if w.alive})
            case b"hash":
                return sum(abs(int(amount)) for amount in await redis.hvals(key))
            case kind:
                sizes = {b"set": redis.scard, b"zset": redis.zcard, b"stream": redis.xlen}
                return int(await sizes[kind](key))


def gauges(page: str) -> dict[str, float]:
    """How far each of GAUGES is from nothing, over all its labels, by a page of metrics."""
    left = dict.fromkeys(GAUGES, 0.0)
    for name, value in SAMPLE.findall(page):
        if name in left:
            left[name] += abs(float(value))
    return left
