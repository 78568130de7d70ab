"""The rows between hosts: each judge passes a fault that did what it is for, and fails one that did nothing, a long
silence, too many refusals, and processes that end by themselves. Playing the rows is `make test-hosts`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import told_streams
from rich.console import Console

from bench.chaos.asks import Ask
from bench.chaos.history import ClientHistory, of_kind
from bench.chaos.report import as_document
from bench.chaos.stage import RowOutcome, play_row
from bench.hosts import rows
from bench.hosts.__main__ import table
from bench.hosts.containers import SUBNETS, Failed, networks
from bench.hosts.rows import ROWS
from bench.report import table as rendered

AWAY_S = 0.1


@dataclass
class World:
    """What faults do in it, and what its clients then see."""

    bites: bool = True
    silence_s: float = 0.0
    refused: int = 0
    served: bool = False
    """While nothing should be."""
    exits: dict[str, Sequence[int]] = field(default_factory=dict)
    faults: int = 0
    broken: bool = False

    async def hurt(self, *_: object) -> None:
        self.faults += self.bites


class FakeHost:
    url = "redis://store"

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.address, self.child = world, name, "", self
        self.exits, self.kill = [*world.exits.get(name, ())], world.hurt

    async def vanish(self) -> None:
        await self.world.hurt()
        self.world.broken = self.world.bites and self.name.startswith("api")

    async def nothing(self) -> None:
        pass

    start = back = end = nothing


class FakeCluster:
    def __init__(self, world: World, history: ClientHistory) -> None:
        self.world, self.history, self.number = world, history, 0
        self.apis, self.workers = ([FakeHost(world, f"{role}-{n}") for n in (1, 2)] for role in ("api", "worker"))
        self.children = [*self.apis, *self.workers]

    def begin(self, asks: Iterable[Ask]) -> list[tuple[Any, Any]]:
        found, now, events = [], self.history.now(), self.history.events
        for ask in asks:
            self.number += 1
            found.append((SimpleNamespace(req=self.number, job=f"job_{self.number}"), None))
            if " late" not in ask.prompt:
                events += told_streams.begun(self.number, now)
                continue
            events += [told_streams.asked(self.number, now)]
            events += [told_streams.refused(self.number, now)] * self.world.refused
            if self.world.served:
                events += [told_streams.taken(self.number, now + 0.8 * AWAY_S)]
        return found

    async def finish(self, begun: Sequence[tuple[Any, Any]]) -> None:
        now, events = self.history.now() + self.world.silence_s, self.history.events
        first = {each["req"] for each in of_kind(events, "token")}
        for told, _ in begun:
            events += [{"t": now, "event": "cut", "req": told.req, "why": ""}] if self.world.broken else []
            events += [] if told.req in first else [told_streams.taken(told.req, now)]
            events += told_streams.tokens(told.req, now, told.req in first)
            events += told_streams.ended(told.req, now, 2 if self.world.faults else 1)
        self.world.broken = False

    async def holders(self) -> list[FakeHost]:
        return self.workers

    async def quiet(self) -> None:
        self.history.add("quiet", what="claims", number=0)

    async def nothing(self, *_: object) -> None:
        pass

    start = close = ready = all_begun = nothing


class FakeStore:
    """Another server is the owner after each fault, if there are replicas."""

    url = FakeHost.url

    def __init__(self, world: World, *, replicas: bool) -> None:
        self.world, self.servers, self.replicas = world, [FakeHost(world, f"store-{n}") for n in (1, 2)], replicas

    async def owner(self, *_: int) -> FakeHost:
        return self.servers[self.world.faults % 2 if self.replicas else 0]

    async def nothing(self) -> None:
        pass

    primary = owner
    start = close = settled = nothing


def played(row: str, world: World, folder: Path, patch: pytest.MonkeyPatch) -> RowOutcome:
    async def begun(_: object, cluster: FakeCluster, wanted: Iterable[Ask]) -> list[tuple[Any, Any]]:
        return cluster.begin(wanted)

    for name, fake in {
        "AWAY_S": AWAY_S,
        "STREAMS": 4,
        "begun": begun,
        "part": world.hurt,
        "heal": FakeHost(world, "").nothing,
        "StoreHost": lambda folder, n, *_: FakeHost(world, f"store-{n}"),
        "HostCluster": lambda folder, history, *_, **__: FakeCluster(world, history),
        "sentinels": lambda _: FakeStore(world, replicas=True),
        "ClusterNodes": lambda servers, _: FakeStore(world, replicas=len(servers) > 3),
    }.items():
        patch.setattr(rows, name, fake)
    (found,) = (each for each in ROWS if each.id == row)
    return asyncio.run(play_row(found, folder, 0))


PLAYED = ("H02", "H03", "H04", "H05", "H06", "H07")


@pytest.mark.parametrize("row", PLAYED)
def test_a_fault_that_does_what_it_is_for_passes(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = played(row, World(refused=2 if row == "H07" else 0), tmp_path, monkeypatch)
    assert outcome.passed, (outcome.wrong, outcome.violations)


WRONG = [
    *((row, World(bites=False)) for row in PLAYED if row != "H07"),
    ("H07", World(served=True)),
    *((row, World(silence_s=120)) for row in PLAYED),
    *((row, World(refused=1 if row in ("H02", "H03", "H04") else 5)) for row in PLAYED),
    ("H02", World(exits={"worker-1": [137]})),
    ("H02", World(exits={"worker-1": [75] * 9})),
    ("H02", World(exits={"api-1": [75]})),
]


@pytest.mark.parametrize(("row", "world"), WRONG, ids=str)
def test_a_wrong_history_fails(row: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not played(row, world, tmp_path, monkeypatch).passed


def test_every_row_and_its_verdict_is_told_in_80_columns() -> None:
    outcomes = [
        RowOutcome(
            row,
            4,
            0,
            [],
            dict.fromkeys(("refused", "unanswered", "broken"), 1000),
            [],
            [12345.0],
            2000,
            {},
            9.0,
            Path(),
        )
        for row in ROWS
    ]
    outcomes[0].wrong.append("a criterion")
    page = StringIO()
    Console(width=80, file=page).print(rendered(table(as_document(outcomes, 9.0))))
    lines = page.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert all(sum(f"{row.id} " in line for line in lines) == 1 and row.proves for row in ROWS)
    assert sum("FAIL" in line for line in lines) == 1 and sum("pass" in line for line in lines) == len(ROWS) - 1


@pytest.mark.parametrize("broken", ["table", *SUBNETS])
async def test_what_a_run_made_is_removed_whatever_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """With commands that only write down what they are asked: what an earlier run left goes first, then its own, and
    one that cannot be removed keeps no other."""
    log = tmp_path / "log"
    for name in ("nft", "podman"):
        lines = f'echo "{name} $*" >> {log}', f'case "$*" in *delete*{broken}*|*rm*{broken}) exit 1 ;; esac'
        (tmp_path / name).write_text("\n".join(["#!/bin/sh", *lines]))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def removals() -> set[str]:
        words = [line.split() for line in log.read_text().splitlines()]
        return {line[2] if "delete" in line else line[-1] for line in words if {"delete", "rm"} & set(line)}

    before: set[str] = set()
    with pytest.raises(Failed):
        async with networks():
            before = removals()
            log.unlink()
    assert before == removals() == {"table", *SUBNETS}
