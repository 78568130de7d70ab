"""What Penstock is made of, as CycloneDX documents: one for each lock file, and in that of the runtime the default
model, which an image may hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.audit.tools import AuditTools
from workers.engines.weights import SMOLLM2

RUNTIME = "requirements.lock"
SPEC = "1.6"


def write(tools: AuditTools, out: Path) -> list[str]:
    """Write them to a folder; what went wrong, in words."""
    out.mkdir(parents=True, exist_ok=True)
    found: list[str] = []
    for lock in sorted(tools.root.glob("requirements*.lock")):
        words = [
            "--output-format",
            "JSON",
            "--spec-version",
            SPEC,
            "--output-reproducible",
            "--pyproject",
            "pyproject.toml",
        ]
        said = tools.run("cyclonedx-py", "requirements", *words, lock.name)
        try:
            document = json.loads(said.out)
        except ValueError:
            found.append(f"{lock.name}: cyclonedx-py ended with {said.code}: {said.err.strip()[-300:]}")
            continue
        if lock.name == RUNTIME:
            document["components"].append(model())
        names = {(each["name"], each.get("version")) for each in document["components"]}
        for package in packages(lock.read_text(encoding="utf-8")) - names:
            found.append(f"{lock.name}: {package[0]} {package[1]} is missing from the document")
        (out / f"{lock.stem}.cdx.json").write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", "utf-8")
    return found


def packages(lock: str) -> set[tuple[str, str]]:
    """Name and version of everything a lock file pins."""
    lines = (line.split() for line in lock.splitlines() if line and not line.startswith((" ", "#")))
    pins = (line[0].partition("==") for line in lines)
    return {(name.partition("[")[0], version.rstrip(";")) for name, _, version in pins}


def model() -> dict[str, Any]:
    """The default model: fetched once, or part of the image worker-smollm2."""
    return {
        "type": "machine-learning-model",
        "bom-ref": SMOLLM2.result,
        "name": SMOLLM2.result,
        "description": f"Out of {SMOLLM2.requirement}, converted to half precision",
        "hashes": [{"alg": "SHA-256", "content": SMOLLM2.result_sha256}],
        "licenses": [{"license": {"id": "Apache-2.0"}}],
    }
