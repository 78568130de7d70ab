"""In-flight requests and statistics of TensorRT-LLM: follows each request to its end, delivers a step in one call.

It distinguishes errors of one request from failures of the engine. It does not know how requests are built or admitted.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from msgspec.structs import replace

from penstock.engine import EngineTimes, Failure, Piece, Request, Step
from workers.engines.text import RowGate
from workers.engines.trtllm import text as trtllm_sampling
from workers.engines.trtllm.text import Codec, TextStream

log = logging.getLogger(__name__)

READ_TIMEOUT_S = 0.05
MIN_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0


class StatsReader:
    """Reads statistics in a thread and keeps the latest in `latest`. The engine may drop some.

    Reading statistics removes them from the engine and may block, so one thread reads them and the event loop never
    does. These interfaces are new: each may be missing, and nothing else depends on them.
    """

    def __init__(self, read: Callable[..., Any]) -> None:
        self.latest: Mapping[str, Any] = {}
        self.paused = 0
        """Sum over all iterations read so far of the requests that were paused in each."""
        self._read = read
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="trtllm-stats", daemon=True).start()

    def stop(self) -> None:
        """Idempotent; the thread ends after its current read."""
        self._ended.set()

    def _run(self) -> None:
        pause = MIN_PAUSE_S
        while not self._ended.wait(pause):
            try:
                batch = self._read(timeout=READ_TIMEOUT_S)
            except Exception as error:  # noqa: BLE001 - a prototype interface: the engine works without statistics
                log.warning("the engine gives no statistics", extra={"cause": str(error)})
                return
            if batch:
                self.latest = batch[-1]
                self.paused += sum([paused(each) for each in batch])
            pause = MIN_PAUSE_S if batch else min(pause * 2, MAX_PAUSE_S)


def paused(iteration: Mapping[str, Any]) -> int:
    """Requests that the engine paused in this iteration to free their KV cache; 0 if it does not report them."""
    value = (iteration.get("inflightBatchingStats") or {}).get("numPausedRequests", 0)
    return value if isinstance(value, int) else 0


def kv_used(latest: Mapping[str, Any]) -> int | None:
    """KV cache blocks in use, in tokens; None if the engine does not report them."""
    blocks = latest.get("kvCacheStats") or {}
    if "usedNumBlocks" not in blocks or "tokensPerBlock" not in blocks:
        return None
    return int(blocks["usedNumBlocks"]) * int(blocks["tokensPerBlock"])


def times(handle: Any, since: float) -> EngineTimes | None:
    """The engine's timestamps of a request that was submitted at `since` (monotonic seconds), from its RequestOutput.

    They come from the steady clock, which on Linux is the monotonic clock of the same machine. Timestamps not between
    `since` and now come from another clock and are ignored. None: switched off, missing, or of another clock.
    """
    output = handle.outputs[0] if handle is not None and handle.outputs else None
    timing = getattr(getattr(output, "request_perf_metrics", None), "timing_metrics", None)
    found = [_seconds(timing, f"{name}_time") for name in ("first_scheduled", "first_token", "last_token")]
    now = time.monotonic()
    if not found[0] or any(moment and not since <= moment <= now for moment in found):
        return None
    return EngineTimes(*found)


def _seconds(timing: Any, name: str) -> float:
    """Seconds since the clock's origin; 0.0 if missing."""
    moment = getattr(timing, name, None)
    return moment.total_seconds() if isinstance(moment, timedelta) else 0.0


def kv_capacity(llm: Any) -> int:
    """Capacity of the KV cache in tokens; 0 if the installed version does not report it."""
    try:
        return int(llm.get_kv_cache_capacity().get("maxNumTokens", 0))
    except Exception as error:  # noqa: BLE001 - a beta interface: without it only slots limit the load
        log.warning("the engine does not say how large its KV cache is", extra={"cause": str(error)})
        return 0


def answers(llm: Any) -> bool:
    """Result of the engine's own health check. It is private, may be missing and has been wrong: never rely on it."""
    check = getattr(llm, "_check_health", None)
    try:
        return check is None or bool(check())
    except Exception as error:  # noqa: BLE001 - a check that raises counts as failed
        log.warning("the engine's health check failed", extra={"cause": str(error)})
        return False


MIN_BURST = 3
"""Requests that must fail together with the same message, with none left that generates, to declare the engine dead."""


@dataclass(slots=True)
class Live:
    """One request the engine holds. All counts in tokens."""

    request: Request
    text: TextStream
    prompt: int
    budget: int
    """Maximum to generate, earlier attempts included."""
    generated: int
    """Generated by earlier attempts and by this one."""
    handle: Any = None
    """The engine's RequestOutput."""
    cursor: int = 0
    """Tokens already taken from the engine's list."""
    begun: bool = False
    """Whether a piece has carried the size of its prompt."""
    rows: RowGate = field(default_factory=RowGate)
    ended: bool = False
    """Whether its last piece was sent; the engine may not have released it yet."""
    aborted_at: float | None = None
    since: float = field(default_factory=time.monotonic)


class InFlight:
    """The live requests. `request_error` is the engine's error of one request; any other error ends the engine."""

    def __init__(
        self,
        on_step: Step,
        codec: Codec,
        end_ids: Collection[int],
        *,
        request_error: type[Exception],
        clock: Callable[[], float],
        cached_hidden: bool = False,
    ) -> None:
        self._cached_hidden = cached_hidden
        self.dead = ""
        """Why the engine as a whole has failed, or ""."""
        self.steps = 0
        self._on_step, self._codec, self._end_ids, self._clock = on_step, codec, frozenset(end_ids), clock
        self._request_error = request_error
        self._loop = asyncio.get_running_loop()
        self._live: dict[str, Live] = {}
        self._pumps: set[asyncio.Task[None]] = set()
        self._pending: list[Piece] = []
        self._progress_at = 0.0

    def __len__(self) -> int:
        return len(self._live)

    def held(self, whole: bool) -> int:
        """Tokens of KV cache that the live requests use now; with `whole`, that they may use at most."""
        return sum(live.prompt + (live.budget if whole else live.generated) for live in self._live.values())

    def add(self, live: Live) -> None:
        """Follow a submitted request to its final response."""
        if not self._live:
            self._progress_at = self._clock()
        self._live[live.request.id] = live
        pump = self._loop.create_task(self._follow(live))
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)

    def abort(self, request_id: str) -> None:
        """Ask the engine to release a request; its last piece comes once it has. Idempotent."""
        live = self._live.get(request_id)
        if live is not None:
            self._abort(live)

    async def close(self, grace_s: float) -> None:
        """Abort all requests and wait at most `grace_s` for their final responses."""
        for live in list(self._live.values()):
            self._abort(live)
        if self._pumps:
            await asyncio.wait(self._pumps, timeout=0 if self.dead else grace_s)
        for pump in self._pumps:
            pump.cancel()

    def die(self, reason: str) -> None:
        """Mark the engine as dead: the process must end."""
        if not self.dead:
            self.dead = reason
            log.error("the engine is dead", extra={"cause": reason, "live": len(self._live)})

    def stalled(self, patience_s: float) -> str:
        """Why the engine counts as hung after `patience_s` without progress, or ""."""
        now = self._clock()
        if self._live and now - self._progress_at > patience_s:
            return f"no token for {patience_s:g} s while {len(self._live)} requests run"
        if any(live.aborted_at is not None and now - live.aborted_at > patience_s for live in self._live.values()):
            return f"the engine did not let go of an aborted request within {patience_s:g} s"
        return ""

    # --- one request -------------------------------------------------------------------------------------------------

    async def _follow(self, live: Live) -> None:
        """Read responses up to the final one, also after an abort: only then is the slot free."""
        try:
            async for _ in live.handle:  # yields the same object each time, changed in place
                self._take(live)
            self._end_unfinished(live, str(getattr(live.handle, "error", None) or "it ended without a reason"))
        except self._request_error as error:
            self._end_unfinished(live, str(error))
        except Exception as error:  # noqa: BLE001 - the engine is in an unknown state: restart it
            self.die(f"the engine failed while generating: {type(error).__name__}: {error}")
        finally:
            self._live.pop(live.request.id, None)

    def _take(self, live: Live) -> None:
        out = live.handle.outputs[0]
        have = len(out.token_ids)
        start = min(live.cursor, have)  # the list may shrink: the engine removes a stop token again
        ids = tuple(token for token in out.token_ids[start:] if token not in self._end_ids)
        entries, live.cursor = list(out.logprobs or ())[start:have], have
        self._progress_at = self._clock()
        if not live.ended:
            self._emit_response(live, ids, entries, out.finish_reason or "")

    def _emit_response(self, live: Live, ids: tuple[int, ...], entries: list[Any], reason: str) -> None:
        """Emit what one response added. `reason` is the engine's finish_reason, "" while the request runs."""
        live.generated += len(ids)
        text = live.text.feed(ids) + (live.text.flush() if reason else "")
        wanted = live.request.sampling.logprobs
        found = () if wanted is None else trtllm_sampling.logprobs(ids, entries, wanted, self._codec.name)
        if found or wanted is not None:
            found = live.rows.feed(text, found, last=bool(reason) or live.text.stopped)
        piece = Piece(live.request.id, text, ids, len(ids), logprobs=found)
        if live.text.stopped:
            self.end(live, replace(piece, finish="stop"))
            if not reason:
                self._abort(live)
        elif reason in ("stop", "length"):
            self.end(live, replace(piece, finish=reason))
        else:
            if ids or text:
                self._emit(piece if live.begun else self._with_prompt_size(live, piece))
            if reason:
                self._end_unfinished(live, reason)

    def end(self, live: Live, piece: Piece) -> None:
        """Emit a request's last piece."""
        live.ended = True
        self._emit(replace(self._with_prompt_size(live, piece), times=times(live.handle, live.since)))

    def _with_prompt_size(self, live: Live, piece: Piece) -> Piece:
        """Add the size of the prompt to a first or last piece."""
        live.begun = True
        cached = 0 if self._cached_hidden else min(live.prompt, int(getattr(live.handle, "cached_tokens", 0) or 0))
        return replace(piece, prompt_tokens=live.prompt, cached_tokens=cached)

    def _end_unfinished(self, live: Live, reason: str) -> None:
        """End a request that the engine ended without a result: as cancelled if it was aborted, else as failed."""
        if live.ended:
            return
        if live.aborted_at is not None:
            self.end(live, Piece(live.request.id, finish="cancelled"))
        else:
            failure = Failure("engine_error", f"the engine gave this request up: {reason}", 500)
            self.end(live, Piece(live.request.id, failure=failure))

    def _abort(self, live: Live) -> None:
        if live.aborted_at is not None:
            return
        live.aborted_at = self._clock()
        try:
            live.handle.abort()
        except Exception as error:  # noqa: BLE001 - an abort is a message to the engine: it fails if the engine is gone
            self.die(f"the engine does not take an abort: {error}")

    # --- one step ----------------------------------------------------------------------------------------------------

    def _emit(self, piece: Piece) -> None:
        """Queue a piece. An engine step wakes all its requests in one loop iteration, so one flush delivers them."""
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append(piece)

    def _flush(self) -> None:
        pieces, self._pending = self._pending, []
        self.steps += 1
        burst = self._burst(pieces)
        if burst:
            # These failures are dropped: their jobs are claimed again, and a poison job runs out of attempts.
            self.die(f"every running request failed at once: {burst}")
            pieces = [piece for piece in pieces if piece.failure is None]
        if pieces:
            self._on_step(pieces)

    def _burst(self, pieces: list[Piece]) -> str:
        """The common message if a failed engine step failed every running request, or ""."""
        failures = [piece.failure.message for piece in pieces if piece.failure is not None]
        survivors = any(live.cursor and not live.ended for live in self._live.values())
        return failures[0] if len(failures) >= MIN_BURST and len(set(failures)) == 1 and not survivors else ""
