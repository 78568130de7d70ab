"""How much memory a large file costs: while it is uploaded, read, and its answers are put together."""

from __future__ import annotations

from pathlib import Path

import msgspec

from bench.batch.door import BatchClient, InputLine, write
from bench.penstock import MODEL, Penstock

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
        door, pids = BatchClient(penstock.url), penstock.processes.pids()
        door.ended(door.begin(small), 60)
        before = {name: _peak_mib(pids[name]) for name in ("api-1", "offline-1")}
        batch = door.ended(door.begin(path), 300)
        outputs = 0
        for place, output in enumerate(door.lines(batch["output_file_id"]), 1):
            outputs += output["line"] == place
        after = {name: _peak_mib(pids[name]) for name in before}
        size = door.size(batch["output_file_id"])
        door.close()
    return MemoryGrowth(
        lines=lines,
        input_mb=path.stat().st_size / 1e6,
        output_mb=size / 1e6,
        api_mib=after["api-1"] - before["api-1"],
        offline_mib=after["offline-1"] - before["offline-1"],
        doubled_or_lost=lines - outputs,
    )


def _peak_mib(pid: int) -> float:
    """The most memory a process has had."""
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("VmHWM")) / 1024
