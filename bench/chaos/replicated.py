"""Servers that stand in for each other: a primary with two replicas and three Sentinels; a cluster with replicas."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from redis.crc import key_slot
from redis.exceptions import RedisError

from bench.chaos.processes import ManagedProcess, RedisServer, command, until
from bench.penstock import find_server
from bench.ports import free_port
from streaming.keys import prefix

SERVICE = "main"
DOWN_MS = 1000
SLOTS = 16384
GUARD = ("min-replicas-to-write 1", "min-replicas-max-lag 10")
"""A primary that is cut off from its replicas does no work that would be thrown away."""


class Sentinels:
    """Six processes; `primary` is whoever the Sentinels name."""

    def __init__(self, folder: Path) -> None:
        first = RedisServer(folder, "server-1", *GUARD)
        follow = f"replicaof 127.0.0.1 {first.port}"
        self.servers = [first, *(RedisServer(folder, f"server-{n}", *GUARD, follow) for n in (2, 3))]
        self.ports = [free_port() for _ in range(3)]
        self._sentinels = [self._sentinel(folder, port) for port in self.ports]

    def _sentinel(self, folder: Path, port: int) -> ManagedProcess:
        place = folder / f"sentinel-{port}"
        place.mkdir()
        lines = (
            f"port {port}",
            "bind 127.0.0.1",
            f"dir {place}",
            f"sentinel monitor {SERVICE} 127.0.0.1 {self.servers[0].port} 2",
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_MS}",
            f"sentinel failover-timeout {SERVICE} 3000",
            f"sentinel parallel-syncs {SERVICE} 2",
        )
        (place / "sentinel.conf").write_text("\n".join(lines))
        return ManagedProcess(
            f"sentinel-{port}", [find_server(), str(place / "sentinel.conf"), "--sentinel"], os.environ, folder
        )

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in self.ports)}/{SERVICE}"

    async def start(self) -> None:
        """Until all know each other."""
        await asyncio.gather(*(server.start() for server in self.servers))
        await asyncio.gather(*(child.start() for child in self._sentinels))
        await self.settled()

    async def settled(self) -> None:
        """Until the primary has both replicas, and every Sentinel names it and knows the others."""
        await until(self._is_settled, 60, 0.1)

    async def _is_settled(self) -> bool:
        try:
            named = {await self._named(port) for port in self.ports}
            if len(named) != 1:
                return False
            info = await self._at(named.pop()).command("INFO", "replication")
            return (
                str(info["role"]) == "master"
                and int(info["connected_slaves"]) == 2
                and info["min_slaves_good_slaves"] == 2
            )
        except (RedisError, OSError, LookupError):
            return False

    async def _named(self, port: int) -> int:
        found = await command(port, "SENTINEL", "MASTER", SERVICE)
        known = found if isinstance(found, dict) else dict(zip(found[::2], found[1::2], strict=True))
        if int(_field(known, "num-other-sentinels")) != 2 or int(_field(known, "num-slaves")) != 2:
            raise LookupError
        return int(_field(known, "port"))

    def _at(self, port: int) -> RedisServer:
        return {server.port: server for server in self.servers}[port]

    async def primary(self) -> RedisServer:
        """As the first Sentinel that answers names it."""
        address = await command(self.ports[0], "SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        return self._at(int(address[1]))

    async def close(self) -> None:
        """End all six."""
        await asyncio.gather(*(child.end() for child in self._sentinels))
        await asyncio.gather(*(server.child.end() for server in self.servers))


def _field(known: dict[Any, Any], name: str) -> Any:
    return known.get(name, known.get(name.encode()))


class ClusterNodes:
    """Three primaries and a replica of each."""

    def __init__(self, folder: Path) -> None:
        self._bus = [free_port() for _ in range(6)]
        self.servers = [
            RedisServer(
                folder,
                f"node-{number}",
                "cluster-enabled yes",
                f"cluster-port {bus}",
                f"cluster-node-timeout {DOWN_MS}",
                "cluster-replica-validity-factor 0",
            )
            for number, bus in enumerate(self._bus, 1)
        ]

    @property
    def url(self) -> str:
        return f"redis+cluster://{','.join(f'127.0.0.1:{server.port}' for server in self.servers)}"

    async def start(self) -> None:
        """Until every slot has a primary with a replica."""
        await asyncio.gather(*(server.start() for server in self.servers))
        bounds = [SLOTS * number // 3 for number in range(4)]
        for number, server in enumerate(self.servers[:3]):
            await server.command("CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
            await server.command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        first = self.servers[0]
        for server in self.servers[1:]:
            await server.command("CLUSTER", "MEET", "127.0.0.1", first.port, self._bus[0])
        await until(self._all_met, 30, 0.1)
        for number, server in enumerate(self.servers[3:]):
            await server.command("CLUSTER", "REPLICATE", _text(await self.servers[number].command("CLUSTER", "MYID")))
        await self.settled()

    async def _all_met(self) -> bool:
        return all(["cluster_known_nodes:6\r" in await self._info(server) for server in self.servers])

    async def settled(self) -> None:
        """Until every node sees three primaries that serve, each with a replica in step."""
        await until(self._is_settled, 60, 0.1)

    async def _is_settled(self) -> bool:
        try:
            infos = [await self._info(server) for server in self.servers]
            roles = [await server.command("INFO", "replication") for server in self.servers]
        except (RedisError, OSError):
            return False
        synced = [role for role in roles if role["role"] == "slave" and role["master_link_status"] == "up"]
        return all("cluster_state:ok" in info for info in infos) and len(synced) == 3

    async def _info(self, server: RedisServer) -> str:
        return _text(await server.command("CLUSTER", "INFO"))

    async def owner(self, partition: int) -> RedisServer:
        """The primary that holds a partition now."""
        slot = key_slot(prefix(partition).encode())
        for server in self.servers:
            try:
                ranges = await server.command("CLUSTER", "SLOTS")
            except (RedisError, OSError):
                continue
            port = next(int(primary[1]) for first, last, primary, *_ in _rows(ranges) if first <= slot <= last)
            return next(server for server in self.servers if server.port == port)
        raise RuntimeError("no node answers")

    async def move(self, partition: int) -> None:
        """The slot of a partition to another primary, key by key, as a resharding does it."""
        slot, source = key_slot(prefix(partition).encode()), await self.owner(partition)
        others = [await self.owner(other) for other in range(16)]
        target = next(server for server in others if server is not source)
        source_id, target_id = [_text(await server.command("CLUSTER", "MYID")) for server in (source, target)]
        await target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
        await source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
        while keys := await source.command("CLUSTER", "GETKEYSINSLOT", slot, 100):
            await source.command("MIGRATE", "127.0.0.1", target.port, "", 0, 2000, "KEYS", *keys)
        for server in (target, source):
            await server.command("CLUSTER", "SETSLOT", slot, "NODE", target_id)

    async def close(self) -> None:
        """End all six."""
        await asyncio.gather(*(server.child.end() for server in self.servers))


def _text(answer: Any) -> str:
    """CLUSTER INFO comes as bytes, as text, or parsed."""
    if isinstance(answer, dict):
        return "".join(f"{key}:{value}\r\n" for key, value in answer.items())
    return answer.decode() if isinstance(answer, bytes) else str(answer)


def _rows(answer: Any) -> list[tuple[int, int, tuple[Any, int]]]:
    """CLUSTER SLOTS, as the server gives it or as the library parses it."""
    if isinstance(answer, dict):
        return [(first, last, found["primary"]) for (first, last), found in answer.items()]
    return list(answer)
