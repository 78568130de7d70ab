"""Requests of the clients of a fault row: their tenants, the answers they may get, and each client's state."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from bench.penstock import key_rows

FIRST, SECOND = "first", "second"
TENANTS = (FIRST, SECOND)


def key_of(tenant: str) -> str:
    """The API key of a tenant."""
    return f"sk-chaos-{tenant}"


def other(tenant: str) -> str:
    """The other one."""
    return SECOND if tenant == FIRST else FIRST


def authorization(tenant: str) -> dict[str, str]:
    """The header a tenant sends."""
    return {"Authorization": f"Bearer {key_of(tenant)}"}


def configuration() -> str:
    """Rows of penstock.toml. The first tenant may look after dead letters; the limits of the second one's key are never
    reached, but count all that it uses."""
    limits = "limits = { queued = 1000000000, tokens_per_month = 1000000000000 }\n"
    return key_rows(FIRST, key_of(FIRST), admin=True) + key_rows(SECOND, key_of(SECOND)) + limits


ANY = math.inf

REFUSALS = frozenset(
    {
        (429, "deadline_unreachable"),
        (429, "queue_full"),
        (503, "draining"),
        (503, "no_capacity"),
        (503, "store_full"),
        (503, "store_unavailable"),
    }
)
"""Status and code of every refusal the documentation knows; each comes with Retry-After."""

BREAKS = frozenset({"draining", "store_unavailable"})
"""Codes of errors in a stream that say nothing about its job: read on elsewhere."""

RESETS = frozenset({"stream_reset", "resume_impossible"})
"""Codes of errors in a chat stream which say that what was shown is not what is stored."""


class Other(NamedTuple):
    """An answer that is no refusal, and that a row asks for; at most so many per trial, over all clients."""

    status: int
    code: str
    most: int


@dataclass(frozen=True, slots=True)
class Budget:
    """Of each trial, over all clients. What exceeds it is a violation; any other answer always is."""

    refused: float = 0
    """Documented refusals: 429 and 503 with Retry-After."""
    codes: tuple[str, ...] | None = None
    """Of refusals that the fault explains; any documented one, if it is None."""
    unanswered: float = 0
    """Requests that were sent and got no answer."""
    broken: float = 0
    """Connections that ended, or streams that ended with a passing error, before their end."""
    others: tuple[Other, ...] = ()
    """Other answers that the row asks for: any other code, and any more of these, is a violation."""
    why: str = "nothing that clients talk to is disturbed"


NOTHING = Budget()


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `may`: the final states it may meet."""

    prompt: str
    tokens: int = 120
    chat: bool = True
    """A chat, or else a job."""
    whole: bool = False
    """The chat's answer comes in one piece, or else as a stream."""
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
    def limits(self) -> dict[str, int]:
        """How long it may take, in milliseconds, by the name of each limit."""
        return {name: self.queue[name] for name in ("deadline_ms", "max_queue_ms") if name in self.queue}

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/jobs"

    @property
    def body(self) -> bytes:
        messages = [{"role": "user", "content": self.prompt}]
        body = {"model": self.model, "messages": messages, "max_tokens": self.tokens, "queue": dict(self.queue)}
        stream = self.chat and not self.whole
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        return msgspec.json.encode(body | usage | {"stream": stream, "metadata": dict(self.metadata)})


@dataclass(slots=True)
class ClientView:
    """What one client knows so far."""

    req: int
    ask: Ask
    job: str = ""
    port: int = 0
    """Of the API process that it asks or reads at."""
    shown: int = 0
    cursor: str = ""
    """The id of the last event it was shown: opaque, sent back as it came."""
    state: str = ""
    usage: Sequence[int] = ()
    """Tokens of the prompt and of the answer, as the stream counted them."""
    finish: Sequence[str] = ()
    """Why the text of each choice ended, as the stream said."""
    refused: int = 0
    """Status of the refusal it ended with."""
    over: bool = False
    """Its last stream said how it ends: by an end, or by an error."""
    answered: bool = False
    """The last try was answered, or is known to have got no answer."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Its first token was shown, or it is over."""
    accepted: asyncio.Event = field(default_factory=asyncio.Event)
    """It is accepted, or over."""
