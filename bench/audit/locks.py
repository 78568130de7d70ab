"""KnownFinding vulnerabilities of what the lock files name, by pip-audit, and whether each package has its hash.

Without an advisory service nothing is known, and that is a failure. Where the service cannot be reached, a folder of
advisories takes its place (bench/audit/advisories.py).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from bench.audit.advisories import served
from bench.audit.tools import AuditTools, ToolResult

LOCKS = "requirements*.lock"
UNANSWERED = (
    "no advisory service answered, so nothing is known about vulnerabilities: run it where one can be reached, or give "
    "a copy of the advisories with --advisories FOLDER"
)


def check(tools: AuditTools, advisories: Path | None) -> list[str]:
    """What is wrong with the lock files, in words."""
    locks = sorted(tools.root.glob(LOCKS))
    found = [] if locks else [f"there is no {LOCKS}"]
    with served(advisories) if advisories else contextlib.nullcontext("") as address:
        service = ["--vulnerability-service", "osv", "--osv-url", address] if address else []
        for lock in locks:
            found += [f"{lock.name}: {each}" for each in unhashed(lock.read_text(encoding="utf-8"))]
            words = ["--strict", "--require-hashes", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
            said = tools.run("pip-audit", *words, *service, "--requirement", lock.name)
            found += [f"{lock.name}: {each}" for each in findings(said)]
    return found


def unhashed(text: str) -> Iterator[str]:
    """Requirements of a lock file that any file of that name would satisfy."""
    for requirement in text.replace("\\\n", " ").splitlines():
        if requirement.strip() and not requirement.lstrip().startswith("#") and "--hash=sha256:" not in requirement:
            yield f"{requirement.split()[0]} has no hash"


def findings(said: ToolResult) -> list[str]:
    """What pip-audit found. Only a report on every package, without a vulnerability, is no finding."""
    try:
        report = json.loads(said.out)
        packages = report["dependencies"]
    except (ValueError, KeyError, TypeError):
        last = said.err.strip().splitlines()[-1:] or ["it said nothing"]
        return [f"{UNANSWERED} ({last[0][:300]})"]
    found = [f"{each['name']} was not looked at: {each['skip_reason']}" for each in packages if "skip_reason" in each]
    found += [
        f"{each['name']} {each['version']}: {advisory['id']}, fixed in {advisory['fix_versions'] or 'nothing'}"
        for each in packages
        for advisory in each.get("vulns", ())
    ]
    if not packages:
        found.append("no package was looked at")
    if said.code and not found:
        found.append(f"pip-audit ended with {said.code}: {said.err.strip()[-300:]}")
    return found
