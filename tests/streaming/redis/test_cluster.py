"""A cluster of three primaries, all real: six partitions are spread over them, and the wire finds each."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from flow import MODEL, TOKENS, Flow, a_job, a_lease, numbers_read, tokens_of, until
from house import eventually, free_port, redis_process
from redis import Redis
from redis.crc import key_slot

from streaming.errors import Unavailable
from streaming.ids import partition_of
from streaming.jobs.dead_letters import DeadLetters
from streaming.jobs.job import JobState
from streaming.jobs.lease import Claim, HeldJob, Lease
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader, Summaries
from streaming.jobs.relay import Relay
from streaming.jobs.waiting import Backlog
from streaming.keys import partition_key, prefix
from streaming.order import Priority
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings
from streaming.store.identity import count_contents, enter_store, read_identity, reset_store
from streaming.store.monitor import Headroom, check_level

pytestmark = pytest.mark.slow

PARTITIONS = 6
SLOTS = 16384
FILE = ("--appendonly", "yes", "--appendfsync", "everysec", "--repl-diskless-sync-delay", "0")


@dataclass
class Nodes:
    """Servers on loopback, by port; `bus` holds the port each speaks to the others on."""

    folder: Path
    ports: tuple[int, ...]
    bus: dict[int, int]

    @property
    def url(self) -> str:
        return f"redis+cluster://{','.join(f'127.0.0.1:{port}' for port in self.ports)}"

    def server(self, port: int) -> AbstractContextManager[str]:
        """Run one of them (again, with what it has in its folder)."""
        place = self.folder / str(port)
        place.mkdir(exist_ok=True)
        cluster = ("--cluster-enabled", "yes", "--cluster-port", str(self.bus[port]), "--cluster-node-timeout", "1000")
        return redis_process(place, port, *cluster, *FILE)

    def owner(self, partition: int, by: int | None = None) -> int:
        """The port of the node that holds a partition now, as one of them says."""
        slot = key_slot(prefix(partition).encode())
        ranges = ask(by or self.ports[0], "CLUSTER", "SLOTS")
        return next(primary[1] for first, last, primary, *_ in ranges if first <= slot <= last)

    def form(self, primaries: int) -> None:
        """A cluster of the first so many, the slots spread evenly."""
        ports = self.ports[:primaries]
        bounds = [SLOTS * number // primaries for number in range(primaries + 1)]
        for number, port in enumerate(ports):
            ask(port, "CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
            ask(port, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for port in ports[1:]:
            self.meet(port)
        eventually(lambda: all(self.knows(port, primaries) for port in ports))

    def meet(self, port: int) -> None:
        ask(port, "CLUSTER", "MEET", "127.0.0.1", self.ports[0], self.bus[self.ports[0]])

    def knows(self, port: int, nodes: int) -> bool:
        """Whether a node knows so many, itself among them, and all slots are served."""
        info = ask(port, "CLUSTER", "INFO")
        return "cluster_state:ok" in info and f"cluster_known_nodes:{nodes}\r" in info


def ask(port: int, *command: str | int) -> Any:
    """One command to one node; its answer as it comes."""
    with Redis(port=port, decode_responses=True) as client:
        return client.execute_command(*command)


@contextmanager
def servers(folder: Path, count: int) -> Iterator[Nodes]:
    """So many servers that know nothing of each other."""
    ports = tuple(free_port() for _ in range(count))
    nodes = Nodes(folder, ports, {port: free_port() for port in ports})
    with ExitStack() as stack:
        for port in ports:
            stack.enter_context(nodes.server(port))
        yield nodes


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with servers(tmp_path_factory.mktemp("cluster"), 3) as nodes:
        nodes.form(3)
        yield nodes


@pytest.fixture
async def wire(nodes: Nodes, opened: Callable[..., RedisClient]) -> RedisClient:
    for port in nodes.ports:
        ask(port, "FLUSHALL")
    return opened(nodes.url, timeout_s=1.0, partitions=PARTITIONS)


def job_id(partition: int, number: int = 1) -> str:
    return f"job_{partition:02x}{number:030x}"


async def test_jobs_of_every_partition_live_and_end(nodes: Nodes, wire: RedisClient) -> None:
    """Put, listed, counted, claimed, followed, appended, finished, cancelled: on whichever node the partition lies."""
    assert {nodes.owner(partition) for partition in wire.partitions} == set(nodes.ports)
    queue, reader, lease = Queue(wire), JobReader(wire), Lease(wire, MODEL)
    jobs = [a_job(queue, id=job_id(partition)) for partition in wire.partitions]
    for job in jobs:
        await queue.put(job, idempotency_key=job.id, digest="d")
    assert (await queue.put(a_job(queue, id=job_id(5, 2)), idempotency_key=jobs[5].id, digest="d")).joined
    assert [record is not None and record.job.id for record in await reader.records([job.id for job in jobs])] == [
        job.id for job in jobs
    ]
    listed = await Summaries(wire).recent(["t"], None, 10)
    assert {found.job.id for found in listed.jobs} == {job.id for job in jobs} and listed.behind is None
    (lane,) = [lane for lane in await Backlog(wire).lanes([MODEL]) if lane.priority is Priority.STANDARD]
    assert (lane.waiting, lane.running) == (PARTITIONS, 0)
    assert await queue.cancel(jobs[0].id) is JobState.QUEUED
    await lease.register()
    numbers = {}
    for job in jobs[1:]:
        (claim,) = (await lease.claim(partition_of(job.id) or 0, 1)).jobs
        assert isinstance(claim, Claim) and claim.job.id == job.id
        numbers[job.id] = claim.run_number
        assert await queue.add_address(job.id, "somewhere") is JobState.RUNNING
    for job in jobs[1:]:
        assert await lease.beat(partition_of(job.id) or 0) == {job.id: HeldJob(numbers[job.id], False)}
        await lease.release(job.id, numbers[job.id])
    assert await lease.leave() == 0
    assert await DeadLetters(wire).recent(10) == []
    flow = Flow(wire)
    flow.accepted = [job.id for job in jobs[1:]]
    async with flow.working():
        records = await flow.all_done()
    assert [tokens_of(record) for record in records] == [list(range(1, TOKENS + 1))] * 5
    assert (await reader.record(jobs[0].id)).state is JobState.CANCELLED
    with Redis(port=nodes.owner(3)) as client:
        assert all(key.startswith((prefix(3).encode(), b"penstock:{fleet}")) for key in client.scan_iter())


async def test_a_store_on_a_cluster_is_counted_and_reset(nodes: Nodes, wire: RedisClient) -> None:
    """All three nodes; what is not Penstock's stays."""
    ask(nodes.owner(0), "SET", "{0}user", "x")
    queue = Queue(wire)
    await enter_store(wire)
    for partition in wire.partitions:
        await queue.put(a_job(queue, id=job_id(partition)))
    contents = await count_contents(wire)
    assert contents["jobs"] == contents["unfinished"] == PARTITIONS and contents["running"] == 0
    assert await reset_store(wire) == contents["keys"]
    assert (await count_contents(wire))["keys"] == 0 and await read_identity(wire) is None
    assert [key for port in nodes.ports for key in ask(port, "KEYS", "*")] == ["{0}user"]
    assert (await enter_store(wire)).partitions == PARTITIONS


async def test_every_primary_is_looked_at(nodes: Nodes, wire: RedisClient) -> None:
    """Facts and memory come from all three; one that cannot keep the level is named."""
    assert {facts["address"] for facts in await wire.servers()} == {f"127.0.0.1:{port}" for port in nodes.ports}
    assert ["maxmemory is 0" in warning for warning in await check_level(wire)] == [True] * 3
    headroom = Headroom(wire)
    await headroom.look()
    assert not headroom.full
    assert len(set((await wire.run_ids()).values())) == 3
    ask(nodes.ports[1], "CONFIG", "SET", "maxmemory", "1mb")
    await headroom.look()
    assert headroom.full
    ask(nodes.ports[1], "CONFIG", "SET", "maxmemory", "0")


async def test_frames_reach_a_reader_from_every_node(nodes: Nodes, wire: RedisClient, relay: Relay) -> None:
    """The reader's process listens to one node; its jobs lie on all three, and its subscription is cut meanwhile."""
    queue = Queue(wire)
    jobs = [a_job(queue, id=job_id(p), reply_to=relay.address) for p in wire.partitions]
    buffers = [relay.open(job.id) for job in jobs]
    for job in jobs[:3]:
        await queue.put(job)
    async with Flow(wire).working():
        for buffer in buffers[:3]:
            assert await numbers_read(buffer) == list(range(1, TOKENS + 1))
        for port in nodes.ports:
            ask(port, "CLIENT", "KILL", "TYPE", "pubsub")
        for job in jobs[3:]:
            await queue.put(job)
        for buffer in buffers[3:]:
            assert await numbers_read(buffer) == list(range(1, TOKENS + 1))


async def test_a_node_given_as_the_only_server_says_so(nodes: Nodes, opened: Callable[..., RedisClient]) -> None:
    """With the address of one server where a cluster is, the error tells what it must begin with."""
    with pytest.raises(Unavailable, match=r"redis\.url must begin with redis\+cluster://"):
        await a_lease(opened(f"redis://127.0.0.1:{nodes.owner(0)}", partitions=PARTITIONS))


async def test_a_slot_moves_under_a_steady_flow(nodes: Nodes, wire: RedisClient) -> None:
    """Key by key to another node: that partition is Unavailable while it moves, nothing is torn, then all goes on."""
    partition = 3
    slot, source = key_slot(prefix(partition).encode()), nodes.owner(partition)
    target = next(port for port in nodes.ports if port != source)
    flow = Flow(wire)
    async with flow.running():
        await flow.more(40)
        ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", ask(source, "CLUSTER", "MYID"))
        ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", ask(target, "CLUSTER", "MYID"))
        await until(lambda: flow.refused > 0)
        with pytest.raises(Unavailable, match="ASK"):
            await Queue(wire).put(a_job(Queue(wire), id=job_id(partition)))
        with Redis(port=source) as client:
            while keys := client.cluster("GETKEYSINSLOT", str(slot), "100"):
                client.migrate("127.0.0.1", target, keys, 0, 5_000)
        for port in (target, *(port for port in nodes.ports if port != target)):
            ask(port, "CLUSTER", "SETSLOT", slot, "NODE", ask(target, "CLUSTER", "MYID"))
        await flow.more(40)
        records = await flow.all_done()
    assert [tokens_of(record) for record in records] == [list(range(1, TOKENS + 1))] * len(records)
    assert any(partition_of(record.job.id) == partition for record in records[-40:])
    with Redis(port=target) as client:
        assert client.exists(partition_key(partition, "leases"))


async def test_a_killed_primary_is_replaced_by_its_replica(tmp_path: Path) -> None:
    """kill -9 in a steady flow at D3: its partition is refused until another has its office, and a replica."""
    with ExitStack() as stack:
        nodes = stack.enter_context(servers(tmp_path, 4))
        nodes.form(3)
        doomed, replica = nodes.owner(0), nodes.ports[3]
        nodes.meet(replica)
        eventually(lambda: nodes.knows(replica, 4) and nodes.knows(doomed, 4))
        ask(replica, "CLUSTER", "REPLICATE", ask(doomed, "CLUSTER", "MYID"))
        wire = RedisClient.open(RedisSettings(url=nodes.url, timeout_s=1.0, durability="D3"))
        async with (flow := Flow(wire)).running():
            await flow.more(30)
            with Redis(port=doomed) as client:
                os.kill(int(client.info("server")["process_id"]), signal.SIGKILL)
            await until(lambda: nodes.owner(0, replica) == replica)
            await until(lambda: Queue(wire).add_address(flow.accepted[0], "nobody"))
            stack.enter_context(nodes.server(doomed))
            await flow.more(30)
            records = await flow.all_done()
        await wire.close()
    assert flow.refused
    assert [tokens_of(record) for record in records] == [list(range(1, TOKENS + 1))] * len(records)
