"""The one protocol every engine speaks; the worker knows nothing else of it.

An engine generates texts. It does not know jobs, lanes, leases, attempts or Redis: those are the worker's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import msgspec

from streaming.jobs.cards import ModelCard
from streaming.jobs.frames import Logprob
from streaming.jobs.job import ChatTurn, Sampling
from streaming.jobs.terminal import Failure


class Request(msgspec.Struct, frozen=True):
    """One text to generate. `id` is unique among live requests and opaque to the engine."""

    id: str
    prompt: Sequence[ChatTurn] | str | Sequence[int]
    """A conversation (the engine renders it with its chat template), a raw text, or token ids."""
    sampling: Sampling
    """`n` and prompt lists are already expanded: one request is one text."""
    past: Sequence[tuple[str, Sequence[int], int]] = ()
    """What earlier attempts generated: (text, known token ids, token count) each, oldest first. The engine goes on
    after it and never emits it again; `sampling.max_tokens` still counts from the beginning. With a JSON schema only
    an engine whose capabilities say `json_resume` is given one."""
    tenant: str = ""
    """Whose request it is: an engine never uses what it has cached of one tenant's prompts for another's."""

    @property
    def past_tokens(self) -> int:
        return sum(count for _, _, count in self.past)

    @property
    def past_text(self) -> str:
        return "".join(text for text, _, _ in self.past)


class EngineTimes(msgspec.Struct, frozen=True, gc=False):
    """When an engine had one request, by `time.monotonic`; 0.0: it cannot say, and the worker's own view counts."""

    scheduled: float = 0.0
    """First run: it has a slot, and its prompt is being computed."""
    first: float = 0.0
    last: float = 0.0
    """Its first and last token."""


class Piece(msgspec.Struct, frozen=True, gc=False):
    """What one request got in one step. `finish` or `failure` ends it: nothing follows for that id.

    Made once a token: as a frozen dataclass it costs ten times as much, and its `replace` fifty times.
    """

    id: str
    text: str = ""
    ids: tuple[int, ...] = ()
    n: int = 0
    finish: str = ""
    """"stop" | "length" | "cancelled"."""
    prompt_tokens: int = 0
    """Given with the first piece that has tokens and with the last one, 0 between: so it is in the log when the worker
    is lost."""
    cached_tokens: int = 0
    logprobs: tuple[Logprob, ...] = ()
    failure: Failure | None = None
    """This request alone failed; the engine lives."""
    times: EngineTimes | None = None
    """Given with the last piece, where the engine knows."""

    @property
    def last(self) -> bool:
        return bool(self.finish) or self.failure is not None


Step: TypeAlias = Callable[[list[Piece]], None]
"""Called on the event loop with everything one engine step produced. Must not block."""


class Refused(Exception):
    """Raised by check and submit: this request can never run here (too long, unknown option), its requester's fault."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class EngineDead(Exception):
    """Raised when the engine as a whole is gone: the worker process must end and be restarted."""


class Stats(msgspec.Struct, frozen=True):
    """What an engine says of itself now."""

    slots: int
    running: int = 0
    waiting: int = 0
    kv_tokens: int = 0
    """Capacity of the KV cache in tokens; 0: not limited beyond the slots."""
    kv_used: int = 0
    steps: int = 0
    extra: dict[str, float] = {}


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """`ok` False means the process should be restarted, `reason` says why."""

    ok: bool
    reason: str = ""


class Engine(Protocol):
    """Used from one event loop in one process. Implementations: sim.py, llamacpp.py, trtllm.py."""

    async def start(self, on_step: Step, on_phase: Callable[[str], None]) -> ModelCard:
        """Load the model and begin stepping; report phases ("loading weights") as they begin. Raises EngineDead."""
        ...

    async def check(self, request: Request) -> None:
        """Whether a request can run here at all, whatever else runs: asked for each prompt of several, before the first
        is submitted. Keeps nothing of it. Raises Refused, EngineDead; what is found later submit refuses, or fails."""
        ...

    def submit(self, request: Request) -> None:
        """Queue one request in the engine. Raises Refused, EngineDead. Never blocks."""
        ...

    def cancel(self, request_id: str) -> None:
        """Idempotent. The request's last piece (finish="cancelled") still comes through on_step."""
        ...

    def fits(self, prompt_tokens: int, max_tokens: int) -> bool:
        """Whether one more request of about this size would run now rather than wait inside the engine."""
        ...

    def stats(self) -> Stats: ...

    def health(self) -> EngineHealth: ...

    async def stop(self) -> None:
        """Abort what runs, free the device. Bounded in time; idempotent."""
        ...
