"""What one client asks, and what it knows so far."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bench.chaos.tenants import FIRST


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `may`: the final states it may meet."""

    prompt: str
    tokens: int = 120
    chat: bool = True
    """A streamed chat, or else a job."""
    key: str = ""
    queue: Mapping[str, Any] = field(default_factory=dict)
    may: Sequence[str] = ("completed",)
    model: str = "sim"
    metadata: Mapping[str, str] = field(default_factory=dict)
    reads: bool = True
    """A job's events are read, or else it is left alone."""
    retries: bool = True
    """It is asked again after 429 and 503."""
    tenant: str = FIRST

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/jobs"

    @property
    def body(self) -> bytes:
        messages = [{"role": "user", "content": self.prompt}]
        body = {"model": self.model, "messages": messages, "max_tokens": self.tokens, "queue": dict(self.queue)}
        usage = {"stream_options": {"include_usage": True}} if self.chat else {}
        return msgspec.json.encode(body | usage | {"stream": self.chat, "metadata": dict(self.metadata)})


@dataclass(slots=True)
class ClientView:
    """What one client knows so far."""

    req: int
    ask: Ask
    job: str = ""
    shown: int = 0
    cursor: str = ""
    """The id of the last event it was shown: opaque, sent back as it came."""
    state: str = ""
    usage: Sequence[int] = ()
    """Tokens of the prompt and of the answer, as the stream counted them."""
    refused: int = 0
    """Status of the refusal it ended with."""
    answered: bool = False
    """The last try was answered, or is known to have got no answer."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Its first token was shown, or it is over."""
    accepted: asyncio.Event = field(default_factory=asyncio.Event)
    """It is accepted, or over."""
