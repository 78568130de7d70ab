"""Checked engine: wraps a plug-in, and holds what it does against the protocol of penstock.engine.

An engine that breaks the protocol or raises would let its worker wait for ever, or write nonsense under a job. Here it
ends the worker process instead, with the reason in its log and on the terminal. A job fails alone if `check` or
`submit` raises on it, or if it gets too many tokens. Penstock's own engines are not wrapped: their tests do this, and
each step would pay for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from penstock.engine import (
    RETURNED,
    ContinuationJudge,
    Engine,
    EngineDead,
    EngineHealth,
    Failure,
    ModelCard,
    Piece,
    Refused,
    Request,
    Stats,
    Step,
)

STOP_TIMEOUT_S = 10.0
CANCEL_TIMEOUT_S = 60.0
"""From `cancel` to the last piece of a request."""
STALL_TIMEOUT_S = 600.0
"""Without any piece, while requests run: no prompt takes so long."""
COUNTS = ("running", "waiting", "kv_tokens", "kv_used", "kv_pinned", "evictions", "miscounted", "steps", "swaps")
"""Fields of Stats that cannot be negative."""
FINISHES = ("", "stop", "length", "content_filter", "cancelled", RETURNED)
FAILED = Failure("engine_error", "The engine raised an error for this request.", 500)
EXCESS = Failure("engine_error", "The engine generated more tokens for this request than its max_tokens.", 500)

log = logging.getLogger(__name__)


class CheckedEngine:
    """See penstock.engine.Engine. `name`: as the settings name the engine."""

    def __init__(self, engine: Engine, name: str, model: str) -> None:
        self._engine, self._name, self._model = engine, name, model
        self._live: dict[str, int] = {}
        """Running requests, and how many tokens each may still yield; below 0: it had too many, and its job has
        failed."""
        self._cancelled: dict[str, float] = {}
        """Those of them that were cancelled, and when (monotonic)."""
        self._heard = 0.0
        """When the last piece came, or a request when none ran (monotonic)."""
        self._limit = 0
        """Tokens of an answer whose request names no limit."""
        self._broken = ""
        """Why the worker must end; "" while the engine keeps to the protocol."""

    async def start(self, on_step: Step, on_phase: Callable[[str], None]) -> ModelCard:
        self._on_step, self._thread = on_step, threading.get_ident()
        with self._reported("start"):
            card = await self._engine.start(self._step, on_phase)
        if problem := self._start_problem(card):
            raise self._dead(problem)
        self._limit = card.default_output or card.max_output
        return msgspec.structs.replace(card, engine=self._name)

    async def check(self, request: Request) -> None:
        with self._refused("check", request):
            await self._engine.check(request)

    def submit(self, request: Request) -> None:
        if not self._live:
            self._heard = time.monotonic()
        wanted = self._limit if request.sampling.max_tokens is None else request.sampling.max_tokens
        self._live[request.id] = max(0, wanted - request.past_tokens)
        try:
            with self._refused("submit", request):
                self._engine.submit(request)
        except (Refused, EngineDead):
            self._live.pop(request.id, None)
            raise

    def cancel(self, request_id: str) -> None:
        if request_id in self._live:
            self._cancelled.setdefault(request_id, time.monotonic())
            with self._reported("cancel"):
                self._engine.cancel(request_id)

    def stats(self) -> Stats:
        with self._reported("stats"):
            return self._engine.stats()

    def restart_reason(self, request: Request) -> str:
        if not isinstance(self._engine, ContinuationJudge):
            return ""
        with self._reported("restart_reason"):
            return str(self._engine.restart_reason(request))

    def health(self) -> EngineHealth:
        if problem := self._broken or self._overdue(time.monotonic()):
            return EngineHealth(False, str(self._dead(problem)))
        with self._reported("health"):
            health = self._engine.health()
        if not isinstance(health, EngineHealth):
            problem = f"health() returned a {type(health).__name__}, no EngineHealth"
            return EngineHealth(False, str(self._dead(problem)))
        return health

    async def stop(self) -> None:
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._engine.stop()
        except Exception as error:  # noqa: BLE001 - the process ends anyway; the log keeps the cause
            log.warning("%s: stop() failed: %s: %s", self._name, type(error).__name__, error)

    # --- what the engine says ----------------------------------------------------------------------------------------

    def _step(self, pieces: list[Piece]) -> None:
        """Raises EngineDead into the engine: it must not go on."""
        if threading.get_ident() != self._thread:
            raise self._dead("it called on_step from another thread: use loop.call_soon_threadsafe(on_step, pieces)")
        if self._broken:
            raise self._dead(self._broken)
        if problem := _type_problem(pieces, list[Piece]):
            raise self._dead(f"a step is no list of Piece: {problem}")
        self._heard = time.monotonic()
        kept = [piece for each in pieces if (piece := self._taken(each)) is not None]
        with self._reported("on_step"):
            self._on_step(kept)

    def _taken(self, piece: Piece) -> Piece | None:
        """A piece as its worker gets it: a request with too many tokens fails, and what it still yields is dropped.
        Raises EngineDead."""
        if piece.id not in self._live:
            raise self._dead(f"a piece for request {piece.id!r}, which does not run: unknown, or it has ended")
        if piece.finish not in FINISHES or min(piece.n, piece.prompt_tokens, piece.cached_tokens) < 0:
            raise self._dead(f"a piece with finish {piece.finish!r} and counts {piece.n}, {piece.prompt_tokens}")
        had_failed = self._live[piece.id] < 0
        self._live[piece.id] -= piece.n
        fails = not had_failed and self._live[piece.id] < 0
        if fails:
            log.error("%s: more tokens for a request than its max_tokens", self._name, extra={"request": piece.id})
        if piece.last:
            del self._live[piece.id]
            self._cancelled.pop(piece.id, None)
        elif fails:
            self.cancel(piece.id)
        return None if had_failed else Piece(piece.id, failure=EXCESS) if fails else piece

    def _start_problem(self, card: ModelCard) -> str:
        """What is wrong with the card and the statistics of an engine that has started; "" if nothing is."""
        if problem := _type_problem(card, ModelCard):
            return f"start() returned no ModelCard: {problem}"
        if card.name != self._model:
            return f"its card is for the model {card.name!r}, not {self._model!r}: pass on the name it was built with"
        if min(card.context, card.max_output) < 1 or card.default_output < 0:
            return "its card has a context or a max_output below 1"
        stats = self.stats()
        if problem := _type_problem(stats, Stats):
            return f"stats() returned no Stats: {problem}"
        if negative := [name for name in COUNTS if getattr(stats, name) < 0]:
            return f"stats() has a negative {negative[0]}"
        return "stats() has no slots: it would never get a job" if stats.slots < 1 else ""

    def _overdue(self, now: float) -> str:
        late = [each for each, since in self._cancelled.items() if now - since > CANCEL_TIMEOUT_S]
        if late:
            return f"request {late[0]!r} was cancelled {CANCEL_TIMEOUT_S:.0f} s ago and has no last piece"
        if self._live and now - self._heard > STALL_TIMEOUT_S:
            return f"no piece for {STALL_TIMEOUT_S:.0f} s, though {len(self._live)} requests run"
        return ""

    # --- what it raises ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _reported(self, method: str) -> Iterator[None]:
        """An error in the block ends the worker. Raises EngineDead."""
        try:
            yield
        except EngineDead as error:
            self._dead(str(error))
            raise
        except Exception as error:
            log.exception("%s: %s() raised", self._name, method)
            raise self._dead(f"{method}() raised {type(error).__name__}: {error}") from error

    @contextlib.contextmanager
    def _refused(self, method: str, request: Request) -> Iterator[None]:
        """An error in the block fails this request alone. Raises Refused, EngineDead."""
        try:
            yield
        except (Refused, EngineDead):
            raise
        except Exception as error:
            log.exception("%s: %s() raised", self._name, method, extra={"request": request.id})
            raise Refused(FAILED) from error

    def _dead(self, problem: str) -> EngineDead:
        """The first problem, which the worker's health check reports, behind the engine's name."""
        if not self._broken:
            self._broken = problem if problem.startswith(f"{self._name}: ") else f"{self._name}: {problem}"
        return EngineDead(self._broken)


def _type_problem(value: object, kind: object) -> str:
    """Whether the value is of this type in all its parts, which a struct's constructor does not check; "" if so."""
    if not isinstance(value, list if kind == list[Piece] else kind):  # type: ignore[arg-type]
        return f"a {type(value).__name__}"
    if isinstance(value, list) and (others := {type(each).__name__ for each in value if not isinstance(each, Piece)}):
        return f"it holds {', '.join(sorted(others))}"
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        return str(error)
    return ""
