"""What anybody may do who has a job's id, written down: cancel it, and read how it ended."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bench.chaos.asks import Ask
from bench.chaos.history import History
from bench.chaos.http import Cut, Exchange, fetch

PAUSE_S = 0.05


class Readings:
    """`ports` are the API processes known, in the order they are tried."""

    def __init__(self, history: History, ports: Sequence[int]) -> None:
        self.history, self.ports = history, ports

    async def cancel(self, job: str, port: int) -> str:
        """Cancel a job; the state it was answered with, "" without an answer."""
        try:
            status, _, body = await fetch(port, "POST", f"/v1/jobs/{job}/cancel")
        except Cut:
            return ""
        state = msgspec.json.decode(body)["status"] if status == 200 else ""
        self.history.add("cancel", job=job, status=status, state=state)
        return str(state)

    async def put_unread(self, ask: Ask, port: int) -> int:
        """Put a job that nobody looks at again, and that is not judged; the status it was refused with, or 0."""
        try:
            status, _, _ = await fetch(port, "POST", "/v1/jobs", ask.body)
        except Cut:
            return 0
        return status if status >= 400 else 0

    async def read_finally(self, job: str, patience_s: float = 20.0) -> str:
        """Read a job as anybody may who has its id, until it has ended or patience is over; its state."""
        deadline = time.monotonic() + patience_s
        for port in itertools.cycle(self.ports):
            late = time.monotonic() > deadline
            try:
                status, _, body = await fetch(port, "GET", f"/v1/jobs/{job}?wait=2")
                view = msgspec.json.decode(body) if status == 200 else {}
                if late or view.get("completed_at"):
                    replay, ends = await self._replay(job, port) if view.get("completed_at") else ([], [])
                    self._final(job, status, view, replay, ends)
                    return str(view.get("status", ""))
            except Cut:
                if late:
                    self._final(job, 0, {}, [], [])
                    return ""
            await asyncio.sleep(PAUSE_S)
        raise AssertionError("cycle never ends")

    async def _replay(self, job: str, port: int) -> tuple[list[str], list[str]]:
        """The texts of a job's deltas, and its terminal events."""
        exchange = await Exchange.begin(port, "GET", f"/v1/jobs/{job}/events")
        try:
            await exchange.answer()
            if exchange.status != 200:
                raise Cut(f"HTTP {exchange.status}")
            blocks = [block async for block in exchange.blocks()]
        finally:
            exchange.close()
        texts = [msgspec.json.decode(block["data"])["text"] for block in blocks if block.get("event") == "delta"]
        others = ("ping", "queued", "started", "delta")
        return texts, [block["event"] for block in blocks if block.get("event", "ping") not in others]

    def _final(self, job: str, status: int, view: Mapping[str, Any], replay: list[str], ends: list[str]) -> None:
        choices = (view.get("result") or {}).get("choices") or [{"message": {"content": ""}}]
        self.history.add(
            "final",
            job=job,
            status=status,
            state=view.get("status", ""),
            code=(view.get("error") or {}).get("code", ""),
            text=choices[0]["message"]["content"],
            tokens=(view.get("usage") or {}).get("completion_tokens", 0),
            attempts=view.get("attempts", 0),
            replay=replay,
            ends=ends,
        )
