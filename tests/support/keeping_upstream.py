"""Fake server that goes on with a generation whose reader has left: a llama-server that keeps replies under names, or
another Penstock, whose jobs have idempotency keys.

The tokens of its generations differ: those of the first are " 1-w0", " 1-w1" and so on.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fake_upstream import ANSWER, STREAM, FakeUpstream, Fault, Sent

NAMES = {"llama-server": "x-conversation-id", "penstock": "idempotency-key"}


def told(generation: int, first: int, end: int) -> str:
    """Tokens of a generation as text."""
    return "".join(ANSWER[first:end]).replace(" w", f" {generation}-w")


@dataclass
class Generation:
    """One generation, with or without a reader."""

    number: int
    name: str
    chunks: list[bytes] = field(default_factory=list)
    over: bool = False
    """Whether it has come to its end, or was stopped."""
    stopped: bool = False
    failed: bool = False
    body: dict[str, Any] = field(default_factory=dict)
    """Of the request that began it."""


class KeepingUpstream(FakeUpstream):
    """A server of one of the kinds in NAMES. A fault cuts the reader off, and not the generation."""

    def __init__(self, kind: str, *faults: Fault, step_s: float = 0.005) -> None:
        super().__init__(kind, faults, step_s=step_s)
        self.generations: list[Generation] = []
        self.kept: dict[str, Generation] = {}
        self.capabilities: dict[str, Any] = {"json_schema": True, "tools": True, "forced_tools": True, "logprobs": 5}
        """What a Penstock shows of its model."""
        self.failing = 0
        """So many jobs of a Penstock fail, before their first token."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def _answer(
        self, writer: asyncio.StreamWriter, method: str, path: str, headers: dict[str, str], body: dict[str, Any]
    ) -> bool:
        parts = urlsplit(path)
        named = [self.kept[name] for name in parse_qs(parts.query).get("conv_id", ()) if name in self.kept]
        if parts.path == "/v1/streams/lookup" and self.kind == "llama-server":
            wanted = [self.kept[name] for name in body["conversation_ids"] if name in self.kept]
            return await self._json(
                writer, [{"conversation_id": each.name, "started_at": each.number} for each in wanted]
            )
        if parts.path == "/v1/stream" and method == "GET":
            if not named:
                return await self._json(writer, {"error": {"message": "no such stream", "code": 404}}, 404)
            return await self._follow(writer, named[0], self._fault({}))
        if parts.path == "/v1/stream" or path.endswith("/cancel"):
            job = [each for each in self.generations if path == f"/v1/jobs/job{each.number}/cancel"]
            for each in (*named, *job):
                each.stopped = each.over = True
                if self.kind == "llama-server":  # the key of a job that was cancelled is taken still
                    self.kept.pop(each.name, None)
            return await self._json(writer, {})
        return await super()._answer(writer, method, path, headers, body)

    def _page(self, path: str, body: dict[str, Any]) -> Any:
        page = super()._page(path, body)
        if path == "/v1/models" and self.kind == "penstock":
            page["data"][0] |= {"owned_by": "penstock", "context_length": 2048, "capabilities": self.capabilities}
        return page

    async def _complete(self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any]) -> bool:
        fault, sent = self._fault(body), self.sent[-1]
        name = sent.headers.get(NAMES[self.kind], "")
        found = self.kept.get(name) if self.kind == "penstock" else None
        if found is not None and found.body != body:
            return await self._json(
                writer, {"error": {"message": "another body", "code": "idempotency_key_reused"}}, 422
            )
        if found is None:
            found = Generation(len(self.generations) + 1, name, body=body)
            self.generations.append(found)
            if self.failing:
                self.failing, found.failed, found.over = self.failing - 1, True, True
            if name:
                self.lose(name)
                self.kept[name] = found
            task = asyncio.create_task(self._generate(found, sent))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await self._follow(writer, found, fault)

    async def _generate(self, generation: Generation, sent: Sent) -> None:
        async for chunk in self._events(sent.path, sent.body, Fault()):
            if generation.over:
                return
            generation.chunks.append(chunk.replace(b" w", b" %d-w" % generation.number))
        generation.over = True

    async def _follow(self, writer: asyncio.StreamWriter, generation: Generation, fault: Fault) -> bool:
        """Send a generation from its beginning. Without a name it ends with its reader."""
        if fault.status:
            return await self._refused(writer, fault)
        named = f"X-Job-Id: job{generation.number}\r\n"
        if generation.failed:
            writer.write(f"HTTP/1.1 500 X\r\n{named}Content-Length: 0\r\n\r\n".encode())
            return True
        writer.write(f"HTTP/1.1 200 OK\r\n{named}{STREAM}".encode())
        sent = 0
        try:
            while not generation.over or sent < len(generation.chunks):
                if fault.after and sent >= fault.after:
                    await asyncio.sleep(fault.stall_s)
                    writer.transport.abort()
                    return False
                if sent == len(generation.chunks):
                    await asyncio.sleep(0.002)
                    continue
                chunk = generation.chunks[sent]
                sent += 1
                writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                await writer.drain()
        except ConnectionError:
            generation.over = generation.over or not generation.name
            raise
        if generation.stopped and self.kind == "penstock":
            error = b'data: {"error": {"message": "The job was cancelled.", "code": "job_cancelled"}}\n\n'
            writer.write(b"%x\r\n%s\r\n" % (len(error), error))
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    async def _refused(self, writer: asyncio.StreamWriter, fault: Fault) -> bool:
        head = "".join([f"{name}: {value}\r\n" for name, value in fault.headers])
        writer.write(f"HTTP/1.1 {fault.status} X\r\n{head}Content-Length: 0\r\n\r\n".encode())
        await writer.drain()
        return True

    def lose(self, name: str = "") -> None:
        """Stop a generation, or all of them, and forget it, as a server that is started again."""
        for each in [name] if name else list(self.kept):
            if found := self.kept.pop(each, None):
                found.over = True
