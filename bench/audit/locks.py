"""Known vulnerabilities of what the lock files name, by pip-audit, and whether each package has its hash.

Without an advisory service nothing is known, and that is a failure. Where the service cannot be reached, a copy of the
Python advisory database takes its place, offline: a folder of OSV documents (YAML or JSON), such as a checkout of the
database that PyPA publishes. It knows what it knew on the day it was made.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml
from packaging.version import InvalidVersion, Version

from bench.audit.tools import AuditTools, ToolResult
from bench.program import WrongArguments


class Advisories:
    """Every advisory of a folder, by the package it is about. Raises WrongArguments if there is none."""

    def __init__(self, folder: Path) -> None:
        self._known: dict[str, list[dict[str, Any]]] = {}
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".yaml", ".yml", ".json") and path.is_file():
                self._add(path)
        if not self._known:
            raise WrongArguments(
                f"{folder} holds no advisories\nnext:  give the folder of a copy of the advisory database"
            )

    def _add(self, path: Path) -> None:
        with path.open("rb") as file:
            document = json.load(file) if path.suffix == ".json" else yaml.safe_load(file)
        if not isinstance(document, dict) or document.get("withdrawn"):
            return
        for affected in document.get("affected", ()):
            if affected.get("package", {}).get("ecosystem") == "PyPI":
                self._known.setdefault(normal(affected["package"]["name"]), []).append(document)

    def of(self, name: str, version: str) -> list[dict[str, Any]]:
        """The advisories about one version of a package."""
        return [
            document
            for document in self._known.get(normal(name), ())
            if any(
                normal(affected["package"]["name"]) == normal(name) and is_affected(affected, version)
                for affected in document["affected"]
            )
        ]


def normal(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def is_affected(affected: dict[str, Any], version: str) -> bool:
    """Whether a version is listed, or lies in one of the ranges; one that cannot be read counts as affected."""
    if version in affected.get("versions", ()):
        return True
    ranges = [each for each in affected.get("ranges", ()) if each.get("type") == "ECOSYSTEM"]
    try:
        return any(_within(each["events"], Version(version)) for each in ranges)
    except InvalidVersion:
        return True


def _within(events: list[dict[str, str]], version: Version) -> bool:
    """The events of a range in their order: what was introduced before, and not fixed since."""
    inside = False
    for event in events:
        if "introduced" in event and (event["introduced"] == "0" or version >= Version(event["introduced"])):
            inside = True
        if ("fixed" in event and version >= Version(event["fixed"])) or (
            "last_affected" in event and version > Version(event["last_affected"])
        ):
            inside = False
    return inside


def _as_osv(moment: datetime) -> str:
    """YAML knows moments, JSON does not."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address at which the advisories of a folder are asked for. Raises WrongArguments."""
    advisories = Advisories(folder)

    class Handler(BaseHTTPRequestHandler):
        """Answers the one question there is."""

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found = advisories.of(asked["package"]["name"], asked["version"])
            body = json.dumps({"vulns": found} if found else {}, default=_as_osv).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the base class's
            """Nothing: the audit says what it found."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/query"
        finally:
            server.shutdown()
            thread.join()


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
