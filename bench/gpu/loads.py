"""Loads of one server: closed loops of so many clients, what each yielded, and what the simulator says of it."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean

from bench.load.prompts import PromptSource
from bench.table1.client import TargetServer, TimedAnswer, closed_loop
from planner.fit import (
    FIGURES,
    ComparedLoad,
    EngineFit,
    FitErrors,
    LoadFigures,
    ServedLimits,
    ServedText,
    errors_of,
    figures,
    fitted,
    measured,
    predicted_clients,
)
from planner.load import RequestLengths
from planner.search import quantile
from planner.tuning import MeasuredFrontier, frontier_of

LEVELS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Clients. The first, third, fifth... are fitted, and predict the others."""
ROUNDS, MIN_REQUESTS = 3, 24
"""Requests of each client, and of a load at least: of fewer, a p90 is one request."""
TIMEOUT_S = 600.0
FIELDS: Mapping[str, object] = {"temperature": 0, "ignore_eos": True}
MIX_SIZE = 60
PROMPTS, ANSWERS = (32, 96), (8, 40)
"""Tokens of the shortest and the longest: different enough to tell what a prompt costs from what an answer costs."""


class Unanswered(RuntimeError):
    """Requests of a load were not answered."""


def length_mix(prompts: tuple[int, int] = PROMPTS, answers: tuple[int, int] = ANSWERS) -> RequestLengths:
    """Prompts and answers, each evenly between its bounds, in all combinations of short and long."""
    random = Random(7)  # noqa: S311 - a workload
    mix = tuple((random.randint(*prompts), random.randint(*answers)) for _ in range(MIX_SIZE))
    prompt, answer = (round(fmean(each)) for each in zip(*mix, strict=True))
    return RequestLengths(prompt, answer, mix)


@dataclass(frozen=True, slots=True)
class ClosedLoad:
    """One closed loop."""

    clients: int
    texts: Sequence[ServedText]
    """In the order in which they were asked."""

    @property
    def figures(self) -> LoadFigures:
        """As measured; `steady` says which times to the first token count."""
        return steady(measured(self.texts), [text.heard_s - text.arrived_s for text in self.texts[self.clients :]])


def steady(whole: LoadFigures, ttfts_s: Sequence[float]) -> LoadFigures:
    """The figures with the times to the first token of those requests alone that followed another one of their client:
    at the begin of a closed loop all clients ask at once, which is no state of its load."""
    ordered = sorted(ttfts_s)
    return replace(whole, ttft_p50_s=quantile(ordered, 0.5), ttft_p90_s=quantile(ordered, 0.9))


def requests_of(clients: int) -> int:
    """Of one load."""
    return max(MIN_REQUESTS, ROUNDS * clients)


def run_loads(server: TargetServer, levels: Sequence[int], say: Callable[[int], None], words: int) -> list[ClosedLoad]:
    """Every level once, after a warm-up: the same lengths in the same order each time, with other words for another
    `words`, as no cache may answer. Raises Unanswered."""
    source = PromptSource(server, length_mix(), words=words)
    asyncio.run(closed_loop(server, 2, source.bodies(4, FIELDS), TIMEOUT_S, lambda: None))
    found = []
    for clients in levels:
        say(clients)
        bodies = source.bodies(requests_of(clients), FIELDS)
        level = asyncio.run(closed_loop(server, clients, bodies, TIMEOUT_S, lambda: None))
        if faults := {answer.fault for answer in level.answers if answer.fault}:
            raise Unanswered(f"{server.name}, {clients} at once: {', '.join(sorted(faults))}")
        found.append(ClosedLoad(clients, [served_text(each) for each in sorted(level.answers, key=_sent)]))
    return found


def _sent(answer: TimedAnswer) -> float:
    return answer.sent


def served_text(answer: TimedAnswer) -> ServedText:
    """An answer as its client saw it: the engine's way in and out counts as a part of its first step."""
    first, last = answer.times[0], answer.times[-1]
    return ServedText("engine", answer.sent, answer.sent, first, last, first, max(1, answer.prompt), answer.tokens)


def as_rows(loads: Sequence[ClosedLoad]) -> list[list[float]]:
    """Every request of the loads, for a file: clients, seconds of its sending, first and last token, tokens of prompt
    and answer."""
    begin_s = loads[0].texts[0].arrived_s
    return [
        [load.clients, *(round(at - begin_s, 6) for at in (text.arrived_s, text.first_s, text.last_s)),
         text.prompt, text.answer]
        for load in loads
        for text in load.texts
    ]  # fmt: skip


def of_rows(rows: Sequence[Sequence[float]]) -> list[ClosedLoad]:
    """The loads of such rows."""
    found: dict[int, list[ServedText]] = {}
    for clients, sent_s, first_s, last_s, prompt, answer in rows:
        text = ServedText("engine", sent_s, sent_s, first_s, last_s, first_s, int(prompt), int(answer))
        found.setdefault(int(clients), []).append(text)
    return [ClosedLoad(clients, texts) for clients, texts in found.items()]


@dataclass(frozen=True, slots=True)
class PredictedLoad:
    """A load beside what the simulator says of it."""

    load: ClosedLoad
    held_out: bool
    predicted: LoadFigures


def predictions(loads: Sequence[ClosedLoad], limits: ServedLimits) -> tuple[EngineFit, list[PredictedLoad]]:
    """Fit every second load, from the first on, and predict all, each with the lengths that its server counted. Raises
    PlanError."""
    fit = fitted([text for load in loads[::2] for text in load.texts], limits)
    found = []
    for number, load in enumerate(loads):
        lengths = [(text.prompt, text.answer) for text in load.texts]
        texts = sorted(predicted_clients(fit, load.clients, lengths), key=lambda text: text.arrived_s)
        said = steady(figures(fit, texts), [fit.ttft_s(text) for text in texts[load.clients :]])
        found.append(PredictedLoad(load, number % 2 == 1, said))
    return fit, found


def as_compared(found: Sequence[PredictedLoad]) -> list[ComparedLoad]:
    """As the planner's errors take them."""
    begin_s = found[0].load.texts[0].arrived_s
    return [
        ComparedLoad(each.load.texts[0].arrived_s - begin_s, len(each.load.texts), each.held_out, each.load.figures,
                     each.predicted)
        for each in found
    ]  # fmt: skip


def between(found: Sequence[PredictedLoad]) -> list[PredictedLoad]:
    """The same loads, of which now a straight line says what they yield: through the nearest fitted loads on both
    sides, or the last two, over the logarithms of clients and figure. It knows nothing of engines; where it is as near
    as the simulator, the held-out loads do not show that the simulator knows more."""
    known = [each.load for each in found if not each.held_out]
    return [replace(each, predicted=_on_line(known, each.load.clients)) for each in found]


def _on_line(known: Sequence[ClosedLoad], clients: int) -> LoadFigures:
    place = min(max(1, bisect_left([load.clients for load in known], clients)), len(known) - 1)
    low, high = known[place - 1 : place + 1]
    share = math.log(clients / low.clients) / math.log(high.clients / low.clients)

    def at(key: str) -> float:
        one, other = getattr(low.figures, key), getattr(high.figures, key)
        return float(one * (other / one) ** share) if one > 0 else 0.0

    return LoadFigures(*map(at, FIGURES))


def differences(loads: Sequence[ClosedLoad], others: Sequence[ClosedLoad]) -> FitErrors:
    """|other / one - 1| of each figure of the same loads, measured twice: the medians."""
    return errors_of([
        ComparedLoad(0.0, len(one.texts), True, one.figures, other.figures)
        for one, other in zip(loads, others, strict=True)
    ])  # fmt: skip


def frontier(loads: Sequence[ClosedLoad]) -> MeasuredFrontier:
    """Throughput and mean latency over all levels, with the knee."""
    rates = {load.clients: [load.figures.tokens_s] for load in loads}
    latencies = {load.clients: [fmean(text.last_s - text.arrived_s for text in load.texts)] for load in loads}
    requests = {load.clients: [len(load.texts) / _seconds(load.texts)] for load in loads}
    return frontier_of(rates, requests, latencies, Random(1))  # noqa: S311 - a bootstrap


def _seconds(texts: Sequence[ServedText]) -> float:
    return max(text.last_s for text in texts) - min(text.arrived_s for text in texts)
