"""A worker in the test's process that is late in one part of a request's time, and one request to it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch

from penstock.engine import Piece, Request
from streaming.jobs.lease import Claimed, Lease
from streaming.redis.client import Call, RedisClient
from workers.engines.sim.engine import SimEngine
from workers.engines.sim.settings import SimSettings
from workers.record import Recorder
from workers.settings import WorkerSettings
from workers.worker import Worker

SLOW_PARTS = ("ingress", "queue", "gate", "engine_wait", "prefill", "decode", "egress_first", "egress_tail")
"""Parts of a request's time into which a delay can be put."""

STEP_MS, PREFILL_MS = 5.0, 10.0
MAX_S = 150.0
"""A hang becomes a failure."""


class SlowLease(Lease):
    """Late with what one part consists of."""

    def __init__(self, wire: RedisClient, slow: str, delay_s: float) -> None:
        super().__init__(wire, "sim")
        self._slow, self._delay_s = slow, delay_s
        self._begun = False
        self.looked = asyncio.Event()
        """Set once it has looked for jobs: a delay of the first look would be none of a request."""

    async def _pause(self, wanted: bool) -> None:
        if wanted:
            await asyncio.sleep(self._delay_s)

    async def claim(self, partition: int, want: int, **options: Any) -> Claimed:
        await self._pause(self._slow == "queue")
        claimed = await super().claim(partition, want, **options)
        await self._pause(self._slow == "gate" and bool(claimed.jobs))
        self.looked.set()
        return claimed

    def send_nowait(self, calls: Sequence[Call], on_done: Callable[[bool, Sequence[Any]], None]) -> bool:
        return not self._slow.startswith("egress") and super().send_nowait(calls, on_done)  # else by `calls`, late

    async def calls(self, calls: Sequence[Call]) -> None:
        finishes = any(name == "finish" for name, _, _ in calls)
        await self._pause(self._slow == "egress_tail" and finishes)
        await self._pause(self._slow == "egress_first" and not self._begun)
        self._begun = not finishes
        await super().calls(calls)


class SlowEngine(SimEngine):
    """Late in running what it was given."""

    def __init__(self, settings: SimSettings, slow: str, delay_s: float) -> None:
        super().__init__("sim", settings)
        self._slow, self._delay_s = slow, delay_s

    def submit(self, request: Request) -> None:
        if self._slow == "engine_wait":
            asyncio.get_running_loop().call_later(self._delay_s, super().submit, request)
        else:
            super().submit(request)


@asynccontextmanager
async def working(
    wire: RedisClient, recorder: Recorder, slow: str = "", delay_s: float = 0.0, drain_s: float = 10
) -> AsyncIterator[Worker]:
    """A worker that is late in one part. It polls so seldom that only a wake-up brings it its work."""
    late_ms = delay_s * 1000 if slow == "prefill" else 0.0
    engine = SlowEngine(SimSettings(step_ms=STEP_MS, prefill_ms=PREFILL_MS + late_ms), slow, delay_s)
    worker: Worker | None = None

    def on_step(pieces: list[Piece]) -> None:
        assert worker is not None
        worker.on_step(pieces)

    card = await engine.start(on_step, lambda _: None)
    lease = SlowLease(wire, slow, delay_s)
    with patch("workers.worker.Lease", lambda *_: lease):
        worker = Worker(wire, engine, card, WorkerSettings(poll_ms=1_500, drain_s=drain_s), recorder)
    stop = asyncio.Event()
    task = asyncio.create_task(worker.run(stop))
    try:
        async with asyncio.timeout(MAX_S):
            await lease.looked.wait()
        yield worker
    finally:
        stop.set()
        await asyncio.gather(task)
        await engine.stop()


async def ask(port: int, tokens: int, slow: str = "", delay_s: float = 0.0) -> tuple[str, float]:
    """One streamed chat; the job's id and the client's own end-to-end time in seconds."""
    tokens += round(delay_s * 1000 / STEP_MS) if slow == "decode" else 0
    chat = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "stream": True}
    body = json.dumps(chat).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    )
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode())
    begun = time.monotonic()
    await writer.drain()
    await asyncio.sleep(delay_s if slow == "ingress" else 0.0)
    writer.write(body)
    async with asyncio.timeout(MAX_S):
        answer = await reader.read()
    spent = time.monotonic() - begun
    writer.close()
    assert b"data: [DONE]" in answer, answer[-300:]
    return answer.lower().split(b"x-job-id: ")[1].split(b"\r\n")[0].decode(), spent
