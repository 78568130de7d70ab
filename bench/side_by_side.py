"""Several calls at the same time, each answer as it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

T = TypeVar("T")


def side_by_side(calls: Iterable[Callable[[], T]], jobs: int) -> Iterator[T]:
    """Raises what a call raises; those that have not begun are then given up, and those that have are waited for."""
    pool = ThreadPoolExecutor(jobs)
    try:
        for future in as_completed([pool.submit(call) for call in calls]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)  # nothing that a call has started is left behind
