"""Simulated engine: generates deterministic text without a model, with a time model, a KV cache and injected faults.

Token i depends only on the prompt and on i, and contains i, so that a lost or duplicated token is visible to the byte.
Tests and benchmarks rely on that.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import string
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from penstock.engine import EngineHealth, EngineTimes, Failure, ModelCard, Piece, Refused, Request, Stats, Step, Task
from penstock.tools import REASONING, TEXT
from workers.engines.adapters import LoadedAdapters
from workers.engines.sim import answers
from workers.engines.sim.answers import INNER, WORDS, row
from workers.engines.sim.settings import DEFAULT_MAX_TOKENS, SimSettings, card_of, context_of
from workers.engines.text import TokenGate, joined, shared_characters, too_long


@dataclass(slots=True, eq=False)
class SimSequence:
    """One request in the engine. `done` counts the tokens of earlier attempts too."""

    id: str
    crc: int
    """Checksum of the prompt, from which a token's checksum is computed with the token's number alone."""
    prompt_tokens: int
    max_tokens: int
    done: int
    gate: TokenGate | None
    """None: there are no stop strings."""
    fault: tuple[str, int] | None
    end: str = "length"
    """Finish reason at its last token: a request without a limit ends by itself."""
    begun: bool = False
    """Whether its first token was sent, and with it the size of its prompt."""
    adapter: str = ""
    owner: tuple[str, str] = ("", "")
    """Its tenant and its adapter."""
    prompt: str = ""
    cached: int = 0
    """Tokens of its prompt that came from the prefix cache."""
    ready_at: float = 0.0
    prompt_left: int = 0
    """Tokens of its prompt that are still to be prefilled; 0 where prefill has no cost per token."""
    scheduled_at: float = 0.0
    cancelled: bool = False
    calls: tuple[str, ...] = ()
    """The tokens of its answer, if that consists of calls."""
    answer: str | None = None
    """The whole answer, if it is that of a task: it has no tokens."""
    logprobs: int | None = None
    """Alternatives of each token; None: it has no log-probabilities."""
    echo: Piece | None = None
    """The log-probabilities of its prompt, which come before its first token."""
    reasoned: int = 0
    """Tokens of reasoning before its answer."""
    author: str = ""
    """The letters that follow each of its tokens, with the setting `authors`."""
    is_plain: bool = True
    """Whether its pieces are as the token says: without calls, reasoning, author and log-probabilities."""
    largest: int = 0
    """Tokens of the largest input of a task, whose inputs are computed one after another; 0: it is no task."""

    @property
    def used(self) -> int:
        """Tokens that it holds in the KV cache."""
        return self.largest or self.prompt_tokens + self.done

    @property
    def peak(self) -> int:
        """The most that it will hold."""
        return self.largest or self.prompt_tokens + self.max_tokens


HUNG_AFTER_S = 10.0
ROUNDING_S = 1e-6
"""More than sums of step times are off."""
PREFILL_POLL_S = 0.001
"""How often an engine whose steps take no time checks whether a prefill is done."""

SLOWDOWN = 5.0
"""Factor on the duration of a step after the fault "slow"."""

REASONED = {"minimal": 2, "low": 4, "medium": 8, "high": 16, "xhigh": 32}
"""Tokens of reasoning by the effort that a request asks for; without one, it does not reason."""

FAULT = re.compile(r"\[\[(crash|hang|fail|slow)@(\d+)\]\]")


class SimEngine:
    """See penstock.engine.Engine. `now` and `sleep` may be replaced to run it on a virtual clock."""

    def __init__(self, model: str, settings: SimSettings, adapters: Collection[str] = ()) -> None:
        self._model, self._settings, self._served = model, settings, adapters
        self._loaded = LoadedAdapters(settings.max_adapters)
        self._by_id: dict[str, SimSequence] = {}
        self._running: dict[str, SimSequence] = {}
        self._waiting: deque[SimSequence] = deque()
        """Requests that wait for slots or KV cache, the oldest first."""
        self._cancelled: list[SimSequence] = []
        self._ended: list[SimSequence] = []
        """Requests that leave with this step."""
        # The numbers of all tokens as text and as bytes, computed once.
        self._digits = [str(index) for index in range(settings.context + DEFAULT_MAX_TOKENS)]
        self._numerals = [digits.encode() for digits in self._digits]
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._on_step: Step = lambda _: None
        self._steps = self._evictions = 0
        self._stepped_at = 0.0
        self._hung = False
        self._slowdown = 1.0
        self._random = random.SystemRandom()
        self._cache: OrderedDict[tuple[tuple[str, str], str], None] = OrderedDict()
        """The last prompts, each with its owner, whose prompts alone it matches."""

    async def start(self, on_step: Step, on_phase: Callable[[str], None]) -> ModelCard:
        on_phase("loading simulated weights")
        await asyncio.sleep(self._settings.load_ms / 1000)
        self._on_step = on_step
        self._task = asyncio.create_task(self._run())
        return card_of(self._model, self._settings, self._served)

    async def check(self, request: Request) -> None:
        self._sequence(request)

    def submit(self, request: Request) -> None:
        task = request.task
        if task is not None and task.kind in ("tokenize", "detokenize"):  # needs no step
            answer = Piece(request.id, answers.task_answer(request, task, context_of(self._settings)), finish="stop")
            asyncio.get_running_loop().call_soon(self._on_step, [answer])
            return
        sequence = self._sequence(request)
        self._by_id[request.id] = sequence
        self._waiting.append(sequence)
        self._work.set()

    def cancel(self, request_id: str) -> None:
        sequence = self._by_id.get(request_id)
        if sequence is not None and not sequence.cancelled:
            sequence.cancelled = True
            self._cancelled.append(sequence)
            self._work.set()

    def stats(self) -> Stats:
        return Stats(
            slots=self._settings.slots,
            running=len(self._running),
            waiting=len(self._waiting),
            kv_tokens=self._settings.kv_tokens,
            # Computed only where the cache is limited, because every claim reads it.
            kv_used=sum([each.used for each in self._running.values()]) if self._settings.kv_tokens else 0,
            evicts=self._settings.kv_policy == "MAX_UTILIZATION",
            evictions=self._evictions,
            steps=self._steps,
            adapters=self._loaded.names,
            swaps=self._loaded.swaps,
        )

    def health(self) -> EngineHealth:
        if self._task is not None and self._task.done():
            return EngineHealth(False, "the stepping task ended")
        silent = asyncio.get_running_loop().time() - self._stepped_at
        if self._by_id and self._stepped_at and silent > HUNG_AFTER_S + self._settings.step_ms / 100:
            return EngineHealth(False, f"no step for {silent:.0f} s with work present")
        return EngineHealth(True)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _task_sequence(self, request: Request, task: Task) -> SimSequence:
        counts = [answers.input_tokens(each) for each in request.inputs]
        if max(counts, default=0) > context_of(self._settings):
            raise Refused(too_long("input", max(counts), None, context_of(self._settings)))
        if task.dimensions is not None and task.dimensions > answers.MAX_SIZE:
            message = f"dimensions: this model makes vectors of at most {answers.MAX_SIZE} numbers"
            raise Refused(Failure("invalid_request_error", message, 400, "dimensions"))
        text = "\n".join([answers.prompt_text(each) for each in request.inputs])
        sequence = SimSequence(request.id, 0, sum(counts), 1, 0, None, self._fault(text))
        sequence.answer = answers.task_answer(request, task, context_of(self._settings))
        sequence.largest = max(counts, default=0)
        return sequence

    def _fault(self, prompt: str) -> tuple[str, int] | None:
        """The fault that a prompt names, and after how many tokens."""
        found = FAULT.search(prompt) if self._settings.faults else None
        return (found[1], int(found[2])) if found else None

    def _sequence(self, request: Request) -> SimSequence:
        if request.task is not None:
            return self._task_sequence(request, request.task)
        prompt = answers.prompt_text(request.prompt)
        prompt_tokens, wanted = answers.count_tokens(prompt), request.sampling.max_tokens
        context = context_of(self._settings)
        if prompt_tokens + (wanted or 1) > context:
            raise Refused(too_long("messages", prompt_tokens, wanted, context))
        max_tokens = min(DEFAULT_MAX_TOKENS, context - prompt_tokens) if wanted is None else wanted
        varied = answers.sampling_text(request.sampling) + (f"\nadapter={request.adapter}" if request.adapter else "")
        stop, crc = request.sampling.stop, zlib.crc32(prompt.encode() + varied.encode())
        gate = TokenGate(stop, request.past_text) if any(stop) else None
        fault = self._fault(prompt)
        sequence = SimSequence(request.id, crc, prompt_tokens, max_tokens, request.past_tokens, gate, fault)
        sequence.end = "stop" if wanted is None and not request.sampling.ignore_eos else "length"
        sequence.reasoned = REASONED.get(request.reasoning, 0)
        sequence.adapter, sequence.owner, sequence.prompt = request.adapter, (request.tenant, request.adapter), prompt
        if request.tools is not None and (calls := answers.call_tokens(request)):
            length = sequence.reasoned + len(calls)
            sequence.calls, sequence.max_tokens = calls, min(max_tokens, length)
            sequence.end = "stop" if max_tokens >= length else sequence.end
        elif self._settings.authors:
            sequence.author = "".join(self._random.choices(string.ascii_uppercase, k=4))
        sequence.logprobs = alternatives = request.sampling.logprobs
        if request.sampling.prompt_logprobs:
            rows = () if alternatives is None else answers.prompt_rows(request.prompt, alternatives)
            sequence.echo = Piece(request.id, logprobs=rows, prompt_tokens=prompt_tokens)
        shaped = sequence.calls or sequence.reasoned or sequence.author or sequence.echo
        sequence.is_plain = not shaped and alternatives is None
        return sequence

    async def _run(self) -> None:
        """Step on a fixed time grid while there is work; a late step does not delay the next ones."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            if not self._by_id:
                self._work.clear()
                self._stepped_at = 0.0
                await self._work.wait()
                due = loop.time()
            # All times are of the grid: a prefill of one step, begun by a step that came late, is done with the next.
            self._admit(due)
            step_s = self._step_s(due)
            due = max(due + (step_s or self._idle_s(due)), loop.time() - step_s)
            await asyncio.sleep(max(0.0, due - loop.time()))
            if self._hung:
                await asyncio.Event().wait()
            pieces = self._step(due)
            self._stepped_at = loop.time()
            if pieces:
                self._on_step(pieces)

    def _step_s(self, now: float) -> float:
        """Duration of the next step in seconds. Also advances the prefills that the step computes."""
        settings, step_ms = self._settings, self._settings.step_ms
        if settings.prefill_ms_per_1k_tokens:
            step_ms += settings.prefill_ms_per_1k_tokens * self._compute_prompts() / 1000
        if settings.step_ms_per_text:
            texts = [each for each in self._running.values() if not each.prompt_left and each.ready_at <= now]
            step_ms += settings.step_ms_per_text * len(texts)
        return step_ms / 1000 * self._slowdown

    def _compute_prompts(self) -> int:
        """Prefill the next prompt tokens, the oldest prompt first. Returns their number."""
        room = self._settings.prefill_batch
        for sequence in self._running.values():
            taken = min(room, sequence.prompt_left)
            sequence.prompt_left -= taken
            room -= taken
            if not room:
                break
        return self._settings.prefill_batch - room

    def _idle_s(self, now: float) -> float:
        """Pause before a step that takes no time, if it would find nothing to do."""
        idle = not self._cancelled and all(sequence.ready_at > now for sequence in self._running.values())
        return PREFILL_POLL_S if idle else 0.0

    def _admit(self, now: float) -> None:
        """Begin waiting texts in their order. One that waits for its adapter's place is passed by those without one,
        which take none: so its wait has an end."""
        full = False
        for sequence in tuple(self._waiting) if self._waiting and len(self._running) < self._settings.slots else ():
            if len(self._running) == self._settings.slots or not self._has_room(sequence):
                return
            if sequence.adapter and (full or not self._loaded.has_place(sequence.adapter, self._needed)):
                full = True
                continue
            self._waiting.remove(sequence)
            sequence.ready_at = now + self._prefill_s(sequence) - ROUNDING_S
            if sequence.adapter and self._loaded.use(sequence.adapter, self._needed):
                sequence.ready_at += self._settings.adapter_load_ms / 1000
            if self._settings.prefill_ms_per_1k_tokens:
                sequence.prompt_left = sequence.used - sequence.cached
            sequence.scheduled_at = sequence.scheduled_at or time.monotonic()
            self._running[sequence.id] = sequence

    def _prefill_s(self, sequence: SimSequence) -> float:
        """Duration of a prefill in seconds, reduced by the cached share of the prompt."""
        whole_s = self._settings.prefill_ms / 1000
        if not self._settings.cache_prompts:
            return whole_s
        known = [prompt for owner, prompt in self._cache if owner == sequence.owner]
        cached = max((shared_characters(prompt, sequence.prompt) for prompt in known), default=0)
        self._cache[sequence.owner, sequence.prompt] = None
        self._cache.move_to_end((sequence.owner, sequence.prompt))
        if len(self._cache) > self._settings.cache_prompts:
            self._cache.popitem(last=False)
        sequence.cached = min(cached * sequence.prompt_tokens // max(1, len(sequence.prompt)), sequence.prompt_tokens)
        return whole_s * (1 - sequence.cached / sequence.prompt_tokens)

    @property
    def _needed(self) -> set[str]:
        """The adapters of running texts."""
        return {each.adapter for each in self._running.values()}

    def _has_room(self, sequence: SimSequence) -> bool:
        capacity = self._settings.kv_tokens
        if not capacity or sequence.cancelled:
            return True
        if self._settings.kv_policy == "GUARANTEED_NO_EVICT":
            return sum(other.peak for other in self._running.values()) + sequence.peak <= capacity
        used = sum(other.used for other in self._running.values())
        return used + min(sequence.used + 1, sequence.peak) <= capacity

    def _step(self, now: float) -> list[Piece]:
        self._steps += 1
        self._evict()
        pieces = [self._finish(sequence, Piece(sequence.id), "cancelled") for sequence in self._cancelled]
        self._cancelled.clear()
        for sequence in self._running.values():
            if sequence.ready_at > now or sequence.prompt_left or sequence.cancelled:
                continue
            if (piece := self._token(sequence)) is not None:
                pieces.append(piece)
        for sequence in self._ended:
            del self._by_id[sequence.id]
            if self._running.pop(sequence.id, None) is None:
                self._waiting.remove(sequence)
        self._ended.clear()
        return pieces

    def _evict(self) -> None:
        """MAX_UTILIZATION: preempt the youngest requests if the next tokens do not fit; they prefill again later."""
        capacity = self._settings.kv_tokens
        if not capacity or self._settings.kv_policy != "MAX_UTILIZATION":
            return
        running = self._running
        while len(running) > 1 and sum(sequence.used + 1 for sequence in running.values()) > capacity:
            self._waiting.appendleft(running.popitem()[1])
            self._evictions += 1

    def _token(self, sequence: SimSequence) -> Piece | None:
        """Generate the next token of one sequence; None if nothing of it may be shown yet."""
        index = sequence.done
        if sequence.fault is not None and index == sequence.fault[1] and not self._inject(sequence.fault[0]):
            failed = Piece(sequence.id, failure=Failure("engine_error", "A fault was injected.", 500))
            return self._finish(sequence, failed)
        if self._hung:
            return None
        if sequence.answer is not None:
            return self._finish(sequence, Piece(sequence.id, sequence.answer), "stop")
        if not sequence.is_plain and (echo := sequence.echo) is not None:
            sequence.begun, sequence.echo = True, None
            piece = replace(echo, cached_tokens=sequence.cached)
            return piece if sequence.max_tokens else self._finish(sequence, piece, "length")
        sequence.done = index + 1
        number = zlib.crc32(self._numerals[index], sequence.crc)  # of the prompt and the number together
        text = (INNER if index else WORDS)[number % len(WORDS)] + self._digits[index]
        if not sequence.is_plain:
            if sequence.reasoned and index <= sequence.reasoned:
                text = {0: REASONING, sequence.reasoned: TEXT}.get(index, "") + text
            is_call = sequence.calls and index >= sequence.reasoned
            text = sequence.calls[index - sequence.reasoned] if is_call else text + sequence.author
        piece = Piece(sequence.id, text, (number & 0xFFFF,), 1)
        if not sequence.begun:
            sequence.begun = True
            piece = replace(piece, prompt_tokens=sequence.prompt_tokens, cached_tokens=sequence.cached)
        if not sequence.is_plain and sequence.logprobs is not None:
            piece = replace(piece, logprobs=(row(text, number, sequence.logprobs),))
        if sequence.gate is not None:
            return self._gated(sequence, sequence.gate, piece)
        return self._finish(sequence, piece, sequence.end) if sequence.done >= sequence.max_tokens else piece

    def _gated(self, sequence: SimSequence, gate: TokenGate, piece: Piece) -> Piece | None:
        """A token of a request with stop strings, as far as it may be shown."""
        piece = gate.feed(piece)
        if gate.hit:
            return self._finish(sequence, piece, "stop")
        if sequence.done >= sequence.max_tokens:
            return self._finish(sequence, joined(sequence.id, (piece, gate.flush(sequence.id))), sequence.end)
        return piece if piece.n else None

    def _inject(self, fault: str) -> bool:
        """Inject the fault. Returns True if it stops or slows the engine, False if this request alone fails."""
        if fault == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "slow":
            self._slowdown = SLOWDOWN
            return True
        self._hung = fault == "hang"
        return self._hung

    def _finish(self, sequence: SimSequence, piece: Piece, finish: str = "") -> Piece:
        self._ended.append(sequence)
        times = EngineTimes(scheduled=sequence.scheduled_at)
        prompt, cached = sequence.prompt_tokens, sequence.cached
        return replace(piece, finish=finish, prompt_tokens=prompt, cached_tokens=cached, times=times)


def build(model: str, settings: SimSettings, data_dir: Path, adapters: Mapping[str, str]) -> SimEngine:
    """See workers.engines.registry; nothing of this engine lies in the data folder."""
    return SimEngine(model, settings, adapters)
