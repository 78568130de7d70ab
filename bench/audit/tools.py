"""The tools of the audit, in an environment of their own, and what they said."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.program import WrongArguments

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
