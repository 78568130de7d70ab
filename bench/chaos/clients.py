"""Clients that behave as good clients do, and write down what they see: ask, read, come back with the cursor, ask again
with the same key. They know nothing of what happens behind the door."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from bench.chaos.asks import BREAKS, RESETS, Ask, ClientView, authorization
from bench.chaos.checker import FORGOTTEN, GONE
from bench.chaos.history import ClientHistory
from bench.chaos.http import Cut, Exchange, answered
from bench.chaos.readings import PASSING, RETRY_DELAY_S, UNLOGGED, Readings, code_of, usage_of

WAIT_TIMEOUT_S = 90.0
NO_ID = "none"
"""In the history, of a delta that came without an id."""

ENDS = {
    "job_cancelled": "cancelled",
    "deadline_exceeded": "expired",
    "deadline_exceeded_in_queue": "expired",
    "job_lost": FORGOTTEN,
}
"""Error codes that are an end other than failed."""


class Clients(Readings):
    """All clients of one cluster; `ports` are the API processes they know, in the order they try them."""

    def __init__(self, history: ClientHistory, ports: Sequence[int], patience_s: float = WAIT_TIMEOUT_S) -> None:
        super().__init__(history, ports)
        self._patience_s = patience_s
        self._numbers = itertools.count(1)

    def tell(self, ask: Ask) -> ClientView:
        """A new client, not begun."""
        told = ClientView(next(self._numbers), ask)
        self.history.add(
            "ask",
            req=told.req,
            prompt=ask.prompt,
            tokens=ask.tokens,
            may=list(ask.may),
            key=ask.key,
            reads=ask.reads,
            tenant=ask.tenant,
            limits=ask.limits,
        )
        return told

    def join(self, owner: ClientView, **ask: Any) -> ClientView:
        """One more client of a job that is accepted, with an ask of its own; not begun."""
        told = self.tell(Ask(owner.ask.prompt, owner.ask.tokens, tenant=owner.ask.tenant, **ask))
        told.job = owner.job
        self.history.add("accepted", req=told.req, job=told.job, status=200, ms=0)
        return told

    async def run(self, told: ClientView, port: int | None = None) -> ClientView:
        """From the request to the end it is told, through every break, as long as patience lasts."""
        ports = itertools.cycle(self._from(port))
        deadline = time.monotonic() + self._patience_s
        try:
            # A stream may stay open, with signs of life, and say nothing more.
            with suppress(TimeoutError):
                async with asyncio.timeout(self._patience_s):
                    await self._until_accepted(told, ports, deadline)
                    while told.job and not told.state and told.ask.reads:
                        await self._read_events(told, next(ports))
                        if not told.state:
                            await asyncio.sleep(RETRY_DELAY_S)
            self._give_up(told)
        finally:
            told.begun.set()
            told.accepted.set()
        return told

    def _give_up(self, told: ClientView) -> None:
        """What a client still waits for when it ends: an answer, or the end of what it reads."""
        if told.job and told.ask.reads and not told.state:
            self.history.add("gave_up", req=told.req, why=f"no end within {self._patience_s:.0f} s")
        elif not told.answered:
            self.history.add("gave_up", req=told.req, why=f"no answer within {self._patience_s:.0f} s")

    def _from(self, port: int | None) -> list[int]:
        first = self.ports.index(port) if port in self.ports else 0
        return [*self.ports[first:], *self.ports[:first]]

    async def _until_accepted(self, told: ClientView, ports: itertools.cycle[int], deadline: float) -> None:
        """Ask; again after a refusal that invites it, and after a lost answer if a key makes that safe."""
        while not told.job:
            wait_s = await self._ask(told, next(ports))
            if wait_s is None or time.monotonic() + wait_s > deadline:
                return
            await asyncio.sleep(wait_s)

    async def _ask(self, told: ClientView, port: int) -> float | None:
        """One try; how long to wait for the next one, None for no next one."""
        began, told.answered, told.port = time.monotonic(), False, port
        headers = authorization(told.ask.tenant) | ({"Idempotency-Key": told.ask.key} if told.ask.key else {})
        try:
            exchange = await Exchange.begin(port, "POST", told.ask.path, told.ask.body, headers)
        except Cut:
            return RETRY_DELAY_S  # nothing was sent: this is no request yet, and patience bounds how often it is tried
        try:
            await exchange.answer()
            spent = round(1000 * (time.monotonic() - began), 2)
            if job := exchange.headers.get("x-job-id", ""):
                self._accepted(told, job, exchange.status, spent)
                await self._read_answer(told, exchange)
                return None
            return await self._refused(told, exchange, spent)
        except Cut as cut:
            if told.job:
                self.history.add("cut", req=told.req, why=str(cut))
                return None
            self.history.add("unknown", req=told.req, why=str(cut))
            told.answered = True  # as much as it ever will be
            return RETRY_DELAY_S if told.ask.key else None
        finally:
            exchange.close()

    def _accepted(self, told: ClientView, job: str, status: int, spent: float) -> None:
        told.job, told.answered = job, True
        self.owners[job] = told.ask.tenant
        self.history.add("accepted", req=told.req, job=job, status=status, ms=spent)
        told.accepted.set()

    async def _refused(self, told: ClientView, exchange: Exchange, spent: float) -> float | None:
        code = code_of(await exchange.body())
        told.refused, told.answered = exchange.status, True
        after = exchange.headers.get("retry-after")
        self.history.add("refused", req=told.req, status=exchange.status, code=code, ms=spent, retry_after=after)
        if not told.ask.retries or exchange.status not in (429, 503):
            return None
        return float(exchange.headers.get("retry-after-ms", 1000)) / 1000

    async def _read_answer(self, told: ClientView, exchange: Exchange) -> None:
        """The answer to the request itself: a chat's stream or its whole answer, a job's receipt, or an error of an
        accepted job."""
        if exchange.status >= 400:
            self._error(told, msgspec.json.decode(await exchange.body())["error"])
        elif told.ask.whole:
            self._take_whole(told, msgspec.json.decode(await exchange.body()))
        elif told.ask.chat:
            told.over = False
            async for block in exchange.blocks():
                self._take_chunk(told, block)
            self._closed(told)
        else:
            await exchange.body()

    def _take_whole(self, told: ClientView, answer: Mapping[str, Any]) -> None:
        (choice,) = answer["choices"]
        self._token(told, choice["message"]["content"], "")
        told.usage, told.finish = usage_of(answer), (choice["finish_reason"],)
        self._end(told, "completed", "")

    def _take_chunk(self, told: ClientView, block: Mapping[str, str]) -> None:
        data = block.get("data", "")
        if data == "[DONE]":
            self._end(told, "completed", "")
            return
        chunk = msgspec.json.decode(data)
        if "error" in chunk:
            self._error(told, chunk["error"])
        told.usage = usage_of(chunk) or told.usage
        for choice in chunk.get("choices", ()):
            if text := choice["delta"].get("content"):
                self._token(told, text, "")
            if reason := choice.get("finish_reason"):
                told.finish = (*told.finish, reason)

    async def _read_events(self, told: ClientView, port: int) -> None:
        """Behind what was shown, at any API process."""
        headers = authorization(told.ask.tenant) | ({"Last-Event-ID": told.cursor} if told.cursor else {})
        self.history.add("resume", req=told.req, after=told.cursor)
        told.finish = ()
        told.shown, told.port = told.shown if told.cursor else 0, port
        try:
            async with answered(port, "GET", f"/v1/jobs/{told.job}/events", headers=headers) as exchange:
                if exchange.status != 200:
                    await self._not_read(told, exchange)
                    return
                told.over = False
                async for block in exchange.blocks():
                    self.take_event(told, block)
                self._closed(told)
        except Cut as cut:
            self.history.add("cut", req=told.req, why=str(cut))

    def take_event(self, told: ClientView, block: Mapping[str, str]) -> None:
        """One block of a job's events, as its reader sees it."""
        name = block.get("event", "")
        if name in ("", *UNLOGGED):
            return
        if name not in ("delta", "error"):  # a delta is a token's own event, and an error stands in no log
            self.history.add("event", req=told.req, name=name, id=block.get("id", ""))
        data = msgspec.json.decode(block["data"])
        if name == "delta":
            self._token(told, data["text"], block.get("id", NO_ID))
        elif name == "stream.reset":
            self._reset(told, name)
        elif name == "error":
            self._error(told, data.get("error") or data)
        elif name not in PASSING:
            code, told.usage = (data.get("error") or {}).get("code", ""), usage_of(data)
            told.finish = data.get("finish_reasons", ())
            self._end(told, FORGOTTEN if code == "job_lost" else name, code)
        told.cursor = block.get("id", told.cursor)

    async def _not_read(self, told: ClientView, exchange: Exchange) -> None:
        """The events were refused. A job that the store does not know has ended for its reader."""
        code = code_of(await exchange.body())
        if exchange.status in GONE:
            self._end(told, FORGOTTEN, code)
            return
        self.note_answer(f"GET /v1/jobs/{told.job}/events", exchange, code)
        self.history.add("cut", req=told.req, why=f"HTTP {exchange.status}")

    def _token(self, told: ClientView, text: str, event_id: str) -> None:
        if told.finish:
            self.history.add("error", req=told.req, code="text behind its finish_reason")
        told.shown += 1
        self.history.add("token", req=told.req, text=text, id=event_id)
        told.begun.set()

    def _reset(self, told: ClientView, code: str) -> None:
        told.cursor, told.shown, told.finish = "", 0, ()
        self.history.add("reset", req=told.req, code=code)

    def _closed(self, told: ClientView) -> None:
        """A stream that was closed in good order, but said neither an end nor an error, is broken off all the same."""
        if not told.over:
            self.history.add("cut", req=told.req, why="ended without an end")

    def _error(self, told: ClientView, error: Mapping[str, Any]) -> None:
        code, told.over = str(error["code"]), True
        if code in RESETS:
            self._reset(told, code)
        elif code in BREAKS:
            self.history.add("cut", req=told.req, why=code)
        elif code == "internal_error":
            self.history.add("error", req=told.req, code=code)
            self.history.add("cut", req=told.req, why=code)
        else:
            self._end(told, ENDS.get(code, "failed"), code)

    def _end(self, told: ClientView, state: str, code: str) -> None:
        told.state, told.over = state, True
        self.history.add("end", req=told.req, state=state, code=code, usage=list(told.usage), finish=list(told.finish))
