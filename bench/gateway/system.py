"""What a system under measurement is: made ready once, it serves for as long as it is wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import bench
from bench.gateway.engine import MODEL
from bench.processes import Processes
from workers.engines.sim.settings import SimSettings

ROOT = Path(bench.__file__).parent.parent
"""Guests in other environments import the engine from here."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ServingGateway:
    """A system that answers POST /v1/chat/completions."""

    port: int
    groups: Sequence[Processes]
    headers: Mapping[str, str] = field(default_factory=dict)
    model: str = MODEL

    @property
    def watch(self) -> dict[str, int]:
        """All its processes by name."""
        return {name: pid for group in self.groups for name, pid in group.pids().items()}

    def check(self) -> None:
        """All of them live. Raises Died."""
        for group in self.groups:
            group.check()


class GatewaySystem(Protocol):
    """One of the systems compared."""

    @property
    def name(self) -> str:
        """As on the command line."""

    @property
    def title(self) -> str:
        """What it is, in a few words."""

    def prepare(self, say: Say) -> None:
        """Once, before anything is measured. Raises Absent."""

    def serve(self, folder: Path, engine: SimSettings) -> AbstractContextManager[ServingGateway]:
        """Serving inside the `with`; every process has ended behind it. `folder` is empty. Raises Died, Absent."""


@contextmanager
def processes_in(folder: Path, environ: Mapping[str, str] | None = None) -> Iterator[Processes]:
    """Processes with a folder of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        yield stack.enter_context(Processes(folder, environ))
