"""Buffered metrics: counters and histograms that are cheap enough to count every request and every token.

A buffered observation costs 0.2 us; in the library 1.1 us, or 2.7 us with a label look-up and a shared folder. Counts
only grow and have one writer, the event loop; `flush`, in any thread, adds the growth to the library's metric. So no
observation is lost even if another thread flushes in the middle of one.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from prometheus_client import Counter, Histogram, Metric


class BufferedCounter:
    """A buffered counter."""

    __slots__ = ("_counter", "_flushed", "_value")

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._value = self._flushed = 0

    def inc(self, n: int = 1) -> None:
        self._value += n

    def flush(self) -> None:
        """Add the growth since the last flush to the counter; never from two threads at once."""
        if (now := self._value) != self._flushed:
            self._counter.inc(now - self._flushed)
            self._flushed = now


class BufferedHistogram:
    """A buffered histogram."""

    __slots__ = ("_bounds", "_bucket", "_counts", "_flushed", "_flushed_total", "_histogram", "_total", "_value")

    def __init__(self, histogram: Histogram, bounds: tuple[float, ...]) -> None:
        self._histogram = histogram
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._value, self._bucket = 0.0, 0
        """The value that `observe_equal` had last, and its bucket."""
        self._flushed = list(self._counts)
        self._flushed_total = 0.0

    def observe(self, value: float, n: int = 1) -> None:
        """Add `n` observations of the same value, in seconds."""
        self._counts[bisect_left(self._bounds, value)] += n
        self._total += value * n

    def observe_equal(self, total: float, n: int) -> None:
        """Add `n` equal observations of `total` seconds together. Inlined, because it runs once a token."""
        value = total / n
        if value != self._value:  # the tokens of one engine step all have the same value
            self._value, self._bucket = value, bisect_left(self._bounds, value)
        self._counts[self._bucket] += n
        self._total += total

    def flush(self) -> None:
        """Add the growth since the last flush to the histogram; never from two threads at once."""
        counts, total = list(self._counts), self._total
        if counts == self._flushed:
            return
        for bucket, now, before in zip(self._histogram._buckets, counts, self._flushed, strict=True):
            if now != before:
                bucket.inc(now - before)
        self._histogram._sum.inc(total - self._flushed_total)
        self._flushed, self._flushed_total = counts, total


Buffer = TypeVar("Buffer", BufferedCounter, BufferedHistogram)


class Labelled(Generic[Buffer]):
    """A buffered metric with labels: one buffer per set of label values, flushed whenever the library collects it."""

    def __init__(self, instrument: Counter | Histogram, buffered: Callable[[Any], Buffer]) -> None:
        """`instrument`: the library's metric. `buffered` makes the buffer of its part with some label values."""
        self.instrument = instrument
        self._buffered: Callable[[Any], Buffer] = buffered
        self._by_labels: dict[tuple[str, ...], Buffer] = {}
        self._lock = threading.Lock()

    def labels(self, *values: str) -> Buffer:
        """The buffer of these label values; hot code keeps a reference to it."""
        buffer = self._by_labels.get(values)
        if buffer is None:
            buffer = self._by_labels[values] = self._buffered(self.instrument.labels(*values))
        return buffer

    def flush(self) -> None:
        """Pass on what came since the last time."""
        with self._lock:
            for buffer in list(self._by_labels.values()):
                buffer.flush()

    def collect(self) -> Iterable[Metric]:
        self.flush()
        return self.instrument.collect()

    def describe(self) -> Iterable[Metric]:
        return self.instrument.describe()
