"""/admin/overview: what an operator needs to know now, in one answer. Needs an admin key.

All who ask within a second get the same answer, so any number of open consoles costs what one does. Nothing is read
while nobody asks.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from api.admin.pools import MAX_ACTIONS, leading, pool_object, pools_view
from api.jobs import fields_of
from api.openai.rendering import to_json
from api.services import Services
from penstock.text import counted
from streaming.errors import Unavailable
from streaming.fleet.process import Process
from streaming.store.monitor import ADMISSION_SHARE

if TYPE_CHECKING:
    from prometheus_client import Metric


FIRST_TOKEN = "gen_ai_server_time_to_first_token_seconds"  # noqa: S105 - the name of a metric
PER_TOKEN = "gen_ai_server_time_per_output_token_seconds"  # noqa: S105
JOBS, LAPSED = "penstock_jobs", "penstock_lapsed_workers"
STREAMS = "penstock_open_streams"
WINDOW_S, SHORT_WINDOW_S = 60.0, 8.0
"""Windows of latencies, and of throughput, where readings reach so far back."""
MAX_READINGS = 64


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters of all processes of this machine at one time."""

    at: float
    first_token: Mapping[float, float] = field(default_factory=dict)
    """Answers by upper bound (s), cumulative."""
    per_token: Mapping[float, float] = field(default_factory=dict)
    ended: Mapping[str, float] = field(default_factory=dict)
    """Jobs by final state."""
    lapsed: float = 0
    """Workers whose lease ran out."""
    streams: float = 0
    """Open event streams."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What came of the newest readings, as the answer has it: of this machine alone, so without tokens a second, which
    the workers of all machines report. Percentiles in ms; None: no answer in that window."""

    window_s: float | None = None
    """Of the latencies: the last minute, or the time since the newest reading before it. None: since the processes
    started."""
    first_token_ms: dict[str, float] | None = None
    per_token_ms: dict[str, float] | None = None
    jobs_per_s: float | None = None
    """That ended; None until there are two readings."""
    failed: int = 0
    """Jobs that failed in the window."""
    lapsed: int = 0
    """Workers whose lease ran out in the window."""
    open_streams: int = 0


class RateWindow:
    """The readings of the last minute. They are taken only while somebody asks."""

    def __init__(self) -> None:
        self._readings: deque[Reading] = deque(maxlen=MAX_READINGS)

    def add(self, now: Reading) -> Rates:
        """Keep a reading, and compare it with earlier ones."""
        long, short = self._base(now, WINDOW_S), self._base(now, SHORT_WINDOW_S)
        self._readings.append(now)
        since = long or Reading(0.0)
        seconds = now.at - short.at if short else None
        ended, before = sum(now.ended.values()), sum(short.ended.values()) if short else 0
        return Rates(
            window_s=now.at - long.at if long else None,
            first_token_ms=_median_and_95th(now.first_token, since.first_token),
            per_token_ms=_median_and_95th(now.per_token, since.per_token),
            jobs_per_s=max(0.0, ended - before) / seconds if seconds else None,
            failed=_grown(now.ended.get("failed", 0), since.ended.get("failed", 0)) if long else 0,
            lapsed=_grown(now.lapsed, since.lapsed) if long else 0,
            open_streams=int(now.streams),
        )

    def _base(self, now: Reading, window_s: float) -> Reading | None:
        """Return the oldest reading in the window, or else the newest before it."""
        if not self._readings:
            return None
        times = [each.at for each in self._readings]
        return self._readings[min(bisect_left(times, now.at - window_s), len(times) - 1)]


def read(metrics: Iterable[Metric], at: float) -> Reading:
    """Take what is needed out of the metrics of all processes."""
    buckets: dict[str, defaultdict[float, float]] = {name: defaultdict(float) for name in (FIRST_TOKEN, PER_TOKEN)}
    lapsed = streams = 0.0
    ended: defaultdict[str, float] = defaultdict(float)
    for metric in metrics:
        for sample in metric.samples:
            if metric.name in buckets and sample.name.endswith("_bucket"):
                buckets[metric.name][float(sample.labels["le"])] += sample.value
            elif sample.name == JOBS + "_total":
                ended[sample.labels["state"]] += sample.value
            elif sample.name == LAPSED + "_total":
                lapsed += sample.value
            elif metric.name == STREAMS:
                streams += sample.value
    return Reading(at, buckets[FIRST_TOKEN], buckets[PER_TOKEN], ended, lapsed, streams)


def _grown(now: float, before: float) -> int:
    return max(0, round(now - before))


def _median_and_95th(now: Mapping[float, float], before: Mapping[float, float]) -> dict[str, float] | None:
    """Percentiles in ms of what was counted between two readings of a histogram; None if nothing was."""
    grown = [(bound, count - before.get(bound, 0)) for bound, count in sorted(now.items())]
    if not grown or grown[-1][1] <= 0:
        return None
    return {"p50": 1000 * _quantile(grown, 0.5), "p95": 1000 * _quantile(grown, 0.95)}


def _quantile(cumulative: list[tuple[float, float]], share: float) -> float:
    """Interpolate within the bucket, as Prometheus' histogram_quantile does; the last bound if it is beyond that."""
    wanted = share * cumulative[-1][1]
    below, counted = 0.0, 0.0
    for bound, count in cumulative:
        if count >= wanted:
            if bound == float("inf"):
                return below
            return below + (bound - below) * (wanted - counted) / (count - counted) if count > counted else bound
        below, counted = bound, count
    return below


Flow: TypeAlias = Literal["flowing", "behind", "stopped"]
Severity: TypeAlias = Literal["error", "warning", "note"]

PATIENCE_S: Mapping[str, float] = {"interactive": 10.0, "standard": 60.0}
"""Age of the oldest waiting job from which a lane counts as behind. Batch jobs wait for room on purpose."""
NEARLY_FULL = 0.9
"""Share of the memory that admission may fill from which a note appears."""


@dataclass(frozen=True, slots=True)
class ServiceProblem:
    """One thing that is wrong, its cause, and what to do."""

    severity: Severity
    title: str
    cause: str
    next_step: str
    page: str = ""
    """The page of the console that shows it, below /console."""
    delays: bool = False
    """Whether jobs wait longer for it than they should."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What the verdict looks at."""

    pools: Sequence[Mapping[str, Any]]
    """As GET /admin/pools renders them."""
    has_leader: bool
    store_refusal: str
    """Why the store takes no new work; "" while it does."""
    memory_share: float | None = None
    """Share of the store's memory in use that admission may fill; None without a limit."""
    dead_letters: int = 0
    rates: Rates = Rates()


def assess(now: Situation) -> tuple[Flow, str, list[ServiceProblem]]:
    """Decide what is wrong now. Returns the state in one word and one sentence, and its problems, the worst first."""
    problems = sorted(_problems(now), key=lambda problem: ("error", "warning", "note").index(problem.severity))
    late = next((problem for problem in problems if problem.delays), None)
    if late is None:
        return "flowing", "Flowing: jobs start as soon as there is room for them.", problems
    if late.severity == "error":
        return "stopped", f"Stopped: {late.title}.", problems
    return "behind", f"Falling behind: {late.title}.", problems


def _problems(now: Situation) -> Iterator[ServiceProblem]:
    if now.store_refusal:
        cause, fix = now.store_refusal, "penstock doctor shows the reason and the fix"
        yield ServiceProblem("error", "the store takes no new jobs", cause, fix, delays=True)
    elif now.memory_share is not None and now.memory_share >= NEARLY_FULL:
        cause = f"{now.memory_share:.0%} of the memory that jobs may use is taken"
        fix = "raise maxmemory, or shorten [redis] retention_s"
        yield ServiceProblem("note", "the store is nearly full", cause, fix)
    for pool in now.pools:
        yield from _of_pool(pool)
    if not now.has_leader:
        cause, fix = "no scheduler leads, so nobody changes the number of workers", "penstock ps; start a scheduler"
        yield ServiceProblem("note", "no scheduler leads", cause, fix)
    window_s, lapsed, failed = now.rates.window_s or WINDOW_S, now.rates.lapsed, now.rates.failed
    window = "minute" if window_s <= WINDOW_S else f"{window_s:.0f} s"
    if lapsed:
        title = f"{counted(lapsed, 'worker')} lost in the last {window}"
        cause, fix = "a lease ran out; the jobs continue elsewhere", "penstock logs --role worker shows why"
        yield ServiceProblem("warning", title, cause, fix, "/models")
    if failed:
        title = f"{counted(failed, 'job')} failed in the last {window}"
        yield ServiceProblem("note", title, "see the error of each", "open them", "/jobs?status=failed&tenant=*")
    if now.dead_letters:
        title = f"{counted(now.dead_letters, 'dead letter')} to look at"
        yield ServiceProblem("note", title, "jobs that were given up", "replay or drop them", "/dead-letters")


def _of_pool(pool: Mapping[str, Any]) -> Iterator[ServiceProblem]:
    model, lanes, workers, override = pool["model"], pool["lanes"], pool["workers"], pool["override"]
    waiting = sum(lane["waiting"] for lane in lanes.values())
    jobs, link = counted(waiting, "job"), f"/jobs?status=queued&tenant=*&model={quote(model, safe='')}"
    away = [worker for worker in workers if worker["away"] and worker["state"] == "ready"]
    if away and len(away) == pool["ready"]:  # more workers would change nothing
        longest = max(away, key=lambda worker: float(worker["away_s"]))
        title = f"servers of {model} have been away for {longest['away_s']:.0f} s: {'; '.join(longest['away'])}"
        cause = f"{jobs} of {model} waiting; jobs are kept until a server is back"
        fix = "start the servers, or correct their addresses: penstock doctor -v"
        yield ServiceProblem("error", title, cause, fix, link, delays=True)
    elif (stalled := pool.get("stalled")) and waiting:
        title = f"{jobs} of {model} {'waits' if waiting == 1 else 'wait'} and no worker runs or may start"
        yield ServiceProblem("error", title, stalled["cause"], stalled["fix"], link, delays=True)
    elif stalled and override is None:
        title = f"no worker of {model} may run, so a new job would wait"
        yield ServiceProblem("note", title, stalled["cause"], stalled["fix"], "/models")
    elif waiting and not pool["ready"] and pool["starting"]:
        phase = next((worker["phase"] for worker in workers if worker["phase"]), "it loads the model")
        cause = f"about {pool['wake_s']:.0f} s left" if pool["wake_s"] else phase
        title = f"{jobs} of {model} wait for a worker to start"
        yield ServiceProblem("warning", title, cause, "nothing", link, delays=True)
    elif waiting and not pool["ready"]:
        cause, fix = pool["reason"] or "the scheduler has not decided yet", "penstock logs --role worker says why"
        yield ServiceProblem("error", f"{jobs} of {model} wait and no worker runs", cause, fix, link, delays=True)
    elif not pool["ready"] and (pool["want"] or 0) > 0:
        cause = f"{counted(pool['want'], 'worker')} wanted, {pool['starting']} starting; a job put now waits for one"
        fix = "nothing, if it has just started; else penstock logs --role worker"
        yield ServiceProblem("warning", f"no worker of {model} runs yet", cause, fix, "/models")
    else:
        for name, limit_s in PATIENCE_S.items():
            lane = lanes[name]
            if lane["waiting"] and lane["oldest_s"] > limit_s:
                cause = f"the oldest of {counted(lane['waiting'], 'job')} waits {lane['oldest_s']:.0f} s"
                title, said = f"lane {name} of {model} is behind", f"{cause}; {pool['reason'] or 'no plan yet'}"
                yield ServiceProblem("warning", title, said, _more(pool), link, delays=True)
    for worker in workers:
        if worker["cordon"]:
            title = f"{worker['id']} takes no more jobs"
            yield ServiceProblem("note", title, worker["cordon"], "it is replaced when its jobs have ended", "/models")
    if override is not None:
        what = "scaling is paused" if override["paused"] else f"the number of workers is set to {override['want']}"
        by, fix = f"by {override['by'] or 'an operator'}", f"penstock scale resume {model}"
        yield ServiceProblem("note", f"{model}: {what}", by, fix, "/models")


def _more(pool: Mapping[str, Any]) -> str:
    """How to get more workers."""
    if pool["override"] is not None:
        return f"penstock scale resume {pool['model']}"
    if pool["want"] is not None and pool["want"] >= pool["max"]:
        return f"raise max_workers of [models.{pool['model']}] (now {pool['max']})"
    return "more workers are on their way, if the plan wants them"


MAX_AGE_S = 0.9
MAX_POINTS = 150
"""Points of the history: five minutes of a console that asks every two seconds."""
MAX_LETTERS = 100
"""Dead letters that are counted."""


class LiveOverview:
    """The newest overview of this process, shared by all who ask, and the points of the recent ones."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._lock = asyncio.Lock()
        self._rates = RateWindow()
        self._points: deque[dict[str, Any]] = deque(maxlen=MAX_POINTS)
        self._body, self._made_at = b"", 0.0

    async def body(self) -> bytes:
        """Return the overview as JSON, at most MAX_AGE_S old. Raises Unavailable."""
        async with self._lock:
            if not self._body or time.monotonic() - self._made_at > MAX_AGE_S:
                self._body = to_json(await self._made())
                self._made_at = time.monotonic()
            return self._body

    async def _made(self) -> dict[str, Any]:
        services = self._services
        view, processes, actions, letters, reading = await asyncio.gather(
            pools_view(services, services.models),
            services.fleet.processes(),
            services.plans.actions(MAX_ACTIONS),
            services.dead_letters.recent(MAX_LETTERS),
            asyncio.to_thread(lambda: read(services.metrics.collect(), time.time())),
        )
        rates = self._rates.add(reading)
        pools = [pool_object(services, model, view) for model in services.models]
        memory = _memory(services)
        try:
            refusal = services.refusal
        except Unavailable as error:
            refusal = str(error)
        now = Situation(pools, bool(view.lead.holder), refusal, memory["share"], len(letters), rates)
        flow, title, problems = assess(now)
        tokens_per_s = sum(process.tokens_per_s for process in processes)
        self._points.append(_point(reading.at, rates, tokens_per_s, pools))
        shown = asdict(rates)
        del shown["lapsed"]
        return {
            "object": "overview",
            "at": reading.at,
            "verdict": {"flow": flow, "title": title, "problems": [asdict(problem) for problem in problems]},
            "rates": {**shown, "tokens_per_s": tokens_per_s},
            "pools": pools,
            **leading(view.lead, actions),
            "processes": [_process(process) for process in processes],
            "store": memory,
            "dead_letters": {"count": len(letters), "more": len(letters) == MAX_LETTERS},
            "history": list(self._points),
        }


async def show(request: Request) -> Response:
    """See whether jobs flow, and what is wrong.

    GET /admin/overview: the verdict, rates, pools, processes and the store.
    """
    overview: LiveOverview = request.app.state.overview
    return Response(await overview.body(), media_type="application/json")


def _memory(services: Services) -> dict[str, Any]:
    """The memory of all servers of the store. `share`: of what admission may fill; null without a limit."""
    memories = services.headroom.memories
    used, owed = sum(each.used for each in memories), sum(sum(each.owed.values()) for each in memories)
    allowed = sum(each.allowed for each in memories) if all(each.allowed for each in memories) else 0
    share = (used + owed) / (ADMISSION_SHARE * allowed) if allowed else None
    return {"used_bytes": used, "reserved_bytes": owed, "allowed_bytes": allowed or None, "share": share}


def _point(at: float, rates: Rates, tokens_per_s: float, pools: list[dict[str, Any]]) -> dict[str, Any]:
    """One point of the charts."""
    lanes = [lane for pool in pools for lane in pool["lanes"].values()]
    return {
        "at": at,
        "tokens_per_s": tokens_per_s,
        "first_token_ms": rates.first_token_ms and rates.first_token_ms["p50"],
        "per_token_ms": rates.per_token_ms and rates.per_token_ms["p50"],
        "waiting": sum(lane["waiting"] for lane in lanes),
        "running": sum(lane["running"] for lane in lanes),
    }


def _process(process: Process) -> dict[str, Any]:
    of_worker = fields_of(process, "slots", "running", "waiting", "tokens_per_s")
    return {
        **fields_of(process, "role", "id", "host", "pid", "state", "since"),
        **(of_worker if process.role == "worker" else dict.fromkeys(of_worker)),
        "away": list(process.away),
        "adapters": list(process.adapters),
        "swaps": process.swaps,
        "model": process.model or None,
        "kv_tokens": process.kv_tokens or None,
        "kv_used": process.kv_used if process.kv_tokens else None,
    }
