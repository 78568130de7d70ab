"""Suites of others: which one a folder holds, how each is run and read, and which cases are not passed, with reasons.

No suite is part of this tree: `--suite` names a folder in which it was installed, or a checkout of it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DURABLE_PACKAGE = Path("node_modules/@durable-streams/server-conformance-tests")
OPEN_RESPONSES_PROGRAM = Path("bin/compliance-test.ts")
TIMEOUT_S = 1800.0
CASE_TIMEOUT_MS = 90_000

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


DURABLE, RESPONSES = "Durable Streams", "Open Responses"


@dataclass(frozen=True, slots=True)
class ExpectedFailure:
    """Cases of one suite whose name matches `pattern`, and why they are not passed."""

    suite: str
    pattern: str
    reason: str


EXPECTED: tuple[ExpectedFailure, ...] = (
    ExpectedFailure(DURABLE, r"^Fork - ", "no forks: a job's stream has one history"),
    ExpectedFailure(DURABLE, r"[Pp]roducer", "no producers: workers write"),
    ExpectedFailure(DURABLE, r"(?:TTL|[Ee]xpir)", "no Stream-TTL: jobs are kept for [redis] retention_s"),
    ExpectedFailure(
        DURABLE, r"(?:[Ww]ebhook|[Ss]ubscription)", "no subscriptions of this protocol: Penstock has webhooks"
    ),
    ExpectedFailure(
        DURABLE, r"(?:\bseq\b|[Ss]equence [Oo]rdering)", "no Stream-Seq: workers write, each run in its order"
    ),
    ExpectedFailure(DURABLE, r"(?:base64|SSE Mode.*binary)", "no binary streams: Penstock's hold JSON"),
    ExpectedFailure(DURABLE, r"CORS preflight", "preflights are answered for the origins in [api] cors_origins alone"),
    ExpectedFailure(DURABLE, r"body dedup", "no producers: workers write"),
    ExpectedFailure(RESPONSES, r"^image-input$", "no images: 400 that names the part"),
    ExpectedFailure(RESPONSES, r"^compact", "no /v1/responses/compact: 405"),
    ExpectedFailure(RESPONSES, r"^websocket", "no WebSockets: a stream, which can be resumed"),
)
"""In order: the first one that matches counts."""


def reason_of(suite: str, case: str) -> str:
    """Return why a case is not passed; "" if it should be."""
    reasons = (each.reason for each in EXPECTED if each.suite == suite and re.search(each.pattern, case))
    return next(reasons, "")


def all_but_expected(suite: str) -> str:
    """Return a pattern of the names of all other cases of a suite, for programs that select cases by one."""
    patterns = "|".join(f"(?:.*{each.pattern})".replace(".*^", "") for each in EXPECTED if each.suite == suite)
    return f"^(?!{patterns})"


class SuiteMissing(Exception):
    """Raised when a folder holds no suite that is known here, or the suite gives no verdicts; the message says why."""


@dataclass(frozen=True, slots=True)
class CaseVerdict:
    """What a suite says of one case."""

    suite: str
    case: str
    status: str
    """PASSED, FAILED or SKIPPED."""
    message: str = ""

    @property
    def reason(self) -> str:
        """Why it is not passed, if that is expected; "" otherwise."""
        return reason_of(self.suite, self.case) if self.status != PASSED else ""


def suite_of(folder: Path) -> str:
    """Return which suite a folder holds. Raises SuiteMissing."""
    for suite, place in (
        (DURABLE, DURABLE_PACKAGE / "dist" / "index.js"),
        (RESPONSES, OPEN_RESPONSES_PROGRAM),
    ):
        if (folder / place).exists():
            return suite
    raise SuiteMissing(f"{folder} holds none of: {DURABLE_PACKAGE}, {OPEN_RESPONSES_PROGRAM}")


def version_of(suite: str, folder: Path) -> str:
    """Return the version of a suite: of its package, or of its checkout."""
    if suite == DURABLE:
        return str(json.loads((folder / DURABLE_PACKAGE / "package.json").read_text())["version"])
    words = ["git", "-C", str(folder), "describe", "--tags", "--always"]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def run_durable(suite: Path, url: str, folder: Path) -> list[CaseVerdict]:
    """Run the suite of the Durable Streams protocol, without the cases that are not passed for a reason, of which many
    would wait for their time limit. Raises SuiteMissing."""
    index, report = (suite / DURABLE_PACKAGE / "dist" / "index.js").resolve(), folder / "report.json"
    test = f"import {{ runConformanceTests }} from {json.dumps(str(index))}\n"
    (folder / "suite.test.mjs").write_text(
        test + "runConformanceTests({ baseUrl: process.env.CONFORMANCE_TEST_URL })\n"
    )
    words = [str((suite / "node_modules/.bin/vitest").resolve()), "run", "--root", str(folder), "--reporter=json"]
    words += [f"--outputFile={report}", f"--testTimeout={CASE_TIMEOUT_MS}", "-t", all_but_expected(DURABLE)]
    _run(words, folder, {"CONFORMANCE_TEST_URL": url})
    if not report.exists():
        raise SuiteMissing("the suite has written no report: see its log")
    results = json.loads(report.read_text())["testResults"]
    found = [_of_vitest(each) for result in results for each in result["assertionResults"]]
    return [each for each in found if each.status != SKIPPED or each.reason]


def _of_vitest(found: Mapping[str, Any]) -> CaseVerdict:
    message = (found["failureMessages"] or [""])[0].partition("\n")[0]
    status = found["status"] if found["status"] in (PASSED, FAILED) else SKIPPED
    return CaseVerdict(DURABLE, found["fullName"], status, message)


def run_open_responses(suite: Path, url: str, model: str, folder: Path) -> list[CaseVerdict]:
    """Run the suite of the Open Responses specification, by the `bun` or the `tsx` that is installed with it. Raises
    SuiteMissing."""
    runners = [suite / "node_modules" / ".bin" / name for name in ("bun", "tsx")]
    runner = next((str(each) for each in runners if each.exists()), "bun")
    words = [runner, str(OPEN_RESPONSES_PROGRAM), "--base-url", f"{url}/v1", "--api-key", "none", "--model", model]
    data = _run([*words, "--json"], folder, {}, cwd=suite)
    try:
        results = json.loads(data)["results"]
    except (ValueError, KeyError):
        raise SuiteMissing("the suite has written no results: see its log") from None
    return [
        CaseVerdict(RESPONSES, each["id"], each["status"], "; ".join(map(str, each.get("errors") or ())))
        for each in results
    ]


def _run(words: list[str], folder: Path, environ: Mapping[str, str], cwd: Path | None = None) -> bytes:
    """Run a suite, whose exit code only says that a case failed, and return what it wrote. Raises SuiteMissing."""
    try:
        with (folder / "suite.log").open("wb") as log:
            found = subprocess.run(
                words, cwd=cwd or folder, env=os.environ | environ, stdout=subprocess.PIPE, stderr=log,
                timeout=TIMEOUT_S, check=False,
            )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SuiteMissing(f"the suite did not run: {error}") from None
    return found.stdout
