"""TensorRT-LLM's statistics: reads its iteration statistics, request timestamps, KV cache capacity and health check.

Reading statistics removes them from the engine and may block, so one thread reads them and the event loop never does.
These interfaces are new: each may be missing, and nothing else depends on them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from penstock.engine import EngineTimes

log = logging.getLogger(__name__)

READ_TIMEOUT_S = 0.05
MIN_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0

SHOWN = {
    "iteration_ms": ("", "iterLatencyMS"),
    "kv_hit_rate": ("kvCacheStats", "cacheHitRate"),
    "kv_free_blocks": ("kvCacheStats", "freeNumBlocks"),
    "scheduled": ("inflightBatchingStats", "numScheduledRequests"),
    "paused": ("inflightBatchingStats", "numPausedRequests"),
    "prefill_tokens": ("inflightBatchingStats", "numCtxTokens"),
    "acceptance_length": ("specDecodingStats", "acceptanceLength"),
}
"""By our name of each number, its section and key in the engine's statistics; some versions lack some of them."""


class StatsReader:
    """Reads statistics in a thread and keeps the latest in `latest`. For display only: the engine may drop some."""

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


def shown(latest: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of SHOWN that the statistics contain."""
    found = {}
    for name, (part, key) in SHOWN.items():
        value = (latest.get(part) or {} if part else latest).get(key)
        if isinstance(value, int | float):
            found[name] = float(value)
    return found


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
