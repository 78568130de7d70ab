"""Operating system processes under test: each is started again whenever it ends, for as long as it is kept."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.chaos.waiting import until

RESTART_S = 0.05
GRACE_S = 40.0
LEASE = re.compile(rb'"lease": ?"([0-9a-f]+)"')


class ManagedProcess:
    """One process at a time under one name; its output is kept in a file beside the data."""

    def __init__(self, name: str, argv: Sequence[str], environ: Mapping[str, str], folder: Path) -> None:
        self.name, self.argv, self.environ, self.folder = name, list(argv), dict(environ), folder
        self.kept = True
        """Started again when it ends."""
        self.exits: list[int] = []
        """How each of its lives ended: exit code, or minus the signal."""
        self.patient = asyncio.Event()
        """Cleared: a life that ended is not followed by another until it is set."""
        self.patient.set()
        self._process: asyncio.subprocess.Process | None = None
        self._born = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def pid(self) -> int:
        """Of the present life, or of the last one."""
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Until it has a first life."""
        self._task = asyncio.create_task(self._keep())
        await self._born.wait()

    def send(self, number: int) -> None:
        """Signal the present life, if there is one."""
        if self.alive:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9."""
        self.send(signal.SIGKILL)

    async def exited(self, lives: int) -> None:
        """Until so many lives have ended."""
        await until(lambda: len(self.exits) >= lives, GRACE_S, 0.01)

    async def end(self) -> None:
        """For good: SIGTERM, and after the grace time SIGKILL."""
        self.kept = False
        self.patient.set()
        if self._task is None:
            return
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(GRACE_S):
                await asyncio.shield(self._task)
        except TimeoutError:
            self.kill()
            await self._task

    def lease(self) -> str:
        """The lease of a worker's present life, as it wrote into its log."""
        found = LEASE.findall(self.log.read_bytes())
        return found[-1].decode() if found else ""

    async def _keep(self) -> None:
        while True:
            with self.log.open("ab") as output:
                self._process = await asyncio.create_subprocess_exec(
                    *self.argv,
                    env=self.environ,
                    cwd=self.folder,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    # A write beyond RLIMIT_FSIZE is then an error for the process, not its death.
                    restore_signals=False,
                )
            self._born.set()
            self.exits.append(await self._process.wait())
            await self.patient.wait()
            if not self.kept:
                return
            await asyncio.sleep(RESTART_S)
