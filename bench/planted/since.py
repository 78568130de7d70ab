"""Selection of the planted bugs that a change concerns: those whose files, tests or own text it changed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from bench.planted.bug import Bug
from bench.program import WrongArguments

TABLE = "bench/planted"


def bugs_since(checkout: Path, ref: str, bugs: Sequence[Bug]) -> list[Bug]:
    """Those that patch a file, or name a test of a file, that differs from the commit; and those it does not have.
    Files that git does not track count as changed. Raises WrongArguments."""
    changed = {
        *_git(checkout, "diff", "--name-only", "--no-renames", ref, "--").splitlines(),
        *_git(checkout, "ls-files", "--others", "--exclude-standard").splitlines(),
    }
    before = _git(checkout, "grep", "-h", "-e", "", ref, "--", TABLE)
    return [bug for bug in bugs if f'"{bug.name}"' not in before or changed & files_of(bug)]


def files_of(bug: Bug) -> set[str]:
    """The files that it patches, and those of its tests."""
    return {edit.file for edit in bug.edits} | {test.partition("::")[0] for test in bug.tests}


def _git(checkout: Path, *words: str) -> str:
    """Output of a git command. Raises WrongArguments."""
    git = shutil.which("git")
    if git is None:
        raise WrongArguments("--since needs git, which is not on the PATH")
    words = ("-c", "core.quotePath=false", *words)
    ran = subprocess.run([git, *words], cwd=checkout, capture_output=True, text=True, check=False)
    if ran.returncode > 1:  # 1: grep found nothing
        raise WrongArguments(f"--since: {' '.join(ran.stderr.split())}\nnext:  name a commit of this checkout")
    return ran.stdout
