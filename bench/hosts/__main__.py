"""`python -m bench.hosts`: faults of whole hosts and of the network between them, with Penstock's images on podman.

It needs root, podman, nft, nsenter, and the images localhost/penstock-ROLE of `make images`. Exits 1 if any row fails.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from bench import report
from bench.chaos.report import as_document, merged, small, what_failed
from bench.chaos.stage import FaultRow, RowOutcome, play_all
from bench.hosts.containers import CONFINED, PODMAN, STORE_IMAGE, TAG, Failed, networks, run
from bench.hosts.rows import ROWS
from bench.program import BenchProgram, Option, ProgramRun, check_names

OUT = report.RESULTS / "hosts.json"
COLUMNS = report.columns("""
    fault: fault; trials: trials; bad: bad; refused: refused; broken: broken; p50: p50 ms; p99: p99 ms; verdict: verdict
""")
"""Narrow enough for 80 columns. Bad: lost, doubled, spliced, and wrong ends and answers, all together."""


def _run(run_: ProgramRun) -> int:
    known = {row.id: row for row in ROWS}
    names = run_.args.rows.split(",") if run_.args.rows else list(known)
    check_names("row", names, known)
    folder = Path(tempfile.mkdtemp(prefix="penstock-hosts-"))
    outcomes, seconds, versions = asyncio.run(_play([known[name] for name in names], folder, run_))
    found = as_document(outcomes, seconds) | versions
    Console(width=80, highlight=False).print(report.table(table(found)))
    out = run_.args.out
    before = msgspec.json.decode(out.read_bytes()) if out.exists() else None
    report.write(out, small(found if before is None else merged(before, found, whole=not run_.args.rows)))
    failed = [outcome for outcome in outcomes if not outcome.passed]
    for outcome in failed:
        run_.console.print(what_failed(outcome), soft_wrap=True, markup=False)
    if not failed:
        shutil.rmtree(folder)
    return int(bool(failed))


async def _play(
    rows: Sequence[FaultRow], folder: Path, run_: ProgramRun
) -> tuple[list[RowOutcome], float, dict[str, str]]:
    """One row after the other: all use the same addresses."""
    label = f'{{{{index .Config.Labels "{report.REVISION}"}}}}'
    images = [f"localhost/penstock-{role}:{TAG}" for role in ("api", "worker", "scheduler", "offline")]
    built = [await run(*PODMAN, "image", "inspect", "--format", label, image) for image in images]
    if other := report.of_another_tree(dict(zip(images, built, strict=True))):
        raise Failed(other)
    versions = {
        "podman": (await run(*PODMAN, "--version")).split()[-1],
        "store": (await run(*PODMAN, "run", "--rm", *CONFINED, STORE_IMAGE, "redis-server", "--version")).partition(
            " sha"
        )[0],
    }
    async with networks():
        outcomes, seconds = await play_all(rows, folder, run_.args.times, 1, run_.console)
    return outcomes, seconds, versions


def table(found: dict[str, object]) -> report.Report:
    rows = []
    for fault in found["faults"]:  # type: ignore[attr-defined]
        bad = sum(fault[kind] for kind in ("lost", "doubled", "spliced", "wrong_ends", "wrong_answers"))
        rows.append(
            {
                "fault": f"{fault['id']} {fault['title']}",
                "bad": bad,
                "p50": fault["stall_p50_ms"],
                "p99": fault["stall_p99_ms"],
                "verdict": "pass" if fault["passed"] else "FAIL",
                **{key: fault[key] for key in ("trials", "refused", "broken")},
            }
        )
    return report.Report(name="hosts", title="faults between hosts", command="", columns=COLUMNS, rows=rows)


main = BenchProgram("python -m bench.hosts", __doc__, _run, Failed, FileNotFoundError).taking(
    Option("--rows", help="only these, e.g. H01,H02 (default: all)"),
    Option("--times", type=float, default=1, help="trials of each row, times this; 0: two of each"),
    Option("--out", type=Path, default=OUT, help="where the figures go"),
)

if __name__ == "__main__":
    main.exit()
