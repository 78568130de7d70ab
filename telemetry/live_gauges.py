"""Live gauges: metrics that no process keeps, computed at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from telemetry.catalogue import CATALOGUE

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


def _gauge(name: str) -> LiveGauge:
    spec = CATALOGUE[name]
    return LiveGauge(name, spec.meaning, spec.labels)


LANE_WAITING = _gauge("penstock_lane_waiting")
LANE_RUNNING = _gauge("penstock_lane_running")
LANE_OLDEST = _gauge("penstock_lane_oldest_seconds")
LANE_CLASS_OLDEST = _gauge("penstock_lane_class_oldest_seconds")
BATCHES_UNFINISHED = _gauge("penstock_batches_unfinished")
BATCH_TOKENS = _gauge("penstock_batch_enqueued_tokens")


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
