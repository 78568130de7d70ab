"""Requests of one round: nobody is left waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.loops import Rounds


@dataclass(frozen=True)
class Answer:
    item: int


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


async def test_many_that_wait_are_started_at_once_and_go_with_the_next_round_if_they_must_be_repeated() -> None:
    """The answers of those that were started come by the callback; None sends them through `work`."""
    worked: list[list[int]] = []
    outcomes = iter(([Answer(1), ValueError("two")], None))

    async def work(items: Sequence[int]) -> Sequence[Answer]:
        worked.append(list(items))
        return [Answer(item) for item in items]

    def start_now(items: Sequence[int], then: Callable[[Sequence[Any] | None], None]) -> bool:
        asyncio.get_running_loop().call_soon(then, next(outcomes))
        return True

    rounds = Rounds(work, eager_items=2, start_now=start_now)
    told = await asyncio.gather(rounds.ask(1), rounds.ask(2), return_exceptions=True)
    assert told[0] == Answer(1) and isinstance(told[1], ValueError)
    assert await asyncio.gather(rounds.ask(3), rounds.ask(4)) == [Answer(3), Answer(4)]
    assert [3, 4] in worked and [1, 2] not in worked


async def test_a_round_has_at_most_so_many_items() -> None:
    async def work(items: Sequence[int]) -> Sequence[int]:
        assert len(items) <= 2
        return items

    assert await asyncio.gather(*map(Rounds(work, max_items=2).ask, range(5))) == list(range(5))
