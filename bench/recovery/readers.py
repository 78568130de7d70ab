"""Readers of streams, who note when each token came and resume after a cut, and figures of what they saw."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.http import answer_to, request
from bench.penstock import MODEL
from bench.report import Column, Ratio
from bench.stats import finite
from penstock.engine import ChatTurn
from workers.engines.sim.text import prompt_text, token_text


@dataclass(slots=True)
class Reader:
    """One request and what its reader has."""

    prompt: str
    tokens: int
    job: str = ""
    cursor: str = ""
    """The id of its last event."""
    text: str = ""
    came: list[float] = field(default_factory=list)
    """When each token did (monotonic)."""
    resets: int = 0
    ended: str = ""
    """The name of its last event."""

    @property
    def body(self) -> dict[str, Any]:
        return {"model": MODEL, "messages": [{"role": "user", "content": self.prompt}], "max_tokens": self.tokens}

    @property
    def is_exact(self) -> bool:
        """Whether it has every token of its answer once and in order."""
        prompt = prompt_text((ChatTurn("user", self.prompt),))
        return self.text == "".join(token_text(prompt, index) for index in range(self.tokens))

    def silence_s(self, since: float) -> float | None:
        """The longest time between two tokens that ended after `since`; None if none came after it."""
        gaps = [after - before for before, after in itertools.pairwise(self.came) if after > since]
        return max(gaps, default=None)

    async def chat(self, port: int) -> None:
        """Stream a chat to its end. Raises RequestRefused, OSError."""
        sent = request("POST", "/v1/chat/completions", {**self.body, "stream": True})
        async with answer_to(port, sent) as (reader, _):
            while line := await reader.readline():
                if line.startswith(b"data: [DONE]"):
                    self.ended = "completed"
                    return
                if line.startswith(b"data: "):
                    self._take_chunk(json.loads(line[6:]))

    def _take_chunk(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.ended = str(chunk["error"]["code"])
        elif chunk["choices"] and (text := chunk["choices"][0]["delta"].get("content")):
            self.text += text
            self.came.append(time.monotonic())

    async def put(self, port: int) -> None:
        """As a job. Raises RequestRefused, OSError."""
        async with answer_to(port, request("POST", "/v1/jobs", self.body, {"Connection": "close"})) as (reader, _):
            self.job = json.loads(await reader.read())["id"]

    async def follow(self, port: int) -> None:
        """The job's events behind the last one, to its end or until it is cut. Raises RequestRefused, OSError."""
        headers = {"Last-Event-ID": self.cursor} if self.cursor else {}
        name = ""
        async with answer_to(port, request("GET", f"/v1/jobs/{self.job}/events", None, headers)) as (reader, _):
            while line := await reader.readline():
                if line.startswith(b"event: "):
                    name = line[7:].strip().decode()
                elif line.startswith(b"id: "):
                    self.cursor = line[4:].strip().decode()
                elif line.startswith(b"data: ") and self._take_event(name, line[6:]):
                    return

    def _take_event(self, name: str, data: bytes) -> bool:
        """Whether it was the last one."""
        if name == "delta":
            self.text += json.loads(data)["text"]
            self.came.append(time.monotonic())
        elif name == "stream.reset":
            self.resets, self.text = self.resets + 1, ""
        elif name in ("completed", "failed", "cancelled", "expired"):
            self.ended = name
        return bool(self.ended)


COLUMNS = (Column("show", "what was killed"), Column("what", "figure"), Column("value", "value", 1))

Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class RecoverySample:
    """What one show found."""

    rows: list[Row]
    goals: list[Ratio]


@dataclass(frozen=True, slots=True)
class Stall:
    """The longest answers of the API process and of a bare server, and the longest of the API process less those of the
    bare server at that moment; while readers recovered, and before that. Infinity where one did not come."""

    api_ms: float
    control_ms: float
    own_ms: float
    before_api_ms: float
    before_control_ms: float
    before_own_ms: float


def of_worker(readers: Sequence[Reader], killed: float, lease_s: float, stall: Stall) -> RecoverySample:
    """A worker was killed at that time (monotonic) with all these running."""
    silences = [reader.silence_s(killed) for reader in readers]
    heard = [silence for silence in silences if silence is not None]
    show = f"worker with {len(readers)} running"
    rows = _rows(
        show,
        {
            "longest silence, s": max(heard, default=None),
            "shortest, s": min(heard, default=None),
            **_stalls(stall),
            **_wrong(readers),
        },
    )
    longest = max(heard) if len(heard) == len(readers) else None
    return RecoverySample(
        rows,
        [
            Ratio.held(
                "recovery.silence", what=f"{show}: silence beyond the lease, s", value=_beyond(longest, lease_s)
            ),
            _stood_still(show, stall, "recovery.stall"),
            *_whole(show, readers),
        ],
    )


def of_api(readers: Sequence[Reader], killed: float, stall: Stall) -> RecoverySample:
    """An API process was killed at that time with all these listening, and another one was asked at once."""
    resumed = [next((at - killed for at in reader.came if at > killed), None) for reader in readers]
    on = [each for each in resumed if each is not None]
    show = f"API process with {len(readers)} readers"
    rows = _rows(
        show,
        {
            "until the first has gone on, s": min(on, default=None),
            "until all have gone on, s": max(on, default=None),
            **_stalls(stall),
            **_wrong(readers),
        },
    )
    last = max(on) if len(on) == len(readers) else None
    goal = Ratio.held("recovery.resumed", what=f"{show}: until all have gone on, s", value=last)
    return RecoverySample(rows, [goal, _stood_still(show, stall, None), *_whole(show, readers)])


def _beyond(silence: float | None, lease_s: float) -> float | None:
    return None if silence is None else max(0.0, silence - lease_s)


def _stood_still(show: str, stall: Stall, goal: str | None) -> Ratio:
    what = f"{show}: stall of the API process beside a bare server, ms"
    return Ratio.held(goal, what=what, value=finite(stall.own_ms))


def _whole(show: str, readers: Sequence[Reader]) -> list[Ratio]:
    """No reader may have lost anything."""
    counts = {**_wrong(readers), "readers without every token once": sum(not reader.is_exact for reader in readers)}
    return [Ratio(what=f"{show}: {what}", value=count, at_most=0, digits=0) for what, count in counts.items()]


def _stalls(stall: Stall) -> dict[str, float | None]:
    return {
        "longest answer of the API process, ms": finite(stall.api_ms),
        "of a bare server beside it, ms": finite(stall.control_ms),
        "of the API process less the bare server's at that moment, ms": finite(stall.own_ms),
        "of the API process before the kill, ms": finite(stall.before_api_ms),
        "of the bare server before the kill, ms": finite(stall.before_control_ms),
    }


def _wrong(readers: Sequence[Reader]) -> dict[str, float | None]:
    return {
        "readers told to begin anew": sum(reader.resets for reader in readers),
        "answers that did not complete": sum(reader.ended != "completed" for reader in readers),
    }


def _rows(show: str, figures: dict[str, float | None]) -> list[Row]:
    return [{"show": show, "what": what, "value": value} for what, value in figures.items()]
