"""`python -m bench.fuzz`: schemathesis makes requests from /openapi.json and judges the answers of real processes.

Two runs: as generated, and with ids that exist. Exits 1 if an answer is a 5xx or breaks the document, if a process
logged an error, or if there were fewer cases than asked for; 2 if the tool is not there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench import program
from bench.http import fetch
from bench.penstock import key_rows, start_redis
from bench.ports import free_port
from bench.processes import Died, Processes
from bench.program import BenchProgram, Option, ProgramRun, Testbed, WrongArguments

TOOL = Path(".venv-audit/bin/schemathesis")
KEY = "sk-fuzz"
CASES = 2000
TIMEOUT_S = 1800.0
SKIPPED = "positive_data_acceptance"
"""Not judged: a valid body may still name a file that is not there, or fields that exclude each other."""

POOLS = """
[[operations]]
include-path = "/admin/pools/{model}"
checks.use_after_free.enabled = false
"""
"""What is deleted there is a person's word on a pool, not the pool."""

EXISTING = ("--phases", "coverage,fuzzing", "--exclude-method", "DELETE")
"""What exists has to stay for the whole run."""


class Cases(msgspec.Struct):
    """The part of the tool's report that counts."""

    generated: int
    with_failures: int
    errored: int


class FuzzFinding(msgspec.Struct):
    """A kind of failure, and where it was."""

    title: str
    count: int
    operations: list[Any]


class Operations(msgspec.Struct):
    """How many of the document's operations were tried."""

    total: int
    selected: int
    tested: int


class FuzzReport(msgspec.Struct):
    """The tool's report of one run."""

    complete: bool
    operations: Operations
    test_cases: Cases
    failures: list[FuzzFinding]


def problems(reports: Sequence[FuzzReport], logs: Mapping[str, str], least: int) -> list[str]:
    """Everything that is wrong, in words."""
    found = [f"{each.title}: {each.count} ({each.operations})" for report in reports for each in report.failures]
    for report in reports:
        if not report.complete or report.test_cases.errored:
            found.append(f"a run did not end well: {report.test_cases.errored} cases could not be judged")
        if report.operations.tested < report.operations.selected:
            found.append(f"only {report.operations.tested} of {report.operations.selected} operations were tried")
    if not any(report.operations.selected == report.operations.total for report in reports):
        found.append("no run had all operations of the document")
    cases = sum(report.test_cases.generated for report in reports)
    if cases < least:
        found.append(f"{cases} cases, fewer than the {least} asked for")
    for name, text in logs.items():
        found += [f"{name} logged: {line[:300]}" for line in text.splitlines() if '"level":"error"' in line]
    return found


class FuzzTarget:
    """The API, a worker with the simulated engine and the offline work, behind one key that may do everything."""

    def __init__(self, folder: Path) -> None:
        self.processes = Processes(folder)
        self.folder, self.port = folder, free_port()

    def start(self) -> None:
        """Raises Died."""
        (self.folder / "penstock.toml").write_text(key_rows("fuzz", KEY, admin=True))
        self.processes.environ |= {
            "PENSTOCK_REDIS_URL": start_redis(self.processes),
            "PENSTOCK_API_PORT": str(self.port),
            "PENSTOCK_SIM_STEP_MS": "0",
            "PENSTOCK_SIM_PREFILL_MS": "0",
        }
        for role in ("workers", "offline", "api"):
            self.processes.start_role(role, [sys.executable, "-m", role])
        self.processes.wait_ready()
        self.processes.wait_page(self.port, "/readyz", b'"ready"')

    def ask(self, path: str, body: bytes, kind: str) -> Any:
        """What a POST is answered with. Raises Died."""
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": kind}
        status, _, data = fetch(self.port, "POST", path, body, headers)
        if status >= 300:
            raise Died(f"{path} answers {status}: {data[:300]!r}")
        return json.loads(data)

    def ids(self) -> dict[str, str]:
        """Something that exists for each name in a path, as far as a client can make it. Raises Died."""
        chat = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat}
        form = (
            '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            '--b\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
            f"{json.dumps(line)}\r\n--b--\r\n"
        )
        file = self.ask("/v1/files", form.encode(), "multipart/form-data; boundary=b")["id"]
        batch = {"input_file_id": file, "endpoint": "/v1/chat/completions"}
        return {
            "model": "sim",
            "job_id": self.ask("/v1/jobs", json.dumps(chat).encode(), "application/json")["id"],
            "file_id": file,
            "batch_id": self.ask("/v1/batches", json.dumps(batch).encode(), "application/json")["id"],
        }


def _run(run: ProgramRun) -> int:
    args = run.args
    tool = args.tool.resolve()
    if not tool.exists():
        raise WrongArguments(f"{args.tool} is not there\nnext:  make fuzz, which installs it")
    with Testbed(run.console, "starting", 2) as stage:
        target = FuzzTarget(stage.folder)
        with target.processes:
            target.start()
            reports = [_judged(run, tool, target, "generated", POOLS)]
            stage.done()
            reports.append(_judged(run, tool, target, "existing", _named(target.ids()) + POOLS, *EXISTING))
            stage.done()
            target.processes.check()
        roles = ("api", "workers", "offline")
        logs = {role: (stage.folder / f"{role}.log").read_text(errors="replace") for role in roles}
        if found := problems(reports, logs, args.cases):
            stage.keep()  # also everything the tool said
    for report in reports:
        cases, tried = report.test_cases, report.operations
        run.console.print(f"{cases.generated} cases on {tried.tested} operations, {cases.with_failures} failed")
    for each in found:
        run.console.print(f"found: {each}", markup=False, soft_wrap=True)
    return int(bool(found))


def _named(ids: Mapping[str, str]) -> str:
    return "[parameters]\n" + "".join(f'"path.{name}" = "{value}"\n' for name, value in ids.items())


def _judged(run: ProgramRun, tool: Path, target: FuzzTarget, name: str, config: str, *words: str) -> FuzzReport:
    """One run of the tool. Raises Died if it leaves no report."""
    args, out = run.args, target.folder / f"{name}.json"
    (target.folder / "schemathesis.toml").write_text(config)
    command = [
        str(tool), "--config-file", str(target.folder / "schemathesis.toml"), "run",
        f"http://127.0.0.1:{target.port}/openapi.json", "--header", f"Authorization: Bearer {KEY}",
        "--max-examples", str(args.examples), "--seed", str(args.seed), "--exclude-checks", SKIPPED,
        "--continue-on-failure", "--request-timeout", "60", "--generation-database", "none", "--no-color",
        "--report", "json", "--report-json-path", str(out), *words,
    ]  # fmt: skip
    with (target.folder / f"{name}.txt").open("wb") as said:
        subprocess.run(command, cwd=target.folder, stdout=said, stderr=said, timeout=TIMEOUT_S, check=False)
    if not out.exists():
        raise Died(f"the tool left no report: {(target.folder / f'{name}.txt').read_text()[-2000:]}")
    return msgspec.json.decode(out.read_bytes(), type=FuzzReport)


main = BenchProgram("python -m bench.fuzz", __doc__, _run, Died, FileNotFoundError).taking(
    Option("--cases", type=program.count, default=CASES, help=f"at least so many (default: {CASES})"),
    Option("--examples", type=program.count, default=25, help="of each operation and phase (default: 25)"),
    Option("--seed", type=int, default=1),
    Option("--tool", type=Path, default=TOOL, help=f"default: {TOOL}"),
)

if __name__ == "__main__":
    main.exit()
