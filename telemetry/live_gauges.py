"""Live gauges: metrics that no process keeps, computed at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Metric


@dataclass(frozen=True, slots=True)
class LiveGauge:
    """A gauge whose samples are computed at each scrape."""

    name: str
    help: str
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GaugeSample:
    """One value of a live gauge, with its label values in the gauge's order."""

    gauge: LiveGauge
    labels: tuple[str, ...]
    value: float


LANE_WAITING = LiveGauge("penstock_lane_waiting", "Jobs waiting in a lane.", ("model", "priority"))
LANE_RUNNING = LiveGauge("penstock_lane_running", "Jobs of a lane being generated.", ("model", "priority"))
LANE_OLDEST = LiveGauge("penstock_lane_oldest_seconds", "Age of the oldest waiting job.", ("model", "priority"))
BATCHES_UNFINISHED = LiveGauge("penstock_batches_unfinished", "Batches that have not ended.", ())
BATCH_TOKENS = LiveGauge("penstock_batch_enqueued_tokens", "Tokens that batches still have to compute.", ())


class MetricsPage:
    """What the library shows as a registry: the metrics that `collect` returns, asked for at each reading."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self.collect = collect


def families(samples: Iterable[GaugeSample]) -> Iterable[Metric]:
    from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415 - see the module's docstring

    families: dict[LiveGauge, GaugeMetricFamily] = {}
    for sample in samples:
        gauge = sample.gauge
        if gauge not in families:
            families[gauge] = GaugeMetricFamily(gauge.name, gauge.help, labels=gauge.labels)
        families[gauge].add_metric(sample.labels, sample.value)
    return families.values()
