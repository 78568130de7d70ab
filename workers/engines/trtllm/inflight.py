"""What TensorRT-LLM holds now: each request followed to its final response, each engine step told in one call.

Sorts what ends one request from what ends the engine. It does not know how requests are built or admitted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from streaming.jobs.terminal import Failure
from workers.engines.base import Piece, Request, Step
from workers.engines.trtllm import sampling as trtllm_sampling
from workers.engines.trtllm import stats as trtllm_stats
from workers.engines.trtllm.text import Codec, TextStream

log = logging.getLogger(__name__)

BURST = 3
"""So many requests failing together with the same words, and none left that generates: the engine failed, not they."""


@dataclass(slots=True)
class Live:
    """One request the engine holds. All counts in tokens."""

    request: Request
    text: TextStream
    prompt: int
    budget: int
    """How many may be generated in all, earlier attempts included."""
    generated: int
    """By earlier attempts and by this one."""
    handle: Any = None
    """The engine's RequestOutput."""
    cursor: int = 0
    """How much of the engine's list of tokens has been taken."""
    begun: bool = False
    """The size of its prompt was given."""
    ended: bool = False
    """Its last piece is out; the engine may still be letting go of it."""
    aborted_at: float | None = None
    since: float = field(default_factory=time.monotonic)


class InFlight:
    """The live requests. `request_error` is what the engine raises for one of them; any other error ends it."""

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
        """Why the engine as a whole is gone, or ""."""
        self.steps = self.retracted = 0
        self._on_step, self._codec, self._end_ids, self._clock = on_step, codec, frozenset(end_ids), clock
        self._request_error = request_error
        self._loop = asyncio.get_running_loop()
        self._live: dict[str, Live] = {}
        self._pumps: set[asyncio.Task[None]] = set()
        self._pending: list[Piece] = []
        self._armed = False
        self._progress_at = 0.0

    def __len__(self) -> int:
        return len(self._live)

    def held(self, whole: bool) -> int:
        """Tokens of KV cache the live requests use now, or with `whole` may still come to use."""
        return sum(live.prompt + (live.budget if whole else live.generated) for live in self._live.values())

    def add(self, live: Live) -> None:
        """Follow a request the engine has taken."""
        if not self._live:
            self._progress_at = self._clock()
        self._live[live.request.id] = live
        pump = self._loop.create_task(self._follow(live))
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)

    def abort(self, request_id: str) -> None:
        """Ask the engine to let go of a request; its last piece comes when it has. Idempotent."""
        live = self._live.get(request_id)
        if live is not None:
            self._abort(live)

    async def close(self, grace_s: float) -> None:
        """Abort everything and wait for the final responses, at most `grace_s`."""
        for live in list(self._live.values()):
            self._abort(live)
        if self._pumps:
            await asyncio.wait(self._pumps, timeout=0 if self.dead else grace_s)
        for pump in self._pumps:
            pump.cancel()

    def die(self, reason: str) -> None:
        """The engine as a whole is gone: the process must end."""
        if not self.dead:
            self.dead = reason
            log.error("the engine is dead", extra={"cause": reason, "live": len(self._live)})

    def stalled(self, patience_s: float) -> str:
        """Why the engine is taken for hung after so long, or ""."""
        now = self._clock()
        if self._live and now - self._progress_at > patience_s:
            return f"no token for {patience_s:g} s while {len(self._live)} requests run"
        if any(live.aborted_at is not None and now - live.aborted_at > patience_s for live in self._live.values()):
            return f"the engine did not let go of an aborted request within {patience_s:g} s"
        return ""

    # --- one request -------------------------------------------------------------------------------------------------

    async def _follow(self, live: Live) -> None:
        """To its final response, also after an abort: only then is its slot free."""
        try:
            async for _ in live.handle:  # always the same object, changed in place: take what is new at once
                self._take(live)
            self._give_up(live, str(getattr(live.handle, "error", None) or "it ended without a reason"))
        except self._request_error as error:
            self._give_up(live, str(error))
        except Exception as error:  # noqa: BLE001 - dead, or in an unknown state: restart rather than guess
            self.die(f"the engine failed while generating: {type(error).__name__}: {error}")
        finally:
            self._live.pop(live.request.id, None)

    def _take(self, live: Live) -> None:
        out = live.handle.outputs[0]
        have = len(out.token_ids)
        start = min(live.cursor, have)  # the engine cuts a stop token off again, so its list may shrink
        self.retracted += live.cursor - start
        ids = tuple(token for token in out.token_ids[start:] if token not in self._end_ids)
        entries, live.cursor = list(out.logprobs or ())[start:have], have
        self._progress_at = self._clock()
        if not live.ended:
            self._tell(live, ids, entries, out.finish_reason or "")

    def _tell(self, live: Live, ids: tuple[int, ...], entries: list[Any], reason: str) -> None:
        """Emit what one response added. `reason` is the engine's finish_reason, "" while it goes on."""
        live.generated += len(ids)
        text = live.text.feed(ids) + (live.text.flush() if reason else "")
        wanted = live.request.sampling.logprobs
        found = () if wanted is None else trtllm_sampling.logprobs(ids, entries, wanted, self._codec.name)
        piece = Piece(live.request.id, text, ids, len(ids), logprobs=found)
        if live.text.stopped:
            self.end(live, replace(piece, finish="stop"))
            if not reason:
                self._abort(live)
        elif reason in ("stop", "length"):
            self.end(live, replace(piece, finish=reason))
        else:
            if ids or text:
                self._emit(piece if live.begun else self._counted(live, piece))
            if reason:
                self._give_up(live, reason)

    def end(self, live: Live, piece: Piece) -> None:
        """Emit a request's last piece."""
        live.ended = True
        self._emit(replace(self._counted(live, piece), times=trtllm_stats.times(live.handle, live.since)))

    def _counted(self, live: Live, piece: Piece) -> Piece:
        """A first or last piece, with the size of the prompt."""
        live.begun = True
        cached = 0 if self._cached_hidden else min(live.prompt, int(getattr(live.handle, "cached_tokens", 0) or 0))
        return replace(piece, prompt_tokens=live.prompt, cached_tokens=cached)

    def _give_up(self, live: Live, reason: str) -> None:
        """The engine ended a request in no good way: as it was told to, or by a failure."""
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
        except Exception as error:  # noqa: BLE001 - an abort is a message to the engine: it fails when nobody is there
            self.die(f"the engine does not take an abort: {error}")

    # --- one step ----------------------------------------------------------------------------------------------------

    def _emit(self, piece: Piece) -> None:
        """One engine step wakes all its requests in one turn of the loop, so one flush takes them together."""
        self._pending.append(piece)
        if not self._armed:
            self._armed = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        pieces, self._pending, self._armed = self._pending, [], False
        self.steps += 1
        burst = self._burst(pieces)
        if burst:
            # Nothing is told of these: their jobs are claimed again, and a poisonous one runs out of attempts.
            self.die(f"every running request failed at once: {burst}")
            pieces = [piece for piece in pieces if piece.failure is None]
        if pieces:
            self._on_step(pieces)

    def _burst(self, pieces: list[Piece]) -> str:
        """The common reason when a failed engine step took every running request with it, or ""."""
        failures = [piece.failure.message for piece in pieces if piece.failure is not None]
        survivors = any(live.cursor and not live.ended for live in self._live.values())
        return failures[0] if len(failures) >= BURST and len(set(failures)) == 1 and not survivors else ""
