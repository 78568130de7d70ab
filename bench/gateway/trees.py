"""Source trees to compare: copies of the working tree and of a git commit, outside the checkout."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path

from bench.gateway.systems import ROOT
from bench.planted.tree import Strayed, check_origins, copy_tree
from bench.program import WrongArguments

ROLES = ("api", "workers", "streaming", "telemetry", "runtime", "penstock")
"""Packages that the processes of a measured deployment import; older trees lack the last two."""


@dataclass(frozen=True, slots=True)
class Tree:
    """One source tree; `version` names its commit, with `-dirty` behind it where files differ from that commit."""

    path: Path
    version: str


def copy_of_this(target: Path) -> Tree:
    """The working tree as it is now, so that it may be edited while the comparison runs. Raises WrongArguments."""
    version = _git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    copy_tree(ROOT, target)
    return _checked(Tree(target, version))


def export(ref: str, target: Path) -> Tree:
    """The tree of a git commit, out of `git archive`: checkout and repository stay as they are. Raises
    WrongArguments."""
    commit = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    archive = target.with_suffix(".zip")
    _git("archive", "--format=zip", f"--output={archive}", commit)
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(target)
    archive.unlink()
    return _checked(Tree(target, commit[:12]))


def _checked(tree: Tree) -> Tree:
    """Its processes will import it, and nothing of the tree that is installed. Raises WrongArguments."""
    try:
        check_origins(tree.path, [name for name in ROLES if (tree.path / name).is_dir()])
    except subprocess.CalledProcessError as error:
        last_line = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise WrongArguments(
            f"the tree of {tree.version} cannot be imported in this environment: {last_line}"
        ) from error
    except Strayed as error:
        raise WrongArguments(f"the tree of {tree.version} cannot be run from a copy: {error}") from error
    return tree


def _git(*words: str) -> str:
    """Output of a git command in the checkout this program runs from. Raises WrongArguments."""
    program = shutil.which("git")
    if program is None:
        raise WrongArguments("--base needs git, which is not on the PATH")
    ran = subprocess.run([program, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if ran.returncode:
        said = " ".join(ran.stderr.split()) or "no such commit"
        raise WrongArguments(f"git {words[0]} {words[-1]}: {said} (in {ROOT})")
    return ran.stdout.strip()
