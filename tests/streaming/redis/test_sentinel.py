"""A primary, two replicas and three Sentinels, all real: the primary is lost and the wire goes on with another."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from flow import TOKENS, Flow, a_job, numbers_read, tokens_of, until
from house import end, eventually, free_port, redis_process, server_binary
from redis import Redis
from redis.exceptions import RedisError

from streaming.jobs.queue import Queue
from streaming.jobs.relay import Relay
from streaming.redis.client import RedisClient
from streaming.store.monitor import check_level

pytestmark = pytest.mark.slow

SERVICE = "main"
DOWN_MS = 500
FILE = ("--appendonly", "yes", "--appendfsync", "everysec", "--repl-diskless-sync-delay", "0")


@dataclass
class Deployment:
    """Where everything is; `primary` is the one it began with."""

    folder: Path
    primary: int
    replicas: tuple[int, ...]
    sentinels: tuple[int, ...]

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in self.sentinels)}/{SERVICE}"

    @contextmanager
    def server(self, port: int) -> Iterator[None]:
        """The primary, or one of its replicas."""
        place = self.folder / str(port)
        place.mkdir()
        follow = () if port == self.primary else ("--replicaof", f"127.0.0.1 {self.primary}")
        with redis_process(place, port, *FILE, *follow):
            yield

    @contextmanager
    def sentinel(self, port: int) -> Iterator[None]:
        """One Sentinel; started again, it knows what it knew."""
        config = self.folder / f"sentinel-{port}.conf"
        if not config.exists():
            lines = (
                f"port {port}",
                "bind 127.0.0.1",
                f"dir {self.folder}",
                f"sentinel monitor {SERVICE} 127.0.0.1 {self.primary} 2",
                f"sentinel down-after-milliseconds {SERVICE} {DOWN_MS}",
                f"sentinel failover-timeout {SERVICE} 2000",
                f"sentinel parallel-syncs {SERVICE} 2",
            )
            config.write_text("\n".join(lines))
        with subprocess.Popen([server_binary(), str(config), "--sentinel"], stdout=subprocess.DEVNULL) as process:
            try:
                yield
            finally:
                end(process)

    def named(self) -> int:
        """The port of the primary as the Sentinels name it now."""
        with Redis(port=self.sentinels[0]) as client:
            return int(client.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", SERVICE)[1])

    def settled(self) -> bool:
        """Whether every Sentinel knows the others and the replicas, and replicas follow the primary."""
        for port in self.sentinels:
            with Redis(port=port, decode_responses=True) as client:
                known = client.sentinel_master(SERVICE)
            if known["num-other-sentinels"] != len(self.sentinels) - 1 or known["num-slaves"] != len(self.replicas):
                return False
        with Redis(port=self.primary) as client:
            client.set("probe", 1)
            return bool(client.wait(len(self.replicas), 100) == len(self.replicas))


def hurried(port: int) -> bool:
    """A Sentinel that tells and asks every tenth of a second, not every two and ten: all know each other sooner."""
    with Redis(port=port) as client:
        return bool(client.execute_command("SENTINEL DEBUG", "publish-period", 100, "info-period", 100))


def pid_of(port: int) -> int:
    """The process that listens on a port of this machine."""
    with Redis(port=port) as client:
        return int(client.info("server")["process_id"])


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    ports = [free_port() for _ in range(6)]
    found = Deployment(tmp_path, ports[0], tuple(ports[1:3]), tuple(ports[3:]))
    with ExitStack() as stack:
        for port in (found.primary, *found.replicas):
            stack.enter_context(found.server(port))
        for port in found.sentinels:
            stack.enter_context(found.sentinel(port))
        for port in found.sentinels:
            eventually(lambda port=port: hurried(port), RedisError)
        eventually(found.settled, RedisError)
        yield found


@pytest.fixture
async def wire(deployment: Deployment, opened: Callable[..., RedisClient]) -> RedisClient:
    return opened(deployment.url, durability="D3", timeout_s=1.0)


async def test_no_job_is_lost_with_a_killed_primary(deployment: Deployment, wire: RedisClient) -> None:
    """kill -9 in a steady flow: puts are refused for a while, then go on; every accepted job ends, its tokens exact."""
    flow = Flow(wire)
    advice = await check_level(wire)
    assert [each.partition(" ")[0] for each in advice] == ["maxmemory", "min-replicas-to-write"]
    async with flow.running():
        await flow.more(30)
        os.kill(pid_of(deployment.primary), signal.SIGKILL)
        await until(lambda: flow.refused > 0)
        await flow.more(30)
        records = await flow.all_done()
    assert deployment.named() in deployment.replicas
    assert [tokens_of(record) for record in records] == [list(range(1, TOKENS + 1))] * len(records)
    assert len({record.job.id for record in records}) == len(records) >= 60


async def test_nobody_waits_on_a_stopped_primary(deployment: Deployment, wire: RedisClient, relay: Relay) -> None:
    """Stopped, it keeps its connections open but answers nothing: commands and subscriptions go to its successor, and
    when it wakes up again nobody is left to write to it."""
    queue, pid = Queue(wire), pid_of(deployment.primary)
    os.kill(pid, signal.SIGSTOP)
    try:
        job_id = queue.new_id("t")
        buffer = relay.open(job_id)
        await until(lambda: queue.put(a_job(queue, id=job_id, reply_to=relay.address)))
        assert deployment.named() in deployment.replicas
        await until(lambda: subscribers(deployment.named(), relay.address))
        async with Flow(wire).running():
            assert await numbers_read(buffer) == list(range(1, TOKENS + 1))
    finally:
        os.kill(pid, signal.SIGCONT)
    await until(lambda: not clients(deployment.primary))


def subscribers(port: int, address: str) -> int:
    with Redis(port=port) as client:
        return int(client.pubsub_numsub(address)[0][1])


def clients(port: int) -> list[str]:
    """Who is connected besides this question, Sentinels and replicas."""
    with Redis(port=port, client_name="question", decode_responses=True) as client:
        found = client.client_list(_type="normal") + client.client_list(_type="pubsub")
    return [entry["addr"] for entry in found if not entry["name"].startswith(("sentinel-", "question"))]
