"""Cooperative scheduler: splits long computations on the event loop into slices, so that other tasks run in between.

A thread would not help: one call of a codec holds the interpreter lock until it returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")

ROWS_PER_SLICE = 5_000
"""Rows of a result that one slice decodes or joins, in two or three milliseconds. Smaller slices would delay long
answers by more loop iterations."""

MAX_UNSLICED_ROWS = 100
"""Work of at most this many rows runs at once, so that a short answer does not wait behind a long one."""

Sliced: TypeAlias = Generator[None, None, T]
"""Work that yields wherever other tasks may run, and returns its value."""


def at_once(work: Sliced[T]) -> T:
    """Run the work without slicing, and return its value. Raises what the work raises."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            value: T = done.value
            return value


class Turns:
    """Runs at most one slice per loop iteration, whatever the number of long computations. One per process.

    `async with` it for one slice, or let it `run` all of them.
    """

    def __init__(self) -> None:
        self._one = asyncio.Lock()

    async def __aenter__(self) -> None:
        await self._one.acquire()

    async def __aexit__(self, *_: object) -> None:
        try:
            await asyncio.sleep(0)
        finally:
            self._one.release()

    async def run(self, work: Sliced[T], rows: int | None = None) -> T:
        """Run the work in slices, and return its value. `rows`: its size, if known. Raises what the work raises."""
        if rows is not None and rows <= MAX_UNSLICED_ROWS:
            return at_once(work)
        while True:
            async with self:
                try:
                    next(work)
                except StopIteration as done:
                    value: T = done.value
                    return value
