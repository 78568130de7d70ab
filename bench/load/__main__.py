"""`python -m bench.load`: carry out the plan that comes in as JSON, write what was seen as JSON."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import uvloop

from bench.load.plan import LoadPlan, StreamReading
from bench.load.streams import Heard, Stream, StreamedAnswer, chat, hear
from bench.processes import cpu_s, tree, uncollected
from bench.stats import spread
from telemetry.latency import end_to_end, inter_token_latency, time_to_first_token

NO_CONNECTION, NOT_IN_TIME = "no connection", "not answered in time"


class LoadRun:
    """One plan being carried out."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._streams = [Stream(plan.port) for _ in range(plan.streams)]
        self._numbers = itertools.count()
        self._answers: list[StreamedAnswer] = []
        self._until = 0.0

    async def run(self) -> StreamReading:
        plan = self._plan
        try:
            await self._warm_up()
            with uncollected():
                before, own, began = cpu_of(plan.watch), time.process_time(), time.monotonic()
                self._until = began + plan.limit_s
                left = iter(range(plan.requests))
                await self._bounded([self._ask_on(stream, left) for stream in self._streams])
                # Requests that never ended would make the rate of the others look worse than it was.
                seconds = max((at for answer in self._answers for at, _ in answer.arrivals[-1:]), default=began) - began
                own_share = (time.process_time() - own) / (time.monotonic() - began)
                after = cpu_of(plan.watch)
        finally:
            for stream in self._streams:
                stream.close()
        cpu = {name: after[name] - before[name] for name in after}
        cut_short = len(self._answers) < plan.requests
        return summed([hear(answer) for answer in self._answers], seconds, cpu, own_share, cut_short)

    async def _warm_up(self) -> None:
        """A short answer on every stream. What fails here fails later too, and is counted there."""
        self._until = time.monotonic() + self._plan.limit_s
        await self._bounded([self._ask(stream, self._plan.warmup_tokens) for stream in self._streams])
        self._answers.clear()

    async def _ask_on(self, stream: Stream, left: Iterator[int]) -> None:
        for _ in left:
            await self._ask(stream, self._plan.tokens)
            if time.monotonic() > self._until:
                break

    async def _ask(self, stream: Stream, tokens: int) -> None:
        plan = self._plan
        prompt = f"Tell me about water, please: question {next(self._numbers)}."
        try:
            self._answers.append(await stream.ask(chat(plan.model, prompt, tokens), tokens))
        except OSError as error:
            self._answers.append(StreamedAnswer(tokens, time.monotonic(), fault=f"{NO_CONNECTION}: {error}"))
            await asyncio.sleep(0.1)

    async def _bounded(self, asking: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Until all of it has ended; what does not end in time is cut off."""
        tasks = [asyncio.create_task(each) for each in asking]
        patience = self._until + self._plan.limit_s - time.monotonic()
        _, late = await asyncio.wait(tasks, timeout=max(0.0, patience))
        for stream in self._streams if late else ():
            stream.close(NOT_IN_TIME)
        await asyncio.gather(*tasks)


def summed(
    heard: Sequence[Heard],
    seconds: float,
    cpu: dict[str, float],
    own_cpu: float,
    cut_short: bool,
) -> StreamReading:
    """All answers in one reading; failed ones are counted and not timed."""
    good = [each for each in heard if not each.wrong]
    begun = [each for each in good if each.chunks]
    return StreamReading(
        requests=len(good),
        wrong=dict(Counter(each.wrong for each in heard if each.wrong)),
        tokens=sum(each.tokens for each in heard),
        seconds=seconds,
        ttft=spread([1e3 * time_to_first_token(each.sent, each.chunks[0][0]) for each in begun]),
        itl=spread([gap for each in begun for gap in _itl_ms(each)]),
        e2e=spread([1e3 * end_to_end(each.sent, each.ended) for each in good]),
        cpu=cpu,
        own_cpu=own_cpu,
        cut_short=cut_short,
    )


def _itl_ms(heard: Heard) -> Iterator[float]:
    """One value for each token after the first chunk."""
    for (before, _), (now, tokens) in pairwise(heard.chunks):
        yield from [1e3 * inter_token_latency(before, now, tokens)] * tokens


def cpu_of(watch: dict[str, int]) -> dict[str, float]:
    """CPU seconds so far of each process and its descendants."""
    return {name: sum(map(cpu_s, tree(pid))) for name, pid in watch.items()}


def main() -> int:
    """Returns the exit code."""
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=LoadPlan)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        reading = runner.run(LoadRun(plan).run())
    sys.stdout.buffer.write(msgspec.json.encode(reading))
    return 0


if __name__ == "__main__":
    sys.exit(main())
