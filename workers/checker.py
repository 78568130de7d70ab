"""JSON schema validator: checks finished answers of JSON or of tool calls, in a child (workers/json_check.py)."""

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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.engine import Failure
from penstock.tools import Tools
from workers.attempt import Attempt
from workers.engines.calls import check_calls
from workers.engines.constraint import complete_texts, unchecked, unusable, violated
from workers.engines.schema import UnusableSchemaError, plain

PROGRAM = Path(__file__).resolve().with_name("json_check.py")

ANSWER_TIMEOUT_S = 30.0
"""For one answer, including the start of the child. The child limits its own CPU time far below this; the timeout
covers a machine that is stalled."""

EXIT_TIMEOUT_S = 1.0
"""For the exit of a child that has closed its pipe."""

MAX_EXHAUSTING = 1000
"""Schemas remembered because their check exceeded a limit."""

EXHAUSTED = frozenset({-signal.SIGPROF, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS})
"""Exit statuses of a child whose check exceeded its CPU time, stack or memory. No other exit is the schema's fault."""

ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL")
"""Variables that the child inherits: those Python needs to start, and no secrets."""

log = logging.getLogger(__name__)


class Checker:
    """Runs checks one at a time in one child process, which the first check starts. One per worker."""

    def __init__(self, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._child: Process | None = None
        self._lock = asyncio.Lock()
        self._exhausting: OrderedDict[bytes, None] = OrderedDict()
        """Digests of schemas whose check exceeded a limit, the least recently used first. They are never checked again,
        so that they do not delay the checks of other jobs."""

    async def failure(self, schema: dict[str, Any], texts: Sequence[str]) -> Failure | None:
        """Validate the complete texts of one job.

        Args:
            schema: `{}` accepts any JSON object.
            texts: none: only check that the schema can be used.
        Returns: why the job must fail, or None.
        """
        try:
            read = await asyncio.to_thread(plain, schema or {"type": "object"})
        except UnusableSchemaError as error:
            return unusable(str(error))
        request = json.dumps({"schema": read, "texts": texts}).encode()
        async with self._lock:
            digest = hashlib.sha256(json.dumps(schema, sort_keys=True).encode()).digest()
            if digest in self._exhausting:
                self._exhausting.move_to_end(digest)
                return unchecked()
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer = json.loads(await self._exchange(request))
            except (TimeoutError, OSError, ValueError, asyncio.IncompleteReadError) as error:
                log.warning("a JSON schema could not be checked, its check is ended: %r", error)
                if await self._end_child() and schema:
                    self._exhausting[digest] = None
                    if len(self._exhausting) > MAX_EXHAUSTING:
                        self._exhausting.popitem(last=False)
                return unchecked()
            except asyncio.CancelledError:
                await self._end_child()  # the next check would read this one's answer
                raise
        if problem := answer.get("unusable"):
            return unusable(problem)
        return violated(problem) if (problem := answer["violation"]) else None

    async def schema_failure(self, attempt: Attempt) -> Failure | None:
        """Why no answer can be judged by the schemas of a job, found while the engine generates."""
        tools, schema = attempt.job.tools, attempt.job.sampling.json_schema
        if tools is not None:
            strict = {tool.name: list[str]() for tool in tools.offered if tool.strict}
            if (failure := await self._arguments_failure(tools, strict)) is not None or schema is None:
                return failure
        return await self.failure(schema or {}, ())

    async def answer_failure(self, attempt: Attempt) -> Failure | None:
        """Why the complete texts of a job do not follow its schema, or its calls cannot be used."""
        job, schema, stops = attempt.job, attempt.job.sampling.json_schema, any(attempt.job.sampling.stop)
        texts, finishes = await asyncio.to_thread(attempt.answers)
        if job.tools is not None:
            calls = await asyncio.to_thread(check_calls, texts, finishes, job.tools, stops=stops)
            if isinstance(calls, Failure):
                return calls
            attempt.end_with_calls(calls.choices)
            if (failure := await self._arguments_failure(job.tools, calls.arguments)) is not None or schema is None:
                return failure
        complete = await asyncio.to_thread(complete_texts, texts, finishes, stops=stops, parted=job.parted)
        if isinstance(complete, Failure):
            return complete
        return await self.failure(schema or {}, complete) if complete else None

    async def _arguments_failure(self, tools: Tools, arguments: Mapping[str, Sequence[str]]) -> Failure | None:
        """Why arguments, by the name of their function, do not follow its schema; or why the schema cannot be used."""
        for name, texts in arguments.items():
            schema = next(tool.schema for tool in tools.offered if tool.name == name)
            if (failure := await self.failure(schema, texts)) is not None:
                return failure.about("tools", f"the function {name} in tools")
        return None

    async def stop(self) -> None:
        """End the child. Idempotent."""
        async with self._lock:
            await self._end_child()

    async def _exchange(self, request: bytes) -> bytes:
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
        """Kill the child. Returns whether it had already died at its limit of CPU time or memory."""
        child, self._child = self._child, None
        if child is None:
            return False
        if child.stdout is not None and child.stdout.at_eof():
            with suppress(TimeoutError):  # it is exiting: a kill now would hide its exit status
                async with asyncio.timeout(EXIT_TIMEOUT_S):
                    await child.wait()
        if child.returncode is None:
            child.kill()
        if child.stdin is not None:
            child.stdin.close()
        return await child.wait() in EXHAUSTED
