"""`python -m bench.conformance`: conformance suites of others, against a real Penstock.

Each --suite names a folder outside this tree: one in which npm has installed
@durable-streams/server-conformance-tests, a checkout of Open Responses with its packages, or a checkout of llama.cpp.
A case that is not passed needs a reason in bench/conformance/exceptions.py or, of llama.cpp, llama_cases.py beside it.
The exit code is 1 if one has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bench.conformance.adapter import serving_streams
from bench.conformance.exceptions import DURABLE, RESPONSES, unneeded
from bench.conformance.llama_servers import serving_for_llama
from bench.conformance.stream_writer import LEASE_MS, MODEL
from bench.conformance.suites import (
    FAILED,
    PASSED,
    SKIPPED,
    CaseVerdict,
    SuiteMissing,
    run_durable,
    run_llama,
    run_open_responses,
    suite_of,
    version_of,
)
from bench.penstock import MODEL as SIM_MODEL
from bench.penstock import Penstock
from bench.processes import Died
from bench.program import CACHE, OUT, BenchProgram, Option, ProgramRun, Testbed
from bench.report import Ratio, columns
from workers.engines.llamacpp.weights import WeightsError

NAME = "conformance"

COLUMNS = columns("""
    suite: suite; version: version; group: group; cases: cases; passed: passed; excepted: not passed, with a reason;
    failed: failed
""")


def rows_of(version: str, verdicts: Sequence[CaseVerdict]) -> list[dict[str, Any]]:
    """Count the verdicts of one suite by group."""
    rows: dict[str, Counter[str]] = {}
    for each in verdicts:
        counts = rows.setdefault(each.group, Counter())
        counts["cases"] += 1
        counts["passed" if each.status == PASSED else "excepted" if each.reason else "failed"] += 1
    return [
        {
            "suite": verdicts[0].suite,
            "version": version,
            "group": group,
            **dict.fromkeys(("passed", "excepted", "failed"), 0),
        }
        | counts
        for group, counts in rows.items()
    ]


def failures_of(verdicts: Sequence[CaseVerdict]) -> list[str]:
    """Say what was not passed without a reason, and what was seen."""
    unexpected = [each for each in verdicts if each.status in (FAILED, SKIPPED) and not each.reason]
    return [f"{each.suite}: {each.case}: {each.status}: {each.message[:200]}" for each in unexpected]


def notes_of(verdicts: Sequence[CaseVerdict]) -> list[str]:
    """Each reason with the number of its cases."""
    reasons = Counter((each.suite, each.reason) for each in verdicts if each.reason)
    return [f"{suite}, {count} cases: {reason}." for (suite, reason), count in reasons.items()]


def unneeded_of(verdicts: Sequence[CaseVerdict]) -> list[str]:
    """Each exception that the verdicts of one whole suite do not need: its case is passed, or is no more."""
    suite = verdicts[0].suite
    patterns = unneeded(suite, [each.case for each in verdicts if each.status != PASSED])
    return [f"{suite}: no case needs the exception {pattern}." for pattern in patterns]


def command_of(suites: int) -> str:
    """Return the command that is kept with the figures: it names no folder of this machine."""
    return "penstock bench conformance" + " --suite FOLDER" * suites


def _run_suite(folder: Path, only: str, cache: Path, stage: Testbed) -> list[CaseVerdict]:
    suite = suite_of(folder)
    room = stage.room(suite)
    if suite == DURABLE:
        lines, settings = f'[models.{MODEL}]\nengine = "sim"\n', {"redis.lease_ms": LEASE_MS}
        with (
            Penstock(room, workers=0, settings=settings, config=lines) as penstock,
            serving_streams(penstock.redis_url, penstock.url) as url,
        ):
            return run_durable(folder, url, room, only)
    if suite == RESPONSES:
        with Penstock(room, settings={"sim.step_ms": 2}) as penstock:
            return run_open_responses(folder, penstock.url, SIM_MODEL, room)
    with serving_for_llama(room, stage.room(f"{suite} keyed"), cache) as ports:
        return run_llama(folder, ports, room, only)


def _work(run: ProgramRun) -> int:
    rows: list[dict[str, Any]] = []
    verdicts: list[CaseVerdict] = []
    unneeded_rows: list[str] = []
    with Testbed(run.console, "starting", len(run.args.suite)) as stage:
        for folder in map(Path, run.args.suite):
            stage.say(f"{suite_of(folder)}: {folder}")
            found = _run_suite(folder, run.args.only, run.args.cache, stage)
            if not found:
                raise SuiteMissing(f"no case of {folder} has run")
            rows += rows_of(version_of(found[0].suite, folder), found)
            unneeded_rows += [] if run.args.only else unneeded_of(found)
            verdicts += found
            stage.done()
        failed = sum(row["failed"] for row in rows)
        if failed:
            stage.keep()
    for line in unneeded_rows:  # told and not kept: another version of the suite may need it
        run.console.print(line)
    ratios = [Ratio.none("cases that failed without a reason", float(failed))]
    title = "Conformance suites of others"
    result = run.result(NAME, title, COLUMNS, rows, ratios, notes_of(verdicts))
    result = replace(result, command=command_of(len(run.args.suite)), failures=tuple(failures_of(verdicts)))
    return int(run.keep(result).missed)


main = BenchProgram("penstock bench conformance", __doc__, _work, Died, SuiteMissing, WeightsError, OSError).taking(
    Option("--suite", action="append", required=True, help="the folder of a suite; may be there several times"),
    Option("--only", default="", help="only cases of these names: a pattern (Durable Streams), or words (llama.cpp)"),
    CACHE,
    OUT,
)

if __name__ == "__main__":
    main.exit()
