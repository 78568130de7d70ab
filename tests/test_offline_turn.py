"""When a turn at a batch gives up what is left of its lines."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from offline.lines import Tools
from offline.turn import Bench, Turn
from streaming.batches import Hold, Verdict
from streaming.memory import Headroom
from streaming.messages import Batch, BatchState, Priority, Progress
from streaming.monitor import StoreMonitor
from streaming.settings import BatchSettings
from streaming.shelf import Shelf
from streaming.wire import Wire
from telemetry.metrics import Metrics

GOING_ON, CANCELLING = BatchState.IN_PROGRESS, BatchState.CANCELLING
BATCH = Batch(
    id="batch_00" + 30 * "a", tenant="t", ceiling=Priority.BATCH, endpoint="/v1/chat/completions", input_file="file",
    window="24h", output_keep_ms=3_600_000,
)  # fmt: skip


@pytest.mark.parametrize(
    ("expires_ms", "now_ms", "state", "why"),
    [
        (1000, 999, GOING_ON, ""),
        (1000, 1000, GOING_ON, "expired"),
        (1000, 1001, GOING_ON, "expired"),
        (1000, 999, CANCELLING, "cancelled"),
        (1000, 1000, CANCELLING, "cancelled"),
        (0, 10**15, GOING_ON, ""),
    ],
)
async def test_a_batch_is_over_when_its_owner_or_its_window_says_so(
    wire: Wire, tmp_path: Path, expires_ms: int, now_ms: int, state: BatchState, why: str
) -> None:
    """From the very millisecond in which its window ends, when no line is put any more; never, without a window."""
    tools = Tools(wire, Headroom(wire), StoreMonitor(wire), ("sim",), BatchSettings(), 64)
    metrics = Metrics.start("", "offline")
    hold = Hold(BATCH, 1, 0, GOING_ON, False, 0, expires_ms, Progress())
    turn = Turn(Bench(tools, Shelf(tmp_path), metrics, 10, 1.0), hold, asyncio.Event())
    turn._verdict = Verdict(now_ms, state, False)
    assert turn._called_off() == why
    metrics.close()
