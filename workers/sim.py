"""An engine without a model: deterministic text, a time model, a KV cache of counted tokens, faults on request.

Token i is a function of the prompt and of i alone, and names i, so a lost or doubled token is visible to the byte.
Tests, benchmarks and planning stand on it.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from streaming.messages import Capabilities, Failure, ModelCard, Turn
from workers.engine import Health, Piece, Refused, Request, Stats, Step
from workers.settings import SimSettings
from workers.stops import TokenGate, joined

WORDS = tuple(
    "amber brook cedar delta ember fjord grove haven inlet jetty kelp lagoon mill north ocean pier quarry river sluice "  # noqa: SIM905
    "tide upland valve weir xylem yarrow zephyr basin canal drift eddy ford gate".split()
)

DEFAULT_MAX_TOKENS = 128
HUNG_AFTER_S = 10.0

FAULT = re.compile(r"\[\[(crash|hang|fail)@(\d+)\]\]")


def prompt_text(prompt: Sequence[Turn] | str | Sequence[int]) -> str:
    """The text a prompt stands for here."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{item.role}: {item.content}" if isinstance(item, Turn) else str(item) for item in prompt)


def token_text(prompt: str, index: int) -> str:
    """What the simulated model says as token `index` (from 0) after `prompt`."""
    word = WORDS[zlib.crc32(f"{prompt}{index}".encode()) % len(WORDS)]
    return f"{' ' if index else ''}{word}{index}"


def count_tokens(prompt: str) -> int:
    """About four characters a token."""
    return max(1, len(prompt) // 4)


@dataclass(slots=True)
class _Sequence:
    """One request on its way. `done` counts tokens of earlier attempts too."""

    request: Request
    prompt: str
    prompt_tokens: int
    max_tokens: int
    done: int
    gate: TokenGate
    fault: tuple[str, int] | None
    ready_at: float = 0.0
    cancelled: bool = False
    started: bool = False

    @property
    def used(self) -> int:
        return self.prompt_tokens + self.done

    @property
    def most(self) -> int:
        return self.prompt_tokens + self.max_tokens


@dataclass(slots=True)
class _Batch:
    """What is in flight and what waits for slots or cache, oldest first."""

    running: list[_Sequence] = field(default_factory=list)
    waiting: deque[_Sequence] = field(default_factory=deque)


class SimEngine:
    """See workers.engine.Engine. `now` and `sleep` may be replaced to run it on a virtual clock."""

    def __init__(self, model: str, settings: SimSettings) -> None:
        self._model, self._settings = model, settings
        self._batch = _Batch()
        self._by_id: dict[str, _Sequence] = {}
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._steps = 0
        self._stepped_at = 0.0
        self._hung = False

    async def start(self, on_step: Step, on_phase: Callable[[str], None]) -> ModelCard:
        on_phase("loading simulated weights")
        await asyncio.sleep(self._settings.load_ms / 1000)
        self._task = asyncio.create_task(self._run(on_step))
        return ModelCard(
            name=self._model,
            engine="sim",
            context=self._settings.context,
            max_output=self._settings.context - 1,
            capabilities=Capabilities(chat=True, logprobs=-1, json_schema=False, penalties=False, token_prompts=True),
            created=int(time.time()),
        )

    def submit(self, request: Request) -> None:
        sequence = self._sequence(request)
        self._by_id[request.id] = sequence
        self._batch.waiting.append(sequence)
        self._work.set()

    def cancel(self, request_id: str) -> None:
        if sequence := self._by_id.get(request_id):
            sequence.cancelled = True
            self._work.set()

    def fits(self, prompt_tokens: int, max_tokens: int) -> bool:
        if self._batch.waiting or len(self._batch.running) >= self._settings.slots:
            return False
        return not self._settings.kv_tokens or self._reserved() + prompt_tokens + max_tokens <= self._settings.kv_tokens

    def stats(self) -> Stats:
        return Stats(
            slots=self._settings.slots,
            running=len(self._batch.running),
            waiting=len(self._batch.waiting),
            kv_tokens=self._settings.kv_tokens,
            kv_used=sum(sequence.used for sequence in self._batch.running),
            steps=self._steps,
        )

    def health(self) -> Health:
        if self._task is not None and self._task.done():
            return Health(False, "the stepping task ended")
        silent = asyncio.get_running_loop().time() - self._stepped_at
        if self._by_id and self._stepped_at and silent > HUNG_AFTER_S + self._settings.step_ms / 100:
            return Health(False, f"no step for {silent:.0f} s with work present")
        return Health(True)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _sequence(self, request: Request) -> _Sequence:
        prompt = prompt_text(request.prompt)
        prompt_tokens, wanted = count_tokens(prompt), request.sampling.max_tokens
        context = self._settings.context
        if prompt_tokens + (wanted or 1) > context:
            raise Refused(too_long(prompt_tokens, wanted, context))
        max_tokens = wanted or min(DEFAULT_MAX_TOKENS, context - prompt_tokens)
        if self._settings.kv_tokens and prompt_tokens + max_tokens > self._settings.kv_tokens:
            raise Refused(too_long(prompt_tokens, max_tokens, self._settings.kv_tokens))
        gate = TokenGate(request.sampling.stop, request.past_text)
        found = FAULT.search(prompt) if self._settings.faults else None
        fault = (found[1], int(found[2])) if found else None
        return _Sequence(request, prompt, prompt_tokens, max_tokens, request.past_tokens, gate, fault)

    async def _run(self, on_step: Step) -> None:
        """Steps on a fixed grid while there is work; a late step does not delay the next ones."""
        loop = asyncio.get_running_loop()
        step_s = self._settings.step_ms / 1000
        due = loop.time()
        while True:
            if not self._by_id:
                self._work.clear()
                self._stepped_at = 0.0
                await self._work.wait()
                due = loop.time()
            due = max(due + step_s, loop.time() - step_s)
            self._admit(loop.time())
            await asyncio.sleep(max(0.0, due - loop.time()))
            if self._hung:
                await asyncio.Event().wait()
            pieces = self._step(loop.time())
            self._stepped_at = loop.time()
            if pieces:
                on_step(pieces)

    def _admit(self, now: float) -> None:
        batch = self._batch
        while batch.waiting and len(batch.running) < self._settings.slots:
            sequence = batch.waiting[0]
            if not self._has_room(sequence):
                return
            batch.waiting.popleft()
            sequence.ready_at = now + self._settings.prefill_ms / 1000
            batch.running.append(sequence)

    def _has_room(self, sequence: _Sequence) -> bool:
        capacity = self._settings.kv_tokens
        if not capacity or sequence.cancelled:
            return True
        if self._settings.kv_policy == "GUARANTEED_NO_EVICT":
            return self._reserved() + sequence.most <= capacity
        return sum(other.used for other in self._batch.running) + sequence.used + 1 <= capacity

    def _reserved(self) -> int:
        return sum(sequence.most for sequence in self._batch.running)

    def _step(self, now: float) -> list[Piece]:
        self._steps += 1
        self._evict()
        pieces = [self._cancelled(sequence) for sequence in self._live() if sequence.cancelled]
        ready = [sequence for sequence in self._batch.running if sequence.ready_at <= now]
        pieces += [piece for sequence in ready if (piece := self._token(sequence)) is not None]
        for piece in pieces:
            if piece.last:
                self._remove(piece.id)
        return pieces

    def _live(self) -> list[_Sequence]:
        return [*self._batch.running, *self._batch.waiting]

    def _evict(self) -> None:
        """MAX_UTILIZATION: when the next tokens do not fit, the youngest lose their place and prefill again later."""
        capacity = self._settings.kv_tokens
        if not capacity or self._settings.kv_policy != "MAX_UTILIZATION":
            return
        running = self._batch.running
        while len(running) > 1 and sum(sequence.used + 1 for sequence in running) > capacity:
            self._batch.waiting.appendleft(running.pop())

    def _token(self, sequence: _Sequence) -> Piece | None:
        """The next token of one sequence; None once it has been cancelled in this step."""
        if sequence.cancelled:
            return None
        if sequence.fault is not None and sequence.done == sequence.fault[1] and not self._survives(sequence.fault[0]):
            return self._last(sequence, failure=Failure("engine_error", "A fault was injected.", 500))
        if self._hung:
            return None
        text = token_text(sequence.prompt, sequence.done)
        sequence.done += 1
        piece = sequence.gate.feed(Piece(sequence.request.id, text, (zlib.crc32(text.encode()) & 0xFFFF,), 1))
        if sequence.gate.hit:
            return self._last(sequence, piece, finish="stop")
        if sequence.done >= sequence.max_tokens:
            rest = sequence.gate.flush(sequence.request.id)
            return self._last(sequence, joined(sequence.request.id, (piece, rest)), finish="length")
        return piece if piece.n else None

    def _survives(self, fault: str) -> bool:
        """Do what the prompt asked for. True: only time stops; False: this request alone fails."""
        if fault == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        self._hung = fault == "hang"
        return self._hung

    def _cancelled(self, sequence: _Sequence) -> Piece:
        return self._last(sequence, finish="cancelled")

    def _last(
        self, sequence: _Sequence, piece: Piece | None = None, *, finish: str = "", failure: Failure | None = None
    ) -> Piece:
        piece = piece or Piece(sequence.request.id)
        return replace(piece, finish=finish, prompt_tokens=sequence.prompt_tokens, failure=failure)

    def _remove(self, request_id: str) -> None:
        sequence = self._by_id.pop(request_id)
        for queue in (self._batch.running, self._batch.waiting):
            if sequence in queue:
                queue.remove(sequence)


def too_long(prompt_tokens: int, max_tokens: int | None, context: int) -> Failure:
    """The refusal of a request that does not fit, with the numbers its owner needs."""
    asked = f" and {max_tokens} were asked for the answer" if max_tokens else ""
    return Failure(
        "context_length_exceeded",
        f"This model's context is {context} tokens; the prompt has {prompt_tokens}{asked}. Shorten one of them.",
        400,
        "messages",
    )
