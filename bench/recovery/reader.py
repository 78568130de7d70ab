"""A reader of a measurement: what it has of its answer, and when each token came."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import dataclass, field
from typing import Any

from bench.http import answer_to, request
from bench.penstock import MODEL
from penstock.engine import ChatTurn
from workers.engines.sim.answers import prompt_text, token_text


@dataclass(slots=True)
class Reader:
    """One request and what its reader has."""

    prompt: str
    tokens: int
    job: str = ""
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
        """The job's events, to its end. Raises RequestRefused, OSError."""
        name = ""
        async with answer_to(port, request("GET", f"/v1/jobs/{self.job}/events")) as (reader, _):
            while line := await reader.readline():
                if line.startswith(b"event: "):
                    name = line[7:].strip().decode()
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
