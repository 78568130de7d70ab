"""What anybody may do who has a job's id, written down: cancel it, and read how it ended."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bench.chaos.asks import FIRST, Ask, authorization, other
from bench.chaos.checker import GONE
from bench.chaos.history import ClientHistory
from bench.chaos.http import Cut, Exchange, answered

RETRY_DELAY_S = 0.05
LIST = "/v1/jobs?limit=100"
CANCEL = ("POST", "/v1/jobs/{job}/cancel")
FOREIGN = (
    ("GET", "/v1/jobs/{job}"),
    ("GET", "/v1/jobs/{job}/events"),
    ("GET", "/v1/jobs/{job}/result"),
    ("GET", "/v1/jobs/{job}/stream"),
    ("GET", "/v1/jobs/{job}/timing"),
    ("GET", "/v1/messages/msg_{job}"),
    CANCEL,
    ("GET", LIST),
)
"""What is tried of a job with another tenant's key."""
ALL_PATHS_INTERVAL = 16
PING = "ping"
UNLOGGED = (PING, "queue.position", "interrupted")
"""Events that are no part of a job's log: they have no id."""
PASSING = ("queued", "started", "delta", "stream.reset")
"""Those of the log that end nothing."""


def code_of(body: bytes) -> str:
    """The code of an error's body, or what it begins with where it has none."""
    try:
        return str(msgspec.json.decode(body)["error"]["code"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:80].decode(errors="replace")


def usage_of(data: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens of the prompt and of the answer; () where nobody counted them."""
    usage = data.get("usage")
    return (usage["prompt_tokens"], usage["completion_tokens"]) if usage else ()


def opened(job: str, path: str, status: int, body: bytes) -> bool:
    """Whether an answer to another tenant shows that the job exists: anything but that there is no such job, or a list
    that does not name it. A server that is in trouble shows nothing of the job."""
    if in_trouble(status):
        return False
    return status != 200 or job.encode() in body if path == LIST else status != 404


def in_trouble(status: int) -> bool:
    """Whether an answer is about its server, not about what was asked for."""
    return status == 429 or status >= 500


class Readings:
    """`ports` are the API processes known, in the order they are tried."""

    def __init__(self, history: ClientHistory, ports: Sequence[int]) -> None:
        self.history, self.ports = history, ports
        self.owners: dict[str, str] = {}
        """The tenants of accepted jobs."""
        self._tried = 0
        self.guarded = False
        """There are API keys: what another tenant may read is tried with each job."""

    def note_answer(self, what: str, exchange: Exchange, code: str) -> None:
        """An answer that is no success, for the judge."""
        after = exchange.headers.get("retry-after")
        self.history.add("answered", what=what, status=exchange.status, code=code, retry_after=after)

    async def fetch(self, job: str, port: int, method: str, path: str) -> tuple[int, bytes]:
        """Status and body of an answer about a job, asked for by its owner: that it is gone is judged with what else
        is known of the job. Raises Cut."""
        async with answered(port, method, path, headers=authorization(self.owner(job))) as exchange:
            body = await exchange.body()
        if exchange.status >= 400 and exchange.status not in GONE:
            self.note_answer(f"{method} {path}", exchange, code_of(body))
        return exchange.status, body

    def owner(self, job: str) -> str:
        """Whose job it is."""
        return self.owners.get(job, FIRST)

    async def cancel(self, job: str, port: int) -> str:
        """Cancel a job; the state it was answered with, "" without an answer."""
        try:
            status, body = await self.fetch(job, port, "POST", f"/v1/jobs/{job}/cancel")
        except Cut as cut:
            self.history.add("unknown", job=job, why=f"cancel: {cut}")
            return ""
        state = msgspec.json.decode(body)["status"] if status == 200 else ""
        self.history.add("cancel", job=job, status=status, state=state)
        return str(state)

    async def put_unread(self, ask: Ask, port: int) -> int:
        """Put a job that nobody reads; only its answer is judged. The status of the answer, 0 without one."""
        try:
            async with answered(port, "POST", "/v1/jobs", ask.body, authorization(ask.tenant)) as exchange:
                body = await exchange.body()
        except Cut as cut:
            self.history.add("unknown", why=str(cut))
            return 0
        if exchange.status >= 400:
            self.note_answer("POST /v1/jobs", exchange, code_of(body))
        return exchange.status

    async def read_finally(self, job: str, patience_s: float = 20.0) -> str:
        """Read a job as anybody may who has its id, until it has ended or patience is over; its state."""
        deadline = time.monotonic() + patience_s
        for port in itertools.cycle(self.ports):
            late = time.monotonic() > deadline
            try:
                status, body = await self.fetch(job, port, "GET", f"/v1/jobs/{job}?wait=2")
                view = msgspec.json.decode(body) if status == 200 else {}
                if late or view.get("completed_at") or status in GONE:
                    log = await self._replay(job, port) if view.get("completed_at") else []
                    self._final(job, status, view, log)
                    if self.guarded:
                        await self._read_as_other(job, port)
                    return str(view.get("status", ""))
            except Cut:
                if late:
                    self._final(job, 0, {}, [])
                    return ""
            await asyncio.sleep(RETRY_DELAY_S)
        raise AssertionError("cycle never ends")

    async def _replay(self, job: str, port: int) -> list[dict[str, str]]:
        """The events of a job's log, as they are told to a reader who has nothing."""
        headers = authorization(self.owner(job))
        async with answered(port, "GET", f"/v1/jobs/{job}/events", headers=headers) as exchange:
            if exchange.status != 200:
                raise Cut(f"HTTP {exchange.status}")
            return [block async for block in exchange.blocks() if block.get("event", PING) not in UNLOGGED]

    async def _read_as_other(self, job: str, port: int) -> None:
        """I6: to the other tenant's key the job does not exist. All ways are tried with some jobs, two with each."""
        self._tried += 1
        for method, path in FOREIGN if self._tried % ALL_PATHS_INTERVAL == 1 else FOREIGN[:2]:
            await self.try_as_other(job, port, method, path)

    async def try_as_other(self, job: str, port: int, method: str, path: str) -> None:
        """One way to a job, with the other tenant's key; what it should not have been told is written down, and so is
        a refusal or an error. Raises Cut."""
        headers = authorization(other(self.owner(job)))
        async with answered(port, method, path.format(job=job), headers=headers) as exchange:
            trouble = in_trouble(exchange.status)
            body = await exchange.body() if trouble or path == LIST else b""
        if trouble:
            self.note_answer(f"{method} {path}", exchange, code_of(body))
        if opened(job, path, exchange.status, body):
            self.history.add("crossed", job=job, status=exchange.status, path=f"{method} {path}")

    def _final(self, job: str, status: int, view: Mapping[str, Any], log: Sequence[Mapping[str, str]]) -> None:
        parts: list[list[str]] = [[]]
        for block in log:
            match block["event"]:
                case "delta":
                    parts[-1].append(msgspec.json.decode(block["data"])["text"])
                case "stream.reset":
                    parts.append([])
        first = ((view.get("result") or {}).get("choices") or [{}])[0]
        text = (first.get("message") or {}).get("content", first.get("text", ""))
        self.history.add(
            "final",
            job=job,
            status=status,
            state=view.get("status", ""),
            code=(view.get("error") or {}).get("code", ""),
            text=text,
            finish=[choice["finish_reason"] for choice in (view.get("result") or {}).get("choices") or ()],
            usage=list(usage_of(view)),
            attempts=view.get("attempts", 0),
            replay=parts[-1],
            before=parts[:-1],
            ends=[block["event"] for block in log if block["event"] not in PASSING],
            log=[[block["event"], block.get("id", "")] for block in log],
        )
