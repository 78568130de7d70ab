"""Waiting for what other processes do: they set no event here, so it is looked for until it is so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from inspect import isawaitable


async def becomes(condition: Callable[[], object | Awaitable[object]], seconds: float, every_s: float = 0.02) -> bool:
    """Whether it came true in time."""
    try:
        async with asyncio.timeout(seconds):
            while not await _value(condition()):  # noqa: ASYNC110 - see above
                await asyncio.sleep(every_s)
    except TimeoutError:
        return False
    return True


async def until(condition: Callable[[], object | Awaitable[object]], seconds: float, every_s: float = 0.02) -> None:
    """The same, where anything else ends the row. Raises TimeoutError."""
    if not await becomes(condition, seconds, every_s):
        raise TimeoutError(f"{getattr(condition, '__qualname__', condition)} did not come true in {seconds:g} s")


async def _value(answer: object | Awaitable[object]) -> object:
    return await answer if isawaitable(answer) else answer
