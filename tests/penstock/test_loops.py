"""Loops are kept alive, expected errors are told as often as wanted, and retries wait as they should."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.loops import (
    STEPS_S,
    TIMER_SLACK_S,
    ExpectedErrors,
    Rounds,
    backoff,
    coalesced,
    retry,
    retry_until,
    run_periodically,
    supervise,
    wait,
    wait_any,
)


class Work:
    """Fails, succeeds or ends its loop, as its plan says."""

    def __init__(self, *plan: Exception | str) -> None:
        self._plan = iter(plan)
        self.calls = 0

    async def __call__(self) -> str:
        self.calls += 1
        step = next(self._plan, None)
        if step is None:
            raise asyncio.CancelledError
        if isinstance(step, Exception):
            raise step
        return step


def told(**options: object) -> tuple[list[str], ExpectedErrors]:
    """Expected OSErrors, and where they are written."""
    lines: list[str] = []

    def write(message: str, error: Exception) -> None:
        lines.append(message % error)

    return lines, ExpectedErrors(OSError, write, "away: %s", on_end=lambda: lines.append("back"), **options)  # type: ignore[arg-type]


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What is slept, without the sleep."""
    slept: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", noted)
    monkeypatch.setattr("penstock.loops.coalesced", lambda interval_s: interval_s)
    return slept


# --- expected errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("once", "said"), [(True, ["away: a", "back", "away: c"]), (False, ["away: a", "away: b", "back", "away: c"])]
)
def test_once_is_the_first_of_several_in_a_row(once: bool, said: list[str]) -> None:
    """And the first of the next row."""
    lines, expected = told(once=once)
    for error in (OSError("a"), OSError("b"), None, None, OSError("c")):
        with expected:
            if error is not None:
                raise error
    assert lines == said and expected.active


def test_other_errors_pass_and_end_nothing() -> None:
    lines, expected = told(once=True)
    with expected:
        raise OSError("a")
    with pytest.raises(ValueError, match="x"), expected:
        raise ValueError("x")
    with pytest.raises(asyncio.CancelledError), expected:
        raise asyncio.CancelledError
    assert lines == ["away: a"] and expected.active
    expected.end()
    expected.end()
    assert lines == ["away: a", "back"]


# --- loops -----------------------------------------------------------------------------------------------------------


async def test_work_that_breaks_is_begun_again(delays: list[float], caplog: pytest.LogCaptureFixture) -> None:
    """Told in full each time; what returns is over."""
    work = Work(ValueError("one"), OSError("two"), "done")
    with caplog.at_level(logging.ERROR):
        await supervise(work, 3.0)  # type: ignore[arg-type]
    assert (work.calls, delays) == (3, [3.0, 3.0])
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["one", "two"]


@pytest.mark.parametrize(("wait_first", "waits"), [(False, 3), (True, 4)])
async def test_what_is_periodic_goes_on_after_expected_errors(
    delays: list[float], wait_first: bool, waits: int
) -> None:
    """Also where the interval depends on what was found."""
    lines, expected = told()
    work = Work("", OSError("x"), "")
    with pytest.raises(asyncio.CancelledError):
        await run_periodically(work, 2.0, expected, wait_first=wait_first)
    assert (work.calls, delays, lines) == (4, [2.0] * waits, ["away: x", "back"])
    delays.clear()
    work = Work("", "")
    with pytest.raises(asyncio.CancelledError):
        await run_periodically(work, lambda: float(work.calls), told()[1])
    assert delays == [1.0, 2.0]


@pytest.mark.parametrize("interval_s", [0.25, 0.3, 0.5, 1.0, 1.25, 5 / 3, 2.0, 10.0, 60.0])
async def test_loops_wake_together_and_never_late(interval_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever they last woke, and also if a timer fires a little early: on a step of the second, less than one step
    before the interval is over."""
    step_s = next(step_s for step_s in STEPS_S if step_s <= interval_s)
    loop = asyncio.get_running_loop()
    for now in (7.0, 7.1, 7.249, 7.4999, 7.999, 123_456.789):
        monkeypatch.setattr(loop, "time", lambda now=now: now)
        wait_s = coalesced(interval_s)
        assert max(0.0, interval_s - step_s) < wait_s <= interval_s + TIMER_SLACK_S
        steps = (now + wait_s - os.getpid() % 1000 / 1000) / step_s
        assert steps == pytest.approx(round(steps), abs=1e-6)


# --- retries ---------------------------------------------------------------------------------------------------------


async def test_the_first_success_is_the_result_and_else_the_last_error(delays: list[float]) -> None:
    assert await retry(Work(OSError("a"), OSError("b"), "done"), told()[1], backoff(0.5, 8.0)) == "done"
    assert delays == [0.5, 1.0]
    lines, expected = told()
    with pytest.raises(OSError, match="b"):
        await retry(Work(OSError("a"), OSError("b"), "never"), expected, (0.5,))
    assert (delays[2:], lines) == ([0.5], ["away: a"])


@pytest.mark.parametrize(("stops", "succeeded", "calls"), [(False, True, 3), (True, False, 2)])
async def test_retries_end_with_success_or_the_stop(stops: bool, succeeded: bool, calls: int) -> None:
    stop, work = asyncio.Event(), Work(OSError("a"), OSError("b"), "done")

    async def step() -> None:
        if stops and work.calls == 1:
            stop.set()
        await work()

    assert await retry_until(stop, step, told()[1], 0.001) is succeeded
    assert work.calls == calls


async def test_a_stop_is_not_waited_for() -> None:
    """What is to end does not sleep out its delay; and what is to end already begins nothing."""
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, stop.set)
    async with asyncio.timeout(30):
        assert not await retry_until(stop, Work(OSError("a")), told()[1], 600.0)
    unused = Work("done")
    assert not await retry_until(stop, unused, told()[1], 600.0) and not unused.calls


@pytest.mark.parametrize("wake", [True, False])
async def test_an_event_is_waited_for_only_so_long(wake: bool) -> None:
    event = asyncio.Event()
    then: Callable[[], None] = event.set if wake else lambda: None
    asyncio.get_running_loop().call_soon(then)
    assert await wait(event, 0.05) is wake


async def test_one_of_several_events_is_enough() -> None:
    """Nothing goes on waiting for the others."""
    one, other = asyncio.Event(), asyncio.Event()
    asyncio.get_running_loop().call_soon(other.set)
    before = len(asyncio.all_tasks())
    async with asyncio.timeout(30):
        await wait_any(one, other)
        await wait_any(one, timeout_s=0.01)
    await asyncio.sleep(0)
    assert not one.is_set() and len(asyncio.all_tasks()) == before


# --- rounds -----------------------------------------------------------------------------------------------------------


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
    first = rounds.ask(1)
    await begun.wait()
    second = rounds.ask(2)
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
