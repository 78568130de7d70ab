"""Requests of one round: nobody is left waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from runtime.rounds import Rounds


async def test_who_waits_for_the_next_round_ends_with_the_one_that_is_cancelled() -> None:
    """Else a process that ends would wait for ever for whoever asked last."""
    begun = asyncio.Event()

    async def work(_: Sequence[int]) -> Sequence[int]:
        begun.set()
        await asyncio.get_running_loop().create_future()
        raise AssertionError("never done")

    rounds = Rounds(work)
    first = asyncio.create_task(rounds.ask(1))
    await begun.wait()
    second = asyncio.create_task(rounds.ask(2))
    await asyncio.sleep(0)
    assert rounds._running is not None
    rounds._running.cancel()
    done, _ = await asyncio.wait({first, second}, timeout=20)
    assert done == {first, second} and all(task.cancelled() for task in done)
