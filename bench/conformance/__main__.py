"""`python -m bench.conformance`: the conformance suite of Open Responses against a real Penstock.

--suite names a checkout of it with its packages, outside this tree. A case that is not passed needs a reason in the
table here. The exit code is 1 if one has none.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bench.penstock import MODEL, Penstock
from bench.processes import Died
from bench.program import OUT, BenchProgram, Option, ProgramRun, Testbed
from bench.report import Ratio, columns

EXPECTED = {
    r"^image-input$": "no images: 400 that names the part",
    r"^compact": "no /v1/responses/compact: 405",
    r"^websocket": "no WebSockets: a stream, which can be resumed",
}
"""Cases whose name matches a pattern, and why they are not passed. The first one that matches counts."""

PROGRAM = Path("bin/compliance-test.ts")
TIMEOUT_S = 1800.0
PASSED = "passed"
COLUMNS = columns("""
    suite: suite; version: version; cases: cases; passed: passed; excepted: not passed, with a reason; failed: failed
""")


class SuiteMissing(Exception):
    """Raised when a folder does not hold the suite, or it gives no verdicts; the message says why."""


@dataclass(frozen=True, slots=True)
class CaseVerdict:
    """What the suite says of one case."""

    case: str
    status: str
    message: str = ""

    @property
    def reason(self) -> str:
        """Why it is not passed, if that is expected; "" otherwise."""
        reasons = (reason for pattern, reason in EXPECTED.items() if re.search(pattern, self.case))
        return next(reasons, "") if self.status != PASSED else ""


def run_suite(suite: Path, url: str, folder: Path) -> list[CaseVerdict]:
    """Run it by the `bun` or the `tsx` that is installed with it; its exit code only says that a case failed. Raises
    SuiteMissing."""
    runners = [suite / "node_modules" / ".bin" / name for name in ("bun", "tsx")]
    runner = next((str(each) for each in runners if each.exists()), "bun")
    words = [runner, str(PROGRAM), "--base-url", f"{url}/v1", "--api-key", "none", "--model", MODEL, "--json"]
    try:
        with (folder / "suite.log").open("wb") as log:
            found = subprocess.run(words, cwd=suite, stdout=subprocess.PIPE, stderr=log, timeout=TIMEOUT_S, check=False)
        results = json.loads(found.stdout)["results"]
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SuiteMissing(f"the suite did not run: {error}") from None
    except (ValueError, KeyError):
        raise SuiteMissing("the suite has written no results: see its log") from None
    if not results:
        raise SuiteMissing("no case of the suite has run: see its log")
    return [CaseVerdict(each["id"], each["status"], "; ".join(map(str, each.get("errors") or ()))) for each in results]


def version_of(suite: Path) -> str:
    """The commit of its checkout."""
    words = ["git", "-C", str(suite), "describe", "--tags", "--always"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def failures_of(verdicts: Sequence[CaseVerdict]) -> list[str]:
    """Say what was not passed without a reason, and what was seen."""
    unexpected = [each for each in verdicts if each.status != PASSED and not each.reason]
    return [f"{each.case}: {each.status}: {each.message[:200]}" for each in unexpected]


def row_of(version: str, verdicts: Sequence[CaseVerdict]) -> dict[str, Any]:
    """Count the verdicts."""
    passed = sum(each.status == PASSED for each in verdicts)
    counts = {"cases": len(verdicts), "passed": passed, "excepted": sum(bool(each.reason) for each in verdicts)}
    return {"suite": "Open Responses", "version": version, **counts, "failed": len(failures_of(verdicts))}


def _work(run: ProgramRun) -> int:
    suite = Path(run.args.suite)
    if not (suite / PROGRAM).exists():
        raise SuiteMissing(f"{suite} does not hold {PROGRAM}")
    with Testbed(run.console, "starting", 1) as stage:
        room = stage.room("suite")
        with Penstock(room, settings={"sim.step_ms": 2}) as penstock:
            verdicts = run_suite(suite.resolve(), penstock.url, room)
        failures = failures_of(verdicts)
        if failures:
            stage.keep()
    reasons = Counter(each.reason for each in verdicts if each.reason)
    notes = (*failures, *(f"{count} cases: {reason}." for reason, count in reasons.items()))
    ratio = Ratio.none("cases that failed without a reason", len(failures))
    rows = [row_of(version_of(suite), verdicts)]
    # a file of its own: conformance.json has the last figures of the suites that this program no longer runs
    result = run.result("open-responses", "Conformance suite of Open Responses", COLUMNS, rows, [ratio], notes)
    return run.keep(replace(result, command="penstock bench conformance --suite FOLDER"))  # no folder of this machine


main = BenchProgram("penstock bench conformance", __doc__, _work, Died, SuiteMissing, OSError).taking(
    Option("--suite", required=True, help="the folder of its checkout"), OUT
)

if __name__ == "__main__":
    main.exit()
