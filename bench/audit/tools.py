"""The tools of the audit, in an environment of their own, and two checks: the documents of what Penstock is made of
(CycloneDX), and the `.pth` files, which Python runs at every start: one that nobody expects is a way in."""

from __future__ import annotations

import json
import re
import subprocess
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.program import WrongArguments
from workers.engines.llamacpp.weights import SMOLLM2

FOLDER = Path(".venv-audit/bin")
TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class ToolResult:
    """How a tool ended, and its words."""

    code: int
    out: bytes
    err: str


@dataclass(frozen=True, slots=True)
class AuditTools:
    """Where they are."""

    root: Path
    """The project."""
    folder: Path

    def run(self, name: str, *words: str, cwd: Path | None = None) -> ToolResult:
        """Run one to its end. Raises WrongArguments if it is not there."""
        program = (self.root / self.folder / name).absolute()
        if not program.exists():
            raise WrongArguments(f"{self.folder / name} is not there\nnext:  make audit, which installs it")
        return run([str(program), *words], cwd or self.root)


def run(command: Sequence[str], cwd: Path) -> ToolResult:
    """Any program. Raises OSError, TimeoutExpired."""
    ran = subprocess.run(command, cwd=cwd, capture_output=True, timeout=TIMEOUT_S, check=False)
    return ToolResult(ran.returncode, ran.stdout, ran.stderr.decode(errors="replace"))


RUNTIME = "requirements.lock"
SPEC = "1.6"


def write_sbom(tools: AuditTools, out: Path) -> list[str]:
    """Write a document for each lock file to a folder, with the default model, which an image may hold, in that of the
    runtime; what went wrong, in words."""
    out.mkdir(parents=True, exist_ok=True)
    found: list[str] = []
    for lock in sorted(tools.root.glob("requirements*.lock")):
        words = f"--output-format JSON --spec-version {SPEC} --output-reproducible --pyproject pyproject.toml".split()
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


EXPECTED = {
    re.compile(r"_?_editable_(impl_)?penstock\.pth|_penstock\.pth"): re.compile(r"(/[^\n]*\n?)+"),
    re.compile(r"__editable__\.penstock-[0-9.]+\.pth"): re.compile(r"(/[^\n]*\n?)+"),
    re.compile(r"distutils-precedence\.pth"): re.compile(
        r"import os; var = 'SETUPTOOLS_USE_DISTUTILS'; enabled = os\.environ\.get\(var, '[a-z]+'\) == 'local'; "
        r"enabled and __import__\('_distutils_hack'\)(\.add_shim\(\))?;? ?\n?"
    ),
    re.compile(r"a1_coverage\.pth"): re.compile(
        r"import sys; exec\('import os\\n\\nif os\.getenv\(\"COVERAGE_PROCESS_START\"\) or "
        r"os\.getenv\(\"COVERAGE_PROCESS_CONFIG\"\):\\n try:\\n  import coverage\\n except:\\n  pass\\n else:\\n  "
        r"coverage\.process_startup\(slug=\"pth\"\)'\)\n"
    ),
}
"""Names, and all that may be in them: the folder of this project, and what setuptools and coverage bring. Coverage's
does nothing unless one of its variables is set, as `make mutants` does."""


def environments(tools: Path) -> list[Path]:
    """This one's packages, and those of the tools."""
    return [Path(sysconfig.get_path("purelib")), *sorted(tools.glob("lib/python3*/site-packages"))]


def check_pth(folders: list[Path]) -> list[str]:
    """Raises WrongArguments for a folder that is not there: nothing found in nothing would be no finding."""
    found: list[str] = []
    for folder in folders:
        if not folder.is_dir():
            raise WrongArguments(f"{folder} is no folder\nnext:  give the packages of an environment or image")
        found += [str(path) for path in unexpected(folder)]
    return [f"{path} runs at every start of Python and is none of those expected" for path in found]


def unexpected(folder: Path) -> Iterator[Path]:
    """The `.pth` files below it that are not exactly as expected; also what would be imported of itself."""
    for path in sorted(folder.rglob("*.pth")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if not any(name.fullmatch(path.name) and content.fullmatch(text) for name, content in EXPECTED.items()):
            yield path
    for name in ("sitecustomize.py", "usercustomize.py"):
        if (folder / name).exists():
            yield folder / name
