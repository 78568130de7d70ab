"""Long work on the event loop, in slices: others have their turn between them.

A thread would not do: it holds the interpreter for as long as one call of a codec takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeAlias, TypeVar

T = TypeVar("T")

ROWS_A_SLICE = 5_000
"""Of a result, decoded or put together in one slice: two or three milliseconds. With a few more turns of the loop each
answer of very many tokens would come later."""

FEW_ROWS = 100
"""Answers of so few rows are put together at once: most are, and none should wait for its turn behind a long one."""

Sliced: TypeAlias = Generator[None, None, T]
"""Work that yields wherever others may have their turn, and returns its value."""


def at_once(work: Sliced[T]) -> T:
    """The value of such work where nobody waits for a turn. Raises what the work raises."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            value: T = done.value
            return value


class Turns:
    """One per process. However many have long work to do, one slice of it is done in a turn of the loop.

    `async with` it for one slice, or have it `run` all of them.
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
        """The value of the work, which is about so many `rows`, if that is known. Raises what the work raises."""
        if rows is not None and rows <= FEW_ROWS:
            return at_once(work)
        while True:
            async with self:
                try:
                    next(work)
                except StopIteration as done:
                    value: T = done.value
                    return value
