"""An open loop: each request leaves when its time has come, whatever became of the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bench.load.answer import Answer
from bench.table1.server import TIMEOUT, HttpConnection, TargetServer
from bench.workload.trace import TraceRow

MAX_OPEN = 2000
"""Requests at once; beyond that one is not sent, and counted as such."""
TOO_MANY = "not sent: too many are open"


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """One request, and what followed it. `late_s`: it left so much after its time; None: it did not."""

    request: TraceRow
    answer: Answer
    late_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayLimits:
    """No request leaves later than `limit_s`; each has `timeout_s` to be answered."""

    limit_s: float = 60.0
    timeout_s: float = 60.0


async def replay(
    server: TargetServer,
    requests: Iterable[TraceRow],
    bounds: ReplayLimits,
    sent: Callable[[], None],
    *,
    lanes: bool = True,
) -> list[ReplayedRequest]:
    """Ask for all of them at their times. `lanes`: say which lane; only Penstock understands that."""
    asking = _Asking(server, bounds, lanes=lanes)
    began = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for request in requests:
            if request.at > bounds.limit_s:
                break
            await asyncio.sleep(max(0.0, began + request.at - time.monotonic()))
            tasks.create_task(asking.ask(request, began + request.at))
            sent()
    asking.close()
    return asking.asked


class _Asking:
    def __init__(self, server: TargetServer, bounds: ReplayLimits, *, lanes: bool) -> None:
        self.asked: list[ReplayedRequest] = []
        self._server, self._bounds, self._lanes = server, bounds, lanes
        self._idle: list[HttpConnection] = []
        self._open = 0

    async def ask(self, request: TraceRow, due: float) -> None:
        if self._open >= MAX_OPEN:
            self.asked.append(ReplayedRequest(request, Answer(request.answer, due, fault=TOO_MANY), None))
            return
        self._open += 1
        line = self._idle.pop() if self._idle else HttpConnection(self._server)
        answer = await self._answer(line, request)
        self._open -= 1
        if answer.fault:  # what its connection may still bring belongs to no later answer
            line.close()
        else:
            self._idle.append(line)
        self.asked.append(ReplayedRequest(request, answer, answer.sent - due))

    async def _answer(self, line: HttpConnection, request: TraceRow) -> Answer:
        begun = time.monotonic()
        try:
            async with asyncio.timeout(self._bounds.timeout_s):
                return await line.ask(self._body(request), request.answer)
        except TimeoutError:
            return Answer(request.answer, begun, fault=TIMEOUT)
        except OSError as error:
            return Answer(request.answer, begun, fault=f"no connection: {error}")

    def _body(self, request: TraceRow) -> bytes:
        """A prompt of one word a token: what a trace has is lengths."""
        messages = [{"role": "user", "content": "water " * request.prompt}]
        queue = {"queue": {"priority": request.lane}} if self._lanes else {}
        return self._server.chat(messages, request.answer, **queue)

    def close(self) -> None:
        """All connections."""
        for line in self._idle:
            line.close()
