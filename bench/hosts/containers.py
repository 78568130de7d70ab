"""Hosts: containers of podman on two networks, each of which may vanish without a word, and networks that part.

A host vanishes like one whose cable is pulled: its interface goes down first, so that no peer is told (no FIN, no RST),
then its processes are killed. It comes back with its disk and its address. Root only: interfaces and packets of others.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from bench.chaos.cluster import PenstockCluster
from bench.chaos.history import ClientHistory
from bench.chaos.processes import ManagedProcess, RedisServer
from bench.chaos.replicated import sentinel_lines
from streaming.errors import Unavailable
from streaming.fleet.processes import Fleet

FRONT, BACK = "penstock-hosts-front", "penstock-hosts-back"
SUBNETS = {FRONT: "10.123.40.", BACK: "10.123.41."}
TABLE = ("inet", "penstock_hosts")
CHAIN, FENCE, DOOR = (*TABLE, "forward"), (*TABLE, "fence"), (*TABLE, "door")
HOSTS = f"{SUBNETS[FRONT]}0/23"
"""Both subnets."""
REDIS, SENTINEL = 6379, 26379
TAG = "0.1.0"
"""Of the images of the roles."""
PODMAN = [
    "podman",
    *([] if Path("/run/systemd/system").is_dir() else ["--runtime", "runc", "--cgroup-manager", "cgroupfs"]),
]
"""Without systemd nobody delegates control groups, which podman's other runtime asks for."""
REMOVALS = 10
STORE_IMAGE = "localhost/penstock-valkey:stand-in"
CONFINED = [
    *("--read-only", "--read-only-tmpfs", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
    *("--ulimit", "nofile=8192:8192", "--ulimit", "nproc=4096:4096", "--no-healthcheck"),
]
"""What docker/compose asks of every container, and limits that a machine may not give by itself."""


class Failed(Exception):
    """A command of this machine did not do what it should."""


async def run(*words: str) -> str:
    """What a command says. Raises Failed."""
    child = await asyncio.create_subprocess_exec(*words, stdout=-1, stderr=-1)
    said, error = await child.communicate()
    if child.returncode:
        raise Failed(f"{' '.join(words[:4])}: {error.decode().strip().splitlines()[-1:]}")
    return said.decode().strip()


@asynccontextmanager
async def networks() -> AsyncIterator[None]:
    """The two networks, and a table of packets that cuts the way between them on demand, and that to anything else
    always. The stores ask for no password: of this machine's users only root, who runs this, reaches a host."""
    await _remove()  # of a run that was killed, its drops too
    try:
        for name, subnet in SUBNETS.items():
            await run(*PODMAN, "network", "create", "--subnet", f"{subnet}0/24", name)
        await run("nft", "add", "table", *TABLE)
        for chain in (CHAIN, FENCE):
            await run("nft", "add", "chain", *chain, "{ type filter hook forward priority -10; }")
        await run("nft", "add", "rule", *FENCE, "ip", "saddr", HOSTS, "ip", "daddr", "!=", HOSTS, "drop")
        await run("nft", "add", "rule", *FENCE, "ip", "daddr", HOSTS, "ip", "saddr", "!=", HOSTS, "drop")
        await run("nft", "add", "chain", *DOOR, "{ type filter hook output priority 0; }")
        await run("nft", "add", "rule", *DOOR, "ip", "daddr", HOSTS, "meta", "skuid", "!=", "0", "drop")
        yield
    finally:
        if problems := await _remove():
            raise problems[0]


async def _remove() -> list[Failed]:
    """Each thing by itself, whatever becomes of the others."""
    problems = []
    for words in (
        ("nft", "delete", "table", *TABLE),
        *((*PODMAN, "network", "rm", "--force", name) for name in SUBNETS),
    ):
        try:
            await run(*words)
        except Failed as error:
            problems.append(error)
    return problems


async def part(*addresses: str) -> None:
    """Drop whatever goes from one network to the other; or only what these addresses send or are sent."""
    for place in addresses or (f"{SUBNETS[BACK]}0/24",):
        for end in ("saddr", "daddr"):
            await run("nft", "add", "rule", *CHAIN, "ip", end, place, "counter", "drop")


async def heal() -> None:
    """Let everything through again."""
    await run("nft", "flush", "chain", *CHAIN)


class Host(ManagedProcess):
    """A container with an address of its own; the process that is kept is the client that is attached to it."""

    def __init__(
        self,
        name: str,
        folder: Path,
        image: str,
        network: str,
        number: int,
        *,
        command: Sequence[str] = (),
        options: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        port: int = 0,
    ) -> None:
        self.address, self.container = f"{SUBNETS[network]}{number}", f"penstock-hosts-{name}"
        given = [word for key, value in (environ or {}).items() for word in ("--env", f"{key}={value}")]
        published = ["--publish", f"127.0.0.1:{port}:8000"] if port else []
        self._create = (
            *(*PODMAN, "create", "--replace", "--name", self.container, "--hostname", name),
            *("--network", network, "--ip", self.address, *CONFINED, *given, *published, *options, image, *command),
        )
        # The clients' port is kept where a cluster looks for it.
        known = {**os.environ, "PENSTOCK_API_PORT": str(port)}
        super().__init__(name, [*PODMAN, "start", "--attach", self.container], known, folder)

    async def start(self) -> None:
        await run(*self._create)
        await super().start()

    async def vanish(self) -> None:
        """Off the network, then dead, until `back`. This end is none that the process made by itself."""
        lives = len(self.exits)
        self.patient.clear()
        pid = await run(*PODMAN, "inspect", "--format", "{{.State.Pid}}", self.container)
        await run("nsenter", "--target", pid, "--net", "ip", "link", "set", "eth0", "down")
        await run(*PODMAN, "kill", "--signal", str(int(signal.SIGKILL)), self.container)
        await self.exited(lives + 1)
        del self.exits[lives]

    async def back(self) -> None:
        """The same disk, the same address, processes that begin anew."""
        self.patient.set()

    async def end(self) -> None:
        await super().end()
        for _ in range(REMOVALS):  # podman may still be busy with its end
            with suppress(Failed):
                await run(*PODMAN, "rm", "--force", "--time", "0", self.container)
                return
            await asyncio.sleep(0.5)


class StoreHost(RedisServer):
    """A host with one server, and with a Sentinel that watches `primary`, if one is named."""

    def __init__(self, folder: Path, number: int, *options: str, primary: RedisServer | None = None) -> None:
        name = f"store-{number}"
        super().__init__(folder, name, "protected-mode no", "bind 0.0.0.0", f"port {REDIS}", *options)
        self._number, self.port, self.host = number, REDIS, f"{SUBNETS[FRONT]}{100 + number}"
        self.child: Host = self._host(f"exec redis-server {self.folder}/server.conf")
        if primary is not None:
            self.watch(primary)

    def watch(self, primary: RedisServer) -> None:
        """Run a Sentinel beside the server."""
        lines = [*sentinel_lines(SENTINEL, str(self.folder), primary), "protected-mode no"]
        (self.folder / "sentinel.conf").write_text("\n".join(lines))
        server, sentinel = self.folder / "server.conf", self.folder / "sentinel.conf"
        self.child = self._host(f"redis-server {server} & exec redis-server {sentinel} --sentinel")

    def _host(self, script: str) -> Host:
        options = (
            "--volume",
            f"{self.folder}:{self.folder}:U",
            "--entrypoint",
            "sh",
        )  # U: it belongs to the image's user
        return Host(
            self.folder.name,
            self.folder.parent,
            STORE_IMAGE,
            FRONT,
            100 + self._number,
            command=("-c", script),
            options=options,
        )

    async def kill(self) -> None:
        await self.child.vanish()


class HostCluster(PenstockCluster):
    """Penstock with every process on a host of its own: API, schedulers and offline process beside the store, and the
    workers on the other network. `clocks`: by how many seconds the clocks of hosts are wrong, with libfaketime's place.
    `offline`: without a broker of its own, there is none in front of a cluster."""

    def __init__(
        self,
        folder: Path,
        history: ClientHistory,
        url: str,
        *,
        clocks: tuple[Mapping[str, str], str] = ({}, ""),
        **options: Any,
    ) -> None:
        self._hosts, self._clocks = 10, clocks
        super().__init__(folder, history, url, **options)
        self.others = [self._child("scheduler-2", "scheduler")]
        if not url.startswith("redis+cluster"):
            self.others.append(self._child("offline-1", "offline"))

    @property
    def children(self) -> list[ManagedProcess]:
        return [*super().children, *self.others]

    @property
    def schedulers(self) -> list[ManagedProcess]:
        return [self.scheduler, self.others[0]]

    def _child(self, name: str, role: str, *args: str, **environ: str) -> Host:
        self._hosts += 1
        port = int(environ.pop("PENSTOCK_API_PORT", "0"))
        given = {key: value for key, value in {**self.environ, **environ}.items() if key.startswith("PENSTOCK_")}
        del given["PENSTOCK_TELEMETRY_METRICS_DIR"]
        options = ["--volume", f"{self.folder / 'penstock.toml'}:/etc/penstock/penstock.toml:ro"]
        if role in ("api", "offline"):
            files = self.folder / "files"  # which these hosts share
            files.mkdir(exist_ok=True)
            files.chmod(0o777)
            options += ["--volume", f"{files}:/var/lib/penstock/files"]
        clocks, library = self._clocks
        if name in clocks:
            given |= {"LD_PRELOAD": "/clock.so", "FAKETIME": clocks[name], "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
            options += ["--volume", f"{library}:/clock.so:ro"]
        return Host(
            name,
            self.folder,
            f"localhost/penstock-{'worker' if role == 'workers' else role}:{TAG}",
            BACK if role == "workers" else FRONT,
            self._hosts,
            command=args,
            options=options,
            environ=given,
            port=port,
        )

    async def _workers_ready(self) -> bool:
        """Every kept worker is known by the lease of its present life."""
        try:
            found = {p.lease for p in await Fleet(self.wire).processes("worker") if p.state == "ready"}
        except Unavailable:
            return False
        return all(worker.lease() in found for worker in self.workers if worker.kept)
