"""A delay shows in exactly the part of a job's timing that it was put into."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from statistics import median
from typing import Any

import pytest
from house import House, eventually
from slow_parts import SLOW_PARTS, ask, working

from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings
from telemetry.metrics import Metrics
from telemetry.process import start_tracing
from workers.record import Recorder

pytestmark = pytest.mark.slow

DELAY_S = 0.1
TOKENS = 40
"""Decode takes longer than the delay, or a late first chunk would be a late last one too."""
ALLOWED = 0.5
"""Of the delay: by so much a part may be off."""
ROUNDS = 3
"""The medians of so many are judged, once: what a busy machine adds to a part hits the requests with a delay and those
without alike."""
PATIENCE_S = 120.0
"""A starved machine writes late; a lease is as patient, because no worker dies here."""

Samples = dict[str, dict[str, list[float]]]
"""Milliseconds by delayed part and part."""


async def test_a_delay_shows_in_exactly_one_part(empty_house: House) -> None:
    """A delay before the body, the claim, the submit, the engine's run, in prefill, in decode, before the first write
    and before the last: each lengthens its own part and no other, by medians, beside the same request without a delay
    in the same round. And the parts are what the client waits."""
    empty_house.start_api()
    samples: Samples = defaultdict(lambda: defaultdict(list))
    recorder = Recorder("sim", Metrics.start("", "worker"), start_tracing("worker", ""))
    wire = RedisClient.open(RedisSettings(url=empty_house.redis_url, lease_ms=60_000))
    try:
        for slow in ("", *SLOW_PARTS) * ROUNDS:
            async with working(wire, recorder, slow, DELAY_S):
                job_id, spent_s = await ask(empty_house.port, TOKENS, slow, DELAY_S)
                timing = await asyncio.to_thread(_timing, empty_house, job_id)
            assert abs(timing["sum_ms"] - timing["end_to_end_ms"]) <= 1.0
            outside = spent_s * 1000 - timing["end_to_end_ms"]
            for part, spent_ms in {**timing["parts_ms"], "outside": outside}.items():
                samples[slow][part].append(spent_ms)
    finally:
        await wire.close()
    assert _misplaced(samples) == []


def _timing(house: House, job_id: str) -> dict[str, Any]:
    """Once its delivery is noted, a moment after the answer."""

    def noted() -> dict[str, Any] | None:
        found: dict[str, Any] = json.loads(house.get(f"/v1/jobs/{job_id}/timing")[1])
        return found if found["until"] == "last_sent" else None

    timing = eventually(noted, seconds=PATIENCE_S)
    assert isinstance(timing, dict)
    return timing


def _misplaced(samples: Samples) -> list[str]:
    """What grew that should not have, or did not grow by the delay; and time of the client's that is in no part."""
    wrong, delay_ms, control = [], DELAY_S * 1000, samples[""]
    for slow, parts in samples.items():
        wrong += [f"there is no {slow}"] if slow and slow not in parts else []
        for part, times in parts.items():
            grown, wanted = median(times) - median(control[part]), delay_ms if part == slow else 0.0
            if abs(grown - wanted) > ALLOWED * delay_ms:
                wrong.append(f"{slow or 'nothing'} late by {delay_ms:g} ms: {part} by {grown:.1f} ms")
    if median(control["outside"]) > delay_ms:
        wrong.append(f"the client waited {median(control['outside']):.1f} ms longer than the parts say")
    return wrong
