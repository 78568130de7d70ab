"""Validates finished answers of jobs that asked for JSON, in a child process (workers/json_check.py)."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from streaming.jobs.terminal import Failure
from workers.engines.constraint import unchecked, unusable, violated

PROGRAM = Path(__file__).resolve().with_name("json_check.py")

ANSWER_TIMEOUT_S = 30.0
"""For one answer, a start of the child included. The child limits its own CPU time far below; this is for a machine
that stands still."""

EXIT_TIMEOUT_S = 1.0
"""For the exit of a child that has closed its pipe."""

MAX_EXHAUSTING = 1000
"""Schemas remembered because their check was ended."""

EXHAUSTED = frozenset({-signal.SIGPROF, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS})
"""How the child ends when a check takes all of its CPU time, stack or memory. Other ends are not the schema's fault."""

ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL")
"""What the child is given of this process's environment: what Python needs to start, and none of our secrets."""

log = logging.getLogger(__name__)


class Exhausting:
    """Schemas whose check took all of its time, stack or memory: the latest ones, by digest."""

    def __init__(self) -> None:
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def has(self, schema: dict[str, Any]) -> bool:
        """Whether it is one. Of those that are asked for none is forgotten before the others."""
        digest = _digest(schema)
        if known := digest in self._digests:
            self._digests.move_to_end(digest)
        return known

    def add(self, schema: dict[str, Any]) -> None:
        self._digests[_digest(schema)] = None
        if len(self._digests) > MAX_EXHAUSTING:
            self._digests.popitem(last=False)


def _digest(schema: dict[str, Any]) -> bytes:
    return hashlib.sha256(json.dumps(schema, sort_keys=True).encode()).digest()


class Checker:
    """One child for one worker, started with the first check; one check at a time."""

    def __init__(self, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._child: Process | None = None
        self._turn = asyncio.Lock()
        self._exhausting = Exhausting()
        """None of these holds up the checks of others again."""

    async def failure(self, schema: dict[str, Any], texts: Sequence[str]) -> Failure | None:
        """Why a job must fail whose complete texts these are, or None. `{}` stands for any JSON object. Without texts:
        whether the schema can be used."""
        request = json.dumps({"schema": schema or {"type": "object"}, "texts": texts}).encode()
        async with self._turn:
            if self._exhausting.has(schema):
                return unchecked()
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer = json.loads(await self._asked(request))
            except (TimeoutError, OSError, ValueError, asyncio.IncompleteReadError) as error:
                log.warning("a JSON schema could not be checked, its check is ended: %r", error)
                if await self._end_child() and schema:
                    self._exhausting.add(schema)
                return unchecked()
            except asyncio.CancelledError:
                await self._end_child()  # its answer would be taken for the next check's
                raise
        if problem := answer.get("unusable"):
            return unusable(problem)
        return violated(problem) if (problem := answer["violation"]) else None

    async def stop(self) -> None:
        """End the child. Idempotent."""
        async with self._turn:
            await self._end_child()

    async def _asked(self, request: bytes) -> bytes:
        if self._child is None:
            environ = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
            self._child = await asyncio.create_subprocess_exec(
                sys.executable, "-P", PROGRAM, stdin=PIPE, stdout=PIPE, env=environ, cwd="/"
            )
        to, back = self._child.stdin, self._child.stdout
        assert to is not None and back is not None
        to.write(len(request).to_bytes(4, "big") + request)
        await to.drain()
        return await back.readexactly(int.from_bytes(await back.readexactly(4), "big"))

    async def _end_child(self) -> bool:
        """Whether the child had ended itself at the limit of its CPU time or of its memory."""
        child, self._child = self._child, None
        if child is None:
            return False
        if child.stdout is not None and child.stdout.at_eof():
            with suppress(TimeoutError):  # it is ending: a kill now would take its exit status from asyncio's watcher
                async with asyncio.timeout(EXIT_TIMEOUT_S):
                    await child.wait()
        if child.returncode is None:
            child.kill()
        if child.stdin is not None:
            child.stdin.close()
        return await child.wait() in EXHAUSTED
