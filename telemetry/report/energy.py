"""Energy and utilisation of GPUs in a window, from the GPU readings in the samples of workers; None without any.

Every worker samples all GPUs of its machine, so each GPU's readings are merged and counted once. A time between two
readings is idle if no worker of that machine made a step or ran a text in it. What was not idle belongs to the tenants,
in proportion to the tokens that were generated for them; the idle rest belongs to nobody. The parts sum to the whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from telemetry.records.reader import Evidence
from telemetry.records.schema import SampleRecord


class GpuFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU."""

    gpu: str
    """Its UUID."""
    seconds: float
    """From its first reading to its last."""
    joules: float
    idle_joules: float
    """Of these, while no worker of its machine worked."""
    watts: float
    busy: float | None
    """Share of 1: the mean of the driver's readings; None: it tells none."""


class EnergyFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All GPUs."""

    joules: float
    idle_joules: float
    joules_per_request: float | None
    """Of every request that became a job; all energy, the idle part included, as in the next."""
    joules_per_token: float | None
    """Of every generated token."""
    tenants: Mapping[str, float]
    """Joules by tenant, without the idle part."""
    gpus: Sequence[GpuFigures]


def energy_of(evidence: Evidence) -> EnergyFigures | None:
    """The energy of a window; None if no GPU has two readings."""
    readings: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    busy: defaultdict[str, list[float]] = defaultdict(list)
    work: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for samples in evidence.samples.values():
        for sample in samples:
            for gpu, joules in sample.gpus.items():
                readings[gpu].append((sample.at_us, joules))
            for gpu, share in sample.gpu_busy.items():
                busy[gpu].append(share)
        for gpu in {gpu for sample in samples for gpu in sample.gpus}:
            work[gpu] += _working(samples)
    gpus = [
        _of_gpu(gpu, sorted(each), busy[gpu], _merged(work[gpu]))
        for gpu, each in sorted(readings.items())
        if len(each) > 1
    ]
    if not gpus:
        return None
    joules, idle = sum(each.joules for each in gpus), sum(each.idle_joules for each in gpus)
    tokens: defaultdict[str, int] = defaultdict(int)
    for request in evidence.requests:
        tokens[request.record.tenant] += request.record.completion_tokens
    total, jobs = sum(tokens.values()), sum(not request.refused for request in evidence.requests)
    return EnergyFigures(
        joules=joules,
        idle_joules=idle,
        joules_per_request=joules / jobs if jobs else None,
        joules_per_token=joules / total if total else None,
        tenants={name: (joules - idle) * count / total for name, count in sorted(tokens.items()) if count},
        gpus=gpus,
    )


def _working(samples: Sequence[SampleRecord]) -> list[tuple[int, int]]:
    """The times between samples in which a worker made a step or ran a text."""
    return [
        (before.at_us, after.at_us)
        for before, after in pairwise(samples)
        if after.steps > before.steps or before.running or after.running
    ]


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of these times, in order, without overlaps."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def _of_gpu(
    gpu: str, readings: Sequence[tuple[int, float]], busy: Sequence[float], work: Sequence[tuple[int, int]]
) -> GpuFigures:
    begins, joules, idle = [begin for begin, _ in work], 0.0, 0.0
    for (since, before), (until, after) in pairwise(readings):
        spent = max(0.0, after - before)  # a restarted driver counts anew
        joules += spent
        last = bisect_right(begins, until - 1) - 1  # the last time of work that begins before this one ends
        if last < 0 or work[last][1] <= since:
            idle += spent
    seconds = (readings[-1][0] - readings[0][0]) / 1e6
    return GpuFigures(
        gpu=gpu,
        seconds=seconds,
        joules=joules,
        idle_joules=idle,
        watts=joules / seconds if seconds else 0.0,
        busy=sum(busy) / len(busy) if busy else None,
    )
