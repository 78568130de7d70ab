"""`python -m bench.conformance`: conformance suites of others, against a real Penstock.

Each --suite names a folder outside this tree: one in which npm has installed
@durable-streams/server-conformance-tests, or a checkout of Open Responses with its packages. A case that is not passed
needs a reason in bench/conformance/suites.py. The exit code is 1 if one has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bench.conformance.adapter import serving_streams
from bench.conformance.stream_writer import LEASE_MS, MODEL
from bench.conformance.suites import (
    DURABLE,
    PASSED,
    CaseVerdict,
    SuiteMissing,
    run_durable,
    run_open_responses,
    suite_of,
    version_of,
)
from bench.penstock import MODEL as SIM_MODEL
from bench.penstock import Penstock
from bench.processes import Died
from bench.program import OUT, BenchProgram, Option, ProgramRun, Testbed
from bench.report import Ratio, columns

COLUMNS = columns("""
    suite: suite; version: version; cases: cases; passed: passed; excepted: not passed, with a reason; failed: failed
""")


def row_of(version: str, verdicts: Sequence[CaseVerdict]) -> dict[str, Any]:
    """Count the verdicts of one suite."""
    passed = sum(each.status == PASSED for each in verdicts)
    excepted = sum(bool(each.reason) for each in verdicts)
    counts = {"cases": len(verdicts), "passed": passed, "excepted": excepted, "failed": len(failures_of(verdicts))}
    return {"suite": verdicts[0].suite, "version": version, **counts}


def failures_of(verdicts: Sequence[CaseVerdict]) -> list[str]:
    """Say what was not passed without a reason, and what was seen."""
    unexpected = [each for each in verdicts if each.status != PASSED and not each.reason]
    return [f"{each.suite}: {each.case}: {each.status}: {each.message[:200]}" for each in unexpected]


def notes_of(verdicts: Sequence[CaseVerdict]) -> list[str]:
    """Each reason with the number of its cases."""
    reasons = Counter((each.suite, each.reason) for each in verdicts if each.reason)
    return [f"{suite}, {count} cases: {reason}." for (suite, reason), count in reasons.items()]


def _run_suite(folder: Path, stage: Testbed) -> list[CaseVerdict]:
    suite = suite_of(folder)
    room = stage.room(suite)
    if suite == DURABLE:
        lines, settings = f'[models.{MODEL}]\nengine = "sim"\n', {"redis.lease_ms": LEASE_MS}
        with (
            Penstock(room, workers=0, settings=settings, config=lines) as penstock,
            serving_streams(penstock.redis_url, penstock.url) as url,
        ):
            return run_durable(folder, url, room)
    with Penstock(room, settings={"sim.step_ms": 2}) as penstock:
        return run_open_responses(folder, penstock.url, SIM_MODEL, room)


def _work(run: ProgramRun) -> int:
    rows: list[dict[str, Any]] = []
    verdicts: list[CaseVerdict] = []
    with Testbed(run.console, "starting", len(run.args.suite)) as stage:
        for folder in map(Path, run.args.suite):
            stage.say(f"{suite_of(folder)}: {folder}")
            found = _run_suite(folder, stage)
            if not found:
                raise SuiteMissing(f"no case of {folder} has run")
            rows.append(row_of(version_of(found[0].suite, folder), found))
            verdicts += found
            stage.done()
        failures = failures_of(verdicts)
        if failures:
            stage.keep()
    ratios = [Ratio.none("cases that failed without a reason", float(len(failures)))]
    notes = (*failures, *notes_of(verdicts))
    result = run.result("conformance", "Conformance suites of others", COLUMNS, rows, ratios, notes)
    command = "penstock bench conformance" + " --suite FOLDER" * len(run.args.suite)  # names no folder of this machine
    return run.keep(replace(result, command=command))


main = BenchProgram("penstock bench conformance", __doc__, _work, Died, SuiteMissing, OSError).taking(
    Option("--suite", action="append", required=True, help="the folder of a suite; may be there several times"), OUT
)

if __name__ == "__main__":
    main.exit()
