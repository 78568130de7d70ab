"""Share of the engine that a batch uses when it is alone, its effect on interactive requests, and its memory."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from bench.batch.client import BatchClient, InputLine, write
from bench.gateway.systems import processes_in, start_engine_server
from bench.load.plan import LoadPlan, StreamReading, measure
from bench.penstock import MODEL, Penstock
from bench.processes import status_mib
from bench.stats import Spread
from workers.engines.sim.settings import SimSettings

STEP_MS, PREFILL_MS, SLOTS = 15.0, 25.0, 256
MIN_TOKENS, MAX_TOKENS = 64, 192
STREAMS, CHAT_TOKENS = 4, 16
SETTINGS: dict[str, object] = {"sim.step_ms": STEP_MS, "sim.prefill_ms": PREFILL_MS, "sim.slots": SLOTS}


def some_lines(count: int, seed: int) -> list[InputLine]:
    """Answers of many lengths, as people ask for."""
    chance = random.Random(seed)  # noqa: S311 - so that a run can be repeated
    return [
        InputLine(n, f"line {n} of the batch", chance.randint(MIN_TOKENS, MAX_TOKENS), MODEL)
        for n in range(1, count + 1)
    ]


def capacity(lines: list[InputLine]) -> float:
    """Lines a second of one engine whose slots are all taken all the time: a slot is a line's for the steps of its
    prefill and one step per token."""
    steps = math.ceil(PREFILL_MS / STEP_MS) + sum(line.tokens for line in lines) / len(lines)
    return SLOTS / (steps * STEP_MS / 1000)


class LinePace(msgspec.Struct, frozen=True):
    """Lines a second, from the tenth of the batch that ended first to the tenth that ended last."""

    lines: int
    per_second: float
    capacity: float
    whole_s: float
    cpu_s: dict[str, float]

    @property
    def share(self) -> float:
        return self.per_second / self.capacity


def alone(folder: Path, lines: int, seed: int) -> LinePace:
    """One worker, nothing else to do."""
    asked = some_lines(lines, seed)
    path = write(folder / "input.jsonl", asked)
    with Penstock(folder, offline=1, settings=SETTINGS) as penstock:
        client = BatchClient(penstock.url)
        cpu = penstock.processes.cpu_s()
        began = time.monotonic()
        batch_id = client.begin(path, "none")
        marks: list[tuple[float, int]] = []
        while (batch := client.show(batch_id))["status"] in ("validating", "in_progress"):
            counts = batch["request_counts"]
            if not marks or counts["completed"] > marks[-1][1]:
                marks.append((time.monotonic(), counts["completed"]))
            time.sleep(0.05)
        whole_s = time.monotonic() - began
        client.ended(batch_id, 60)
        client.close()
        after = penstock.processes.cpu_s()
    spent = {name: after[name] - cpu.get(name, 0.0) for name in after}
    return LinePace(lines, _rate(marks, lines), capacity(asked), whole_s, spent)


def _rate(marks: list[tuple[float, int]], lines: int) -> float:
    steady = [mark for mark in marks if lines * 0.1 <= mark[1] <= lines * 0.9]
    (first, before), (last, after) = steady[0], steady[-1]
    return (after - before) / (last - first)


class Interference(msgspec.Struct, frozen=True):
    """Time to first token of light interactive traffic, in ms."""

    alone: Spread
    beside: Spread
    """Beside a batch that takes all it may have."""
    bare_alone: Spread
    bare_beside: Spread
    """At the same times, of an engine behind a bare server which no batch uses: what the machine did meanwhile."""
    rounds: list[dict[str, Any]]

    @property
    def ratio(self) -> float:
        """Without what the batch's use of the machine did to somebody who has nothing to do with it."""
        return self.beside.p99 / self.alone.p99 / max(1.0, self.bare_beside.p99 / self.bare_alone.p99)


def interference(folder: Path, requests: int, rounds: int) -> Interference:
    """Rounds of people alone and people beside a batch, by turns, on one set of processes."""
    found: list[dict[str, Any]] = []
    path = write(folder / "input.jsonl", some_lines(20_000, 1))
    engine = SimSettings(step_ms=STEP_MS, prefill_ms=PREFILL_MS, slots=SLOTS)
    with Penstock(folder, offline=1, settings=SETTINGS) as penstock, processes_in(folder / "bare") as bare:
        ports = (penstock.port, start_engine_server(bare, engine))
        client = BatchClient(penstock.url)
        for number in range(rounds):
            quiet, bare_quiet = _people(ports, requests)
            batch_id = client.begin(path, "none")
            _wait_until_it_saturates(client, batch_id)
            beside, bare_beside = _people(ports, requests)
            batch = client.show(batch_id)
            client.cancel(batch_id)
            client.ended(batch_id, 120)
            found.append({
                "round": number + 1, "alone_p50": quiet.ttft.p50, "alone_p99": quiet.ttft.p99,
                "beside_p50": beside.ttft.p50, "beside_p99": beside.ttft.p99,
                "bare_alone_p50": bare_quiet.ttft.p50, "bare_alone_p99": bare_quiet.ttft.p99,
                "bare_beside_p50": bare_beside.ttft.p50, "bare_beside_p99": bare_beside.ttft.p99,
                "wrong": quiet.errors + beside.errors,
                "batch_was_running": batch["status"] == "in_progress" and batch["lines_in_queue"] >= SLOTS,
            })  # fmt: skip
        client.close()
    return Interference(
        alone=_middle(found, "alone"),
        beside=_middle(found, "beside"),
        bare_alone=_middle(found, "bare_alone"),
        bare_beside=_middle(found, "bare_beside"),
        rounds=found,
    )


def _people(ports: Sequence[int], requests: int) -> list[StreamReading]:
    """At each of the ports at the same time."""
    plans = [
        LoadPlan(port=port, model=MODEL, streams=STREAMS, requests=requests, tokens=CHAT_TOKENS, limit_s=120)
        for port in ports
    ]
    with ThreadPoolExecutor(len(plans)) as threads:
        return list(threads.map(measure, plans))


def _wait_until_it_saturates(client: BatchClient, batch_id: str) -> None:
    deadline = time.monotonic() + 60
    while client.show(batch_id)["request_counts"]["completed"] < SLOTS:
        if time.monotonic() > deadline:
            raise TimeoutError("the batch does not get going")
        time.sleep(0.2)


def _middle(rounds: list[dict[str, Any]], what: str) -> Spread:
    """The median of the rounds: one stall of the machine is no property of ours."""
    p50, p99 = (sorted(each[f"{what}_{name}"] for each in rounds)[len(rounds) // 2] for name in ("p50", "p99"))
    return Spread(count=len(rounds), p50=p50, p99=p99)


DISTINCT = 25
PADDING = 3800


class MemoryGrowth(msgspec.Struct, frozen=True):
    """Sizes in MB, growth of the most a process ever had in MiB."""

    lines: int
    input_mb: float
    output_mb: float
    api_mib: float
    offline_mib: float
    doubled_or_lost: int


def memory(folder: Path, lines: int) -> MemoryGrowth:
    """Most lines are equal, so that the files are large and the work is not. Raises OSError where the kernel does not
    tell."""
    asked = [InputLine(n, f"{n % DISTINCT} {'x' * PADDING}", 300, MODEL) for n in range(1, lines + 1)]
    path = write(folder / "input.jsonl", asked, temperature=0)
    small = write(folder / "small.jsonl", [InputLine(1, "hello", 3, MODEL)])
    with Penstock(folder, offline=1, settings={"sim.step_ms": 1}) as penstock:
        client, pids = BatchClient(penstock.url), penstock.processes.pids()
        client.ended(client.begin(small), 60)
        before = {name: status_mib(pids[name], "VmHWM") for name in ("api-1", "offline-1")}
        batch = client.ended(client.begin(path), 300)
        outputs = 0
        for place, output in enumerate(client.lines(batch["output_file_id"]), 1):
            outputs += output["line"] == place
        after = {name: status_mib(pids[name], "VmHWM") for name in before}
        size = client.size(batch["output_file_id"])
        client.close()
    return MemoryGrowth(
        lines=lines,
        input_mb=path.stat().st_size / 1e6,
        output_mb=size / 1e6,
        api_mib=after["api-1"] - before["api-1"],
        offline_mib=after["offline-1"] - before["offline-1"],
        doubled_or_lost=lines - outputs,
    )
