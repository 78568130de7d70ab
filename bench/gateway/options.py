"""What one run is to do."""

from __future__ import annotations

from dataclasses import dataclass

from bench.gateway.system import ServingGateway
from bench.load.plan import LoadPlan
from workers.engines.sim.settings import SimSettings

OVERHEAD_S = 4.0
"""Of one measurement: starting, warming up, reading what came back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """As the command line says it, filled up."""

    quick: bool
    levels: tuple[int, ...]
    rounds: int
    requests_per_stream: int
    tokens: int
    step_ms: float
    prefill_ms: float
    limit_s: float
    """For one measurement to begin its requests; what runs then may take as long again."""
    burst_streams: int = 64
    burst_ms: float = 5.0
    """Step and prefill of the burst."""
    bursts: int = 20
    """In each round."""
    burst_tokens: int = 32
    idle_streams: int = 10_000
    idle_rest_s: float = 20.0
    """How long they are watched doing nothing."""
    idle_keep_alive_s: float = 10.0
    """The default of [api] keep_alive_s."""

    @property
    def engine(self) -> SimSettings:
        """A slot for every stream, so that nothing queues."""
        return SimSettings(step_ms=self.step_ms, prefill_ms=self.prefill_ms, slots=max(256, *self.levels))

    @property
    def burst_engine(self) -> SimSettings:
        return SimSettings(step_ms=self.burst_ms, prefill_ms=self.burst_ms, slots=max(256, self.burst_streams))

    def plan(self, serving: ServingGateway, streams: int) -> LoadPlan:
        """So many streams in a closed loop."""
        return LoadPlan(
            port=serving.port,
            model=serving.model,
            headers=dict(serving.headers),
            streams=streams,
            requests=streams * self.requests_per_stream,
            tokens=self.tokens,
            limit_s=self.limit_s,
            watch=serving.watch,
        )

    def minutes(self, systems: int) -> int:
        """About how long a sweep takes, if every system keeps up with the engine."""
        answer_s = (self.prefill_ms + self.step_ms * self.tokens) / 1e3
        measurements = self.rounds * systems * len(self.levels)
        return round(measurements * (self.requests_per_stream * answer_s + OVERHEAD_S) / 60) + 1

    def name(self, mode: str) -> str:
        """Of the results file: a quick run does not take the place of a full one."""
        return f"{mode}-quick" if self.quick else mode
