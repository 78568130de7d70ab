"""Servers that stand in for each other: a primary with two replicas and three Sentinels; a cluster with replicas."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from redis.crc import key_slot
from redis.exceptions import RedisError

from bench.chaos.http import HOST
from bench.chaos.processes import ManagedProcess, RedisServer, command, until
from bench.penstock import find_server
from bench.ports import free_port
from streaming.keys import prefix

SERVICE = "main"
DOWN_MS = 1000
SLOTS = 16384
GUARD = ("min-replicas-to-write 1", "min-replicas-max-lag 10")
"""A primary that is cut off from its replicas does no work that would be thrown away."""


Address: TypeAlias = tuple[str, int]


def sentinel_lines(port: int, folder: str, primary: RedisServer) -> list[str]:
    """The configuration of one Sentinel, with a folder that it may write to."""
    return [
        f"port {port}",
        f"dir {folder}",
        f"sentinel monitor {SERVICE} {primary.host} {primary.port} 2",
        f"sentinel down-after-milliseconds {SERVICE} {DOWN_MS}",
        f"sentinel failover-timeout {SERVICE} 3000",
        f"sentinel parallel-syncs {SERVICE} 2",
    ]


class Sentinels:
    """A primary, two replicas and three Sentinels; `primary` is whoever the Sentinels name. `children`: the Sentinels'
    own processes, where they have some."""

    def __init__(
        self, servers: Sequence[RedisServer], addresses: Sequence[Address], children: Sequence[ManagedProcess] = ()
    ) -> None:
        self.servers, self.addresses, self._children = servers, addresses, children

    @classmethod
    def here(cls, folder: Path) -> Sentinels:
        """Six processes of this machine."""
        first = RedisServer(folder, "server-1", *GUARD)
        follow = f"replicaof {first.host} {first.port}"
        servers = [first, *(RedisServer(folder, f"server-{n}", *GUARD, follow) for n in (2, 3))]
        ports, children = [free_port() for _ in range(3)], []
        for port in ports:
            place = folder / f"sentinel-{port}"
            place.mkdir()
            config = place / "sentinel.conf"
            config.write_text("\n".join([*sentinel_lines(port, str(place), first), f"bind {HOST}"]))
            argv = [find_server(), str(config), "--sentinel"]
            children.append(ManagedProcess(place.name, argv, os.environ, folder))
        return cls(servers, [(HOST, port) for port in ports], children)

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(f'{host}:{port}' for host, port in self.addresses)}/{SERVICE}"

    async def start(self) -> None:
        """Until all know each other."""
        await asyncio.gather(*(server.start() for server in self.servers))
        await asyncio.gather(*(child.start() for child in self._children))
        await self.settled()

    async def settled(self) -> None:
        """Until the primary has both replicas, and every Sentinel names it and knows the others."""
        await until(self._is_settled, 60, 0.1)

    async def _is_settled(self) -> bool:
        try:
            named = {await self._named(*address) for address in self.addresses}
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

    async def _named(self, host: str, port: int) -> Address:
        found = await command(port, "SENTINEL", "MASTER", SERVICE, host=host)
        known = found if isinstance(found, dict) else dict(zip(found[::2], found[1::2], strict=True))
        if int(_field(known, "num-other-sentinels")) != 2 or int(_field(known, "num-slaves")) != 2:
            raise LookupError
        return _text(_field(known, "ip")), int(_field(known, "port"))

    def _at(self, address: Address) -> RedisServer:
        return {(server.host, server.port): server for server in self.servers}[address]

    async def primary(self) -> RedisServer:
        """As the first Sentinel names it."""
        host, port = self.addresses[0]
        address = await command(port, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE, host=host)
        return self._at((_text(address[0]), int(address[1])))

    async def close(self) -> None:
        """End all of them."""
        await asyncio.gather(*(child.end() for child in self._children))
        await asyncio.gather(*(server.child.end() for server in self.servers))


def _field(known: dict[Any, Any], name: str) -> Any:
    return known.get(name, known.get(name.encode()))


NODE = ("cluster-enabled yes", f"cluster-node-timeout {DOWN_MS}", "cluster-replica-validity-factor 0")


class ClusterNodes:
    """Three primaries, and a replica of each behind them if there are six; each with the port of its bus."""

    def __init__(self, servers: Sequence[RedisServer], buses: Sequence[int]) -> None:
        self.servers, self._buses = servers, buses

    @classmethod
    def here(cls, folder: Path) -> ClusterNodes:
        """Six processes of this machine."""
        buses = [free_port() for _ in range(6)]
        return cls(
            [RedisServer(folder, f"node-{n}", *NODE, f"cluster-port {bus}") for n, bus in enumerate(buses)], buses
        )

    @property
    def url(self) -> str:
        return f"redis+cluster://{','.join(f'{server.host}:{server.port}' for server in self.servers)}"

    async def start(self) -> None:
        """Until every slot has a primary with a replica."""
        await asyncio.gather(*(server.start() for server in self.servers))
        bounds = [SLOTS * number // 3 for number in range(4)]
        for number, server in enumerate(self.servers[:3]):
            await server.command("CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
            await server.command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        first = self.servers[0]
        for server in self.servers[1:]:
            await server.command("CLUSTER", "MEET", first.host, first.port, self._buses[0])
        await until(self._all_met, 30, 0.1)
        for number, server in enumerate(self.servers[3:]):
            await server.command("CLUSTER", "REPLICATE", _text(await self.servers[number].command("CLUSTER", "MYID")))
        await self.settled()

    async def _all_met(self) -> bool:
        return all(
            [f"cluster_known_nodes:{len(self.servers)}\r" in await self._info(server) for server in self.servers]
        )

    async def settled(self) -> None:
        """Until every node sees three primaries that serve, and every replica is in step."""
        await until(self._is_settled, 60, 0.1)

    async def _is_settled(self) -> bool:
        try:
            infos = [await self._info(server) for server in self.servers]
            roles = [await server.command("INFO", "replication") for server in self.servers]
        except (RedisError, OSError):
            return False
        synced = [role for role in roles if role["role"] == "slave" and role["master_link_status"] == "up"]
        return all("cluster_state:ok" in info for info in infos) and len(synced) == len(self.servers) - 3

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
            found = next(primary for first, last, primary, *_ in _rows(ranges) if first <= slot <= last)
            address = _text(found[0]), int(found[1])
            return next(server for server in self.servers if (server.host, server.port) == address)
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
            await source.command("MIGRATE", target.host, target.port, "", 0, 2000, "KEYS", *keys)
        for server in (target, source):
            await server.command("CLUSTER", "SETSLOT", slot, "NODE", target_id)

    async def close(self) -> None:
        """End all of them."""
        await asyncio.gather(*(server.child.end() for server in self.servers))


def _text(answer: Any) -> str:
    """CLUSTER INFO comes as bytes, as text, or parsed."""
    if isinstance(answer, dict):
        return "".join(f"{key}:{value}\r\n" for key, value in answer.items())
    return answer.decode() if isinstance(answer, bytes) else str(answer)


def _rows(answer: Any) -> list[tuple[int, int, tuple[Any, Any]]]:
    """CLUSTER SLOTS, as the server gives it or as the library parses it."""
    if isinstance(answer, dict):
        return [(first, last, found["primary"]) for (first, last), found in answer.items()]
    return list(answer)
