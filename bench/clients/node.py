"""Node environments: packages of npm with pinned versions in a folder of their own, made once."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.environments import PINS, RUN_TIMEOUT_S, Absent, cache, made_of

INSTALL = ("install", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")


@dataclass(frozen=True, slots=True)
class NodeEnvironment:
    """What to install. Programs find it by the variable NODE_PATH."""

    name: str
    packages: tuple[str, ...]

    @property
    def pins(self) -> str:
        return "\n".join(["node", *self.packages, ""])

    def folder(self, environ: Mapping[str, str]) -> Path:
        return cache(environ) / self.name

    def made(self, environ: Mapping[str, str] | None = None) -> Path | None:
        """Return its folder of modules, or None if it is not there as it should be. Raises Absent without Node."""
        if shutil.which("node") is None:
            raise Absent("there is no node on the PATH")
        folder = self.folder(os.environ if environ is None else environ)
        return folder / "node_modules" if made_of(folder) == self.pins else None

    def prepare(self, say: Callable[[str], None], environ: Mapping[str, str] | None = None) -> Path:
        """Make it if it is not there; returns its folder of modules. Raises Absent."""
        if (modules := self.made(environ)) is not None:
            return modules
        npm = shutil.which("npm")
        if npm is None:
            raise Absent("there is no npm on the PATH")
        folder = self.folder(os.environ if environ is None else environ)
        say(f"installing {', '.join(self.packages)} into {folder}, once")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            done = subprocess.run(
                [npm, *INSTALL, "--prefix", str(folder), *self.packages],
                capture_output=True, timeout=RUN_TIMEOUT_S, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Absent(str(error)) from error
        if done.returncode:
            raise Absent(done.stderr.decode(errors="replace").strip()[-600:])
        (folder / PINS).write_text(self.pins)
        return folder / "node_modules"
