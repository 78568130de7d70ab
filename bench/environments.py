"""Other people's programs, each in a virtual environment of its own: made once from the package index by name and
pinned version, kept in a cache folder, made anew when the pins change.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from bench.program import Testbed

CACHE = "PENSTOCK_BENCH_CACHE"
"""Variable that names the folder."""
RUN_TIMEOUT_S = 900.0
INSTALL = ("install", "--disable-pip-version-check", "--quiet", "--only-binary", ":all:")
"""By our own pip, into the other environment; nothing is compiled here."""
PINS = "pins.txt"
"""In a finished environment: what it was made of."""


class Absent(Exception):
    """This program cannot be had here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What to install. `bare` packages come without their dependencies, after the others."""

    name: str
    packages: tuple[str, ...]
    bare: tuple[str, ...] = ()

    @property
    def pins(self) -> str:
        return "\n".join([f"python {sys.version_info[0]}.{sys.version_info[1]}", *self.packages, "--", *self.bare, ""])

    def made(self, environ: Mapping[str, str] | None = None) -> Path | None:
        """Return its Python, or None if it is not there as it should be."""
        folder = cache(os.environ if environ is None else environ) / self.name
        return folder / "bin" / "python" if made_of(folder) == self.pins else None

    def prepare(self, say: Callable[[str], None], environ: Mapping[str, str] | None = None) -> Path:
        """Make it if it is not there; returns its Python. `say` is told what takes time. Raises Absent."""
        if (python := self.made(environ)) is not None:
            return python
        folder = cache(os.environ if environ is None else environ) / self.name
        python = folder / "bin" / "python"
        say(f"installing {', '.join((*self.packages, *self.bare))} into {folder}, once")
        _run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)])
        install = [sys.executable, "-m", "pip", "--python", str(python), *INSTALL]
        if self.packages:
            _run([*install, *self.packages])
        if self.bare:
            _run([*install, "--no-deps", *self.bare])
        (folder / PINS).write_text(self.pins)
        return python


def cache(environ: Mapping[str, str]) -> Path:
    """Where the environments are kept."""
    return Path(environ.get(CACHE) or Path.home() / ".cache" / "penstock-bench")


def made_of(folder: Path) -> str:
    """Return what a finished environment was made of; "" if there is none."""
    try:
        return (folder / PINS).read_text()
    except OSError:
        return ""


def _run(argv: list[str]) -> None:
    """Raises Absent with the installer's own last words."""
    try:
        done = subprocess.run(argv, capture_output=True, timeout=RUN_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Absent(str(error)) from error
    if done.returncode:
        said = [line for line in done.stderr.decode(errors="replace").splitlines() if line.startswith("ERROR")]
        raise Absent("; ".join(said)[:600] or done.stderr.decode(errors="replace")[-600:])


Say = Callable[[str], None]
ROOT = Path(__file__).parent.parent
"""Programs in other environments import what they need of this project from here."""


class Installable(Protocol):
    """A system that is made ready once, before anything is measured."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str:
        """What it is, in a few words."""

    def prepare(self, say: Say) -> None:
        """Once, before anything is measured. Raises Absent."""


class Ready:
    """A system that needs nothing but what is here."""

    def prepare(self, say: Say) -> None:
        """Nothing is needed."""


class Peer:
    """A system in an environment of its own."""

    environment: Environment

    def prepare(self, say: Say) -> None:
        self.python = self.environment.prepare(say)


System = TypeVar("System", bound=Installable)


@dataclass(slots=True)
class Failures:
    """Why systems could not be measured, by name."""

    failed: dict[str, str] = field(default_factory=dict)

    def fail(self, system: str, why: object) -> None:
        self.failed.setdefault(system, " ".join(str(why).split())[:500])

    def prepared(self, systems: Sequence[System], say: Say) -> list[System]:
        """Those that can be run here; why the others cannot is noted."""
        ready = []
        for system in systems:
            try:
                system.prepare(say)
            except Absent as error:
                self.fail(system.name, f"cannot be installed: {error}")
            else:
                ready.append(system)
        return ready

    def take_turns(
        self,
        systems: Sequence[System],
        rounds: int,
        stage: Testbed,
        measure: Callable[[System, Path], None],
        *errors: type[Exception],
    ) -> None:
        """Measure each in every round, with a new folder. Every other round goes through the systems backwards, so that
        none always follows the same one. Notes these errors, Absent and OSError."""
        known: tuple[type[Exception], ...] = (Absent, OSError, *errors)
        for number in range(rounds):
            for system in systems if number % 2 == 0 else reversed(systems):
                stage.say(f"round {number + 1}/{rounds}: {system.name}")
                try:
                    measure(system, stage.room(f"{system.name}-{number + 1}"))
                except known as error:
                    self.fail(system.name, error)
