"""Sampler: writes a sample of its process at the start, every ten seconds and at the end."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from telemetry.records.schema import SampleRecord
from telemetry.records.writer import RecordSink

LAG_CHECK_INTERVAL_S = 0.5

Facts = Mapping[str, Any]
"""Fields of a sample that only the process knows, by name."""


class Sampler:
    """One per process. `facts` is called in the event loop."""

    def __init__(
        self,
        sink: RecordSink,
        role: str,
        process: str,
        *,
        model: str = "",
        facts: Callable[[], Facts] = dict,
        interval_s: float = 10.0,
    ) -> None:
        self._sink, self._facts, self._interval_s = sink, facts, interval_s
        self._who: Facts = {"role": role, "process": process, "model": model, "pid": os.getpid()}
        self._lag_s = 0.0

    async def keep_sampling(self) -> None:
        """Sample until cancelled; the last sample is written then."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        try:
            while True:
                if loop.time() >= due:
                    self.sample()
                    due = loop.time() + self._interval_s
                expected = loop.time() + min(LAG_CHECK_INTERVAL_S, self._interval_s)
                await asyncio.sleep(expected - loop.time())
                self._lag_s = max(self._lag_s, loop.time() - expected)
        finally:
            self.sample()

    def sample(self) -> None:
        """Write one sample."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        self._sink.write(
            SampleRecord(
                at_us=int(time.time() * 1e6),
                cpu_s=round(used.ru_utime + used.ru_stime, 4),
                rss_bytes=resident_bytes(),
                lag_ms=round(self._lag_s * 1000, 2),
                written=self._sink.written,
                dropped=self._sink.dropped,
                **self._who,
                **self._facts(),
            )
        )
        self._lag_s = 0.0


def resident_bytes() -> int:
    """Memory of this process that is in RAM; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * resource.getpagesize()
