"""Callers that each put a job, wait for its result, and put the next one; and how many were answered in a time.

Runs in the environments of others too, so it needs the standard library alone. What is counted lies between two lines
on stdout: whoever started the callers reads the cost of the other processes when they come.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass

BEGIN, END = "begin", "end"

ANSWER = "amber0"
"""What every job answers: the first token of the simulated engine's is one such word."""


@dataclass(frozen=True)
class CallerPlan:
    """How many callers for how long; words of a command line."""

    url: str
    callers: int
    warmup_s: float
    seconds: float

    @classmethod
    def of(cls, words: list[str]) -> CallerPlan:
        url, callers, warmup_s, seconds = words
        return cls(url, int(callers), float(warmup_s), float(seconds))

    @property
    def words(self) -> list[str]:
        return [str(value) for value in asdict(self).values()]


class AnswerTally:
    """Answers as they come; `times` are (when, how long it took)."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []
        self.wrong: list[str] = []

    def add(self, begun: float, waited_until: float | None = None) -> None:
        """An answer. `waited_until`: where what is waited for came before its end."""
        now = time.monotonic()
        self.times.append((now, (waited_until or now) - begun))

    def tell(self, began: float, ended: float, cpu_s: float) -> None:
        """Print what was counted."""
        waits = sorted(waited for at, waited in self.times if began <= at < ended)
        told = {
            "jobs": len(waits),
            "seconds": ended - began,
            "wrong": self.wrong[:3],
            "p50_ms": 1000 * waits[len(waits) // 2] if waits else None,
            "p99_ms": 1000 * waits[int(len(waits) * 0.99)] if waits else None,
            "client_cpu_s": cpu_s,
        }
        say(json.dumps(told))


def say(line: str) -> None:
    """At once: somebody waits for it."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run(main: Awaitable[None]) -> None:
    """On uvloop where it is installed: nobody is to be slow for want of it."""
    try:
        import uvloop  # noqa: PLC0415 - not in every environment
    except ImportError:
        asyncio.run(_await(main))
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_await(main))


async def _await(work: Awaitable[None]) -> None:
    await work


async def tasks(plan: CallerPlan, ask: Callable[[int], Awaitable[float | None]]) -> None:
    """Callers that are tasks. `ask` gets the caller's number, puts a job and waits for its answer; it may return when
    what is waited for came. Raises ValueError for a wrong answer."""
    tally = AnswerTally()

    async def caller(number: int) -> None:
        while True:
            begun = time.monotonic()
            try:
                tally.add(begun, await ask(number))
            except Exception as error:  # noqa: BLE001 - counted and told, whatever it is
                tally.wrong.append(repr(error)[:300])
                await asyncio.sleep(0.1)

    running = {asyncio.create_task(caller(number)) for number in range(plan.callers)}
    await asyncio.sleep(plan.warmup_s)
    say(BEGIN)
    began, cpu = time.monotonic(), time.process_time()
    await asyncio.sleep(plan.seconds)
    ended, cpu = time.monotonic(), time.process_time() - cpu
    say(END)
    tally.tell(began, ended, cpu)
    # Not every library lets go of a task that is cancelled: who waits for them all may wait for ever.
    os._exit(0 if running else 1)


def threads(plan: CallerPlan, ask: Callable[[], None]) -> None:
    """The same with callers that are threads (or greenlets in the place of threads)."""
    tally, over = AnswerTally(), threading.Event()

    def caller() -> None:
        while not over.is_set():
            begun = time.monotonic()
            try:
                ask()
                tally.add(begun)
            except Exception as error:  # noqa: BLE001 - as above
                tally.wrong.append(repr(error)[:300])
                time.sleep(0.1)

    for _ in range(plan.callers):
        threading.Thread(target=caller, daemon=True).start()
    time.sleep(plan.warmup_s)
    say(BEGIN)
    began, cpu = time.monotonic(), time.process_time()
    time.sleep(plan.seconds)
    ended, cpu = time.monotonic(), time.process_time() - cpu
    say(END)
    over.set()
    tally.tell(began, ended, cpu)
    os._exit(0)  # whatever still waits for its answer
