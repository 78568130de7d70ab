"""A copy of the Python advisory database as the service that pip-audit asks: offline, on this machine alone.

The copy is a folder of OSV documents (YAML or JSON), such as a checkout of the database that PyPA publishes. It knows
what it knew on the day it was made.
"""

from __future__ import annotations

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
