"""Load generator as a process of its own: its plan goes in as JSON, its readings come out."""

from __future__ import annotations

import msgspec

from bench.processes import answer_of
from bench.stats import Spread


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`streams` connections, each asking again as soon as it is answered, until `requests` have been answered."""

    port: int
    model: str
    streams: int
    requests: int
    tokens: int
    """Of each answer."""
    warmup_tokens: int = 16
    """Each stream asks once for so many before anything is measured."""
    limit_s: float = 60.0
    """No request begins later than this; what runs then may take as long again."""
    watch: dict[str, int] = {}
    """Processes whose CPU time is read, by name; each with all its descendants."""


class StreamReading(msgspec.Struct, frozen=True, kw_only=True):
    """What the streams saw, in ms, as telemetry.latency defines it; `wrong` counts each kind of failed answer."""

    requests: int
    """Answered in full: every token there, once and in order."""
    wrong: dict[str, int]
    tokens: int
    seconds: float
    """From the first request to the last answer."""
    ttft: Spread
    itl: Spread
    """Of every token but an answer's first."""
    e2e: Spread
    """To the end of the answer."""
    cpu: dict[str, float] = {}
    """CPU seconds of each watched process."""
    own_cpu: float
    """Share of one core that the load generator itself used."""
    cut_short: bool = False
    """Time was up before all requests were made."""

    @property
    def errors(self) -> int:
        return sum(self.wrong.values())

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def cpu_us_per_token(self) -> float | None:
        """Summed over all watched processes."""
        return 1e6 * sum(self.cpu.values()) / self.tokens if self.tokens else None


SPARE_S = 60.0
"""For starting, warming up, and reading hundreds of thousands of tokens afterwards."""


class LoadFailed(RuntimeError):
    """The load generator itself came to grief: nothing is known of the system."""


def measure(plan: LoadPlan) -> StreamReading:
    """Carry out the plan. Bounded in time by its `limit_s`. Raises LoadFailed."""
    return answer_of("bench.load", plan, StreamReading, 4 * plan.limit_s + SPARE_S, LoadFailed)
