"""Penstock in front of a GPU engine: closed loops direct and through it in turn, and the figures."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

import msgspec

from bench.load.prompts import PromptSource
from bench.load.target import ConcurrencyLevel, TargetServer, closed_loop
from bench.penstock import PenstockUp
from bench.processes import Processes, spent
from bench.program import Testbed
from bench.report import Ratio, columns
from bench.stats import quantile
from planner.load import RequestLengths

DIRECT, PENSTOCK = "direct", "penstock"
WAYS = (DIRECT, PENSTOCK)
TURNS = (DIRECT, PENSTOCK, PENSTOCK, DIRECT)
"""A drift of the machine that is steady over four turns cancels out."""
FIELDS = {"temperature": 0}
START_TIMEOUT_S, REQUEST_TIMEOUT_S = 240.0, 120.0
MIX_SIZE = 60
COLUMNS = columns("""
    clients: at once; way: way; tokens_s: tok/s .0; share: of direct .3;
    ttft_p50_ms: TTFT p50, ms .1; ttft_p90_ms: p90 .1; added_ms: added, p50 .1;
    itl_p50_ms: ITL p50, ms .2; itl_p99_ms: p99 .2;
    penstock_us: CPU us/token, Penstock .1; engine_us: engine .1
""")


class ServedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is served, and how it is loaded."""

    model: str = "opt-1.3b"
    checked: str = "opt-125m"
    """Whose logits are held against one pass in float32."""
    device: str = "cuda"
    slots: int = 64
    context: int = 1024
    levels: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    prompts: tuple[int, int] = (128, 384)
    answers: tuple[int, int] = (64, 192)
    """Tokens, evenly between, in all combinations."""
    rounds: int = 6
    """Requests of each client."""
    least: int = 20
    """Requests of a load at least."""

    @property
    def lengths(self) -> RequestLengths:
        """Of the requests of a load."""
        random = Random(7)  # noqa: S311 - a workload
        mix = tuple((random.randint(*self.prompts), random.randint(*self.answers)) for _ in range(MIX_SIZE))
        prompt, answer = (round(fmean(each)) for each in zip(*mix, strict=True))
        return RequestLengths(prompt, answer, mix)


QUICK = ServedOptions(
    model="tiny", checked="tiny", device="cpu", slots=8, levels=(1, 2, 4, 8), prompts=(16, 48), answers=(8, 24),
    rounds=4, least=24,
)  # fmt: skip


class ServedLevel(msgspec.Struct, frozen=True, kw_only=True):
    """What one closed loop yielded and cost."""

    way: str
    clients: int
    requests: int
    tokens: int
    tokens_s: float
    ttft_p50_ms: float
    """Of the requests that followed another one of their client: at the begin all clients ask at once, which is no
    state of the load."""
    ttft_p90_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    """Between two pieces of an answer; those that come together have none between them."""
    penstock_cpu_s: float
    """Of all its processes, in the direct turns too: what it takes with nothing to do."""
    engine_cpu_s: float
    client_cpu: float
    """Share of a core that the load generator took."""


Turn = Sequence[ServedLevel]
"""All levels once, one way."""


class Unanswered(RuntimeError):
    """Requests of a load were not answered."""


def measured(options: ServedOptions, stage: Testbed) -> list[Turn]:
    """Raises Died, NotAServer, Unanswered, TimeoutError."""
    stage.say("starting the engine")
    with (
        _engine(options, stage) as (engine, direct),
        in_front(stage.room("penstock"), direct, options.slots) as (penstock, through),
    ):
        loads = _Loads(options, (penstock.processes, engine), {DIRECT: direct, PENSTOCK: through}, stage)
        loads.warm_up()
        return [loads.turn(way, number) for way, number in zip(TURNS, (1, 1, 2, 2), strict=True)]


@contextmanager
def _engine(options: ServedOptions, stage: Testbed) -> Iterator[tuple[Processes, TargetServer]]:
    """The engine's server, once it is warm. Raises Died."""
    with Processes(stage.room("engine")) as processes:
        words = (options.model, options.device, f"{options.slots}", f"{options.context}")
        port = processes.serve("engine", "bench.gpu.server", *words, seconds=START_TIMEOUT_S)
        yield processes, TargetServer.at(f"http://127.0.0.1:{port}/v1", options.model, name=DIRECT)


@contextmanager
def in_front(folder: Path, server: TargetServer, slots: int) -> Iterator[tuple[PenstockUp, TargetServer]]:
    """A Penstock in front of a server that computes so many texts at once and does not say so."""
    url = f"http://{server.host}:{server.port}{server.path}"
    with PenstockUp(folder, "--upstream", url, settings={"upstream.slots": slots}) as penstock:
        yield penstock, TargetServer.at(f"{penstock.url}/v1", server.model, name=PENSTOCK)


class _Loads:
    """Loads of one engine, direct and through the Penstock in front of it. `processes`: Penstock's, the engine's."""

    def __init__(
        self,
        options: ServedOptions,
        processes: tuple[Processes, Processes],
        servers: Mapping[str, TargetServer],
        stage: Testbed,
    ) -> None:
        self.options, self._processes, self._servers, self._stage = options, processes, servers, stage

    def warm_up(self) -> None:
        """All clients once, each way. Raises Unanswered."""
        most = self.options.levels[-1]
        for way in WAYS:
            self._load(way, most, self._source(way, 0).bodies(most, FIELDS))

    def turn(self, way: str, number: int) -> Turn:
        """All levels once; turns of one number have the same prompts. Raises Unanswered."""
        source, found = self._source(way, number), []
        for clients in self.options.levels:
            self._stage.say(f"{way}: {clients} at once")
            bodies = source.bodies(max(self.options.least, self.options.rounds * clients), FIELDS)
            before = [each.cpu_s() for each in self._processes]
            level = self._load(way, clients, bodies)
            penstock_s, engine_s = (
                spent(early, each.cpu_s()) for early, each in zip(before, self._processes, strict=True)
            )
            found.append(served_level(way, level, penstock_s, engine_s))
            self._stage.done()
        return found

    def _source(self, way: str, number: int) -> PromptSource:
        return PromptSource(self._servers[way], self.options.lengths, seed=number, chats=False)

    def _load(self, way: str, clients: int, bodies: Sequence[bytes]) -> ConcurrencyLevel:
        level = asyncio.run(closed_loop(self._servers[way], clients, bodies, REQUEST_TIMEOUT_S, lambda: None))
        if faults := {answer.fault for answer in level.answers if answer.fault}:
            raise Unanswered(f"{way}, {clients} at once: {', '.join(sorted(faults))}")
        return level


def served_level(way: str, level: ConcurrencyLevel, penstock_cpu_s: float, engine_cpu_s: float) -> ServedLevel:
    """The figures of one load."""
    answers = sorted(level.answers, key=lambda answer: answer.sent)
    gaps = sorted(after - before for answer in answers for before, after in pairwise(answer.times))
    ttfts = sorted(answer.ttft for answer in answers[level.streams :])
    tokens = sum(answer.tokens for answer in answers)
    return ServedLevel(
        way=way,
        clients=level.streams,
        requests=len(answers),
        tokens=tokens,
        tokens_s=tokens / (max(answer.times[-1] for answer in answers) - answers[0].sent),
        ttft_p50_ms=1e3 * quantile(ttfts, 0.5),
        ttft_p90_ms=1e3 * quantile(ttfts, 0.9),
        itl_p50_ms=1e3 * quantile(gaps, 0.5),
        itl_p99_ms=1e3 * quantile(gaps, 0.99),
        penstock_cpu_s=penstock_cpu_s,
        engine_cpu_s=engine_cpu_s,
        client_cpu=level.own_cpu,
    )


# --- figures ----------------------------------------------------------------------------------------------------------


def _at(turns: Sequence[Turn], way: str, clients: int) -> list[ServedLevel]:
    return [level for turn in turns for level in turn if (level.way, level.clients) == (way, clients)]


def _pairs(turns: Sequence[Turn], clients: int) -> list[tuple[ServedLevel, ServedLevel]]:
    """Direct and through Penstock, of the turns with the same prompts."""
    return list(zip(*(_at(turns, way, clients) for way in WAYS), strict=True))


def shares(turns: Sequence[Turn], clients: int) -> list[float]:
    """Tokens per second through Penstock over direct, in each pair of turns."""
    return [through.tokens_s / direct.tokens_s for direct, through in _pairs(turns, clients)]


def added_ms(turns: Sequence[Turn], clients: int) -> list[float]:
    """What Penstock adds to the median time to the first token, in each pair of turns."""
    return [through.ttft_p50_ms - direct.ttft_p50_ms for direct, through in _pairs(turns, clients)]


def rows(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """One for each level and way, each figure the median of the turns."""
    return [_row(turns, level.clients, way) for level in turns[0] for way in WAYS]


def _row(turns: Sequence[Turn], clients: int, way: str) -> dict[str, Any]:
    levels = _at(turns, way, clients)
    tokens = sum(level.tokens for level in levels)
    keys = ("tokens_s", "ttft_p50_ms", "ttft_p90_ms", "itl_p50_ms", "itl_p99_ms")
    row = {"clients": clients, "way": way, "requests": sum(level.requests for level in levels)}
    row |= {key: median(getattr(level, key) for level in levels) for key in keys}
    row["engine_us"] = 1e6 * sum(level.engine_cpu_s for level in levels) / tokens
    if way == PENSTOCK:
        row |= {"share": median(shares(turns, clients)), "added_ms": median(added_ms(turns, clients))}
        row["penstock_us"] = 1e6 * sum(level.penstock_cpu_s for level in levels) / tokens
    return row


def ratios(turns: Sequence[Turn]) -> list[Ratio]:
    """Throughput and time to the first token."""
    levels = [level.clients for level in turns[0]]
    most, least = levels[-1], min(levels, key=lambda clients: median(shares(turns, clients)))
    slowest = max(levels, key=lambda clients: median(added_ms(turns, clients)))
    what = "TTFT p50 through Penstock - direct, ms"
    share = f"c={most}: tokens per second through Penstock / direct"
    return [
        Ratio.held(None, share, median(shares(turns, most)), digits=3),
        Ratio.held(None, "the same at its worst level", median(shares(turns, least)), digits=3),
        Ratio.held("gateway.upstream_ttft", f"{what}, at its worst level", median(added_ms(turns, slowest))),
        Ratio.held(None, f"{what}, c=1", median(added_ms(turns, 1))),
    ]


def notes(options: ServedOptions, turns: Sequence[Turn]) -> list[str]:
    """What the table does not say."""
    return [
        f"`direct` is the engine's own server: a step loop in PyTorch with random weights in the shape of "
        f"{options.model}, {options.slots} slots, batching in flight; `penstock` is `penstock up --upstream` in front "
        "of it, with the durable log. Each way had two turns: direct, penstock, penstock, direct. The first request of "
        "each client counts for throughput alone.",
        f"The load generator used at most {100 * max(each.client_cpu for turn in turns for each in turn):.0f} % of one "
        "core.",
    ]
