"""What TensorRT-LLM says of itself: statistics, the size of its KV cache, whether it feels well.

Reading statistics takes them out of the engine and may block, so one thread reads and the event loop never does.
All of these interfaces are young: each may be missing, and nothing else depends on them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from workers.engines.base import EngineTimes

log = logging.getLogger(__name__)

READ_S = 0.05
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
"""Our name for each number, and where it stands in the engine's; versions leave some of them out."""


class StatsReader:
    """Keeps the latest statistics in `latest`. For control and display only: the engine may lose some."""

    def __init__(self, read: Callable[..., Any]) -> None:
        self.latest: Mapping[str, Any] = {}
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
                batch = self._read(timeout=READ_S)
            except Exception as error:  # noqa: BLE001 - a prototype interface: without statistics everything else goes on
                log.warning("the engine gives no statistics", extra={"cause": str(error)})
                return
            if batch:
                self.latest = batch[-1]
            pause = MIN_PAUSE_S if batch else min(pause * 2, MAX_PAUSE_S)


def kv_used(latest: Mapping[str, Any]) -> int | None:
    """Tokens' worth of KV cache blocks in use; None where the engine does not say."""
    blocks = latest.get("kvCacheStats") or {}
    if "usedNumBlocks" not in blocks or "tokensPerBlock" not in blocks:
        return None
    return int(blocks["usedNumBlocks"]) * int(blocks["tokensPerBlock"])


def shown(latest: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of SHOWN that are there."""
    found = {}
    for name, (part, key) in SHOWN.items():
        value = (latest.get(part) or {} if part else latest).get(key)
        if isinstance(value, int | float):
            found[name] = float(value)
    return found


def times(handle: Any, since: float) -> EngineTimes | None:
    """When the engine ran a request that was given to it at `since` (monotonic seconds), from its RequestOutput.

    Its times are of the system's steady clock, which on Linux is our monotonic one on the same machine. What does not
    lie between `since` and now is of another clock, and clocks are not mixed. None: switched off, not there, or so.
    """
    output = handle.outputs[0] if handle is not None and handle.outputs else None
    timing = getattr(getattr(output, "request_perf_metrics", None), "timing_metrics", None)
    found = [_seconds(timing, f"{name}_time") for name in ("first_scheduled", "first_token", "last_token")]
    now = time.monotonic()
    if not found[0] or any(moment and not since <= moment <= now for moment in found):
        return None
    return EngineTimes(*found)


def _seconds(timing: Any, name: str) -> float:
    """A timedelta since the clock's beginning; 0.0 where there is none."""
    moment = getattr(timing, name, None)
    return moment.total_seconds() if isinstance(moment, timedelta) else 0.0


def kv_capacity(llm: Any) -> int:
    """Tokens the KV cache holds; 0 where the installed version does not say."""
    try:
        return int(llm.get_kv_cache_capacity().get("maxNumTokens", 0))
    except Exception as error:  # noqa: BLE001 - a beta interface: without it only the slots are counted
        log.warning("the engine does not say how large its KV cache is", extra={"cause": str(error)})
        return 0


def answers(llm: Any) -> bool:
    """The engine's own opinion of itself: private, perhaps missing, and wrong before, so never the only one."""
    check = getattr(llm, "_check_health", None)
    try:
        return check is None or bool(check())
    except Exception as error:  # noqa: BLE001 - a check that breaks is as bad as one that says no
        log.warning("the engine's health check failed", extra={"cause": str(error)})
        return False
