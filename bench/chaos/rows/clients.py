"""F08-F11, F13, F16, F22, F24: clients that leave or read slowly, API processes that die; requests that kill engines,
come twice, run out of time, are cancelled, or are none."""

from __future__ import annotations

import asyncio
import itertools
import math
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec

from bench.chaos.asks import SECOND, TENANTS, Ask, ClientView
from bench.chaos.cluster import PenstockCluster
from bench.chaos.history import lives_of, of_kind
from bench.chaos.http import Cut, Exchange, fetch
from bench.chaos.processes import becomes
from bench.chaos.readings import CANCEL
from bench.chaos.rows.workers import requests, victim
from bench.chaos.stage import PASSES, FaultTestbed, yardstick
from bench.processes import rss_bytes
from bench.report import bound
from bench.stats import percentile
from streaming.keys import prefix as partition_prefix


async def _kill_door(stage: FaultTestbed, cluster: PenstockCluster, *, worker_too: bool) -> None:
    """All streams at one API process; it dies, and they go on at the other one with their cursor."""
    for trial in stage.tries():
        number = trial % len(cluster.apis)
        doomed, port = cluster.apis[number], cluster.ports[number]
        prompts = [f"{stage.row.id} trial {trial} number {n}" for n in range(5)]
        asks = [
            Ask(text, 130, chat=n % 5 != 4, key=text if n % 2 else "", tenant=TENANTS[n % 2])
            for n, text in enumerate(prompts)
        ]
        begun = cluster.begin(asks, port=port)
        waiting = asyncio.gather(*(told.accepted.wait() for told, _ in begun))
        if trial % 4:  # every fourth kill may come before the answer
            await waiting
        await asyncio.sleep(stage.rng.uniform(0.0, 1.0))
        stage.fault(f"kill -9 {doomed.name}")
        doomed.kill()
        if worker_too:
            (await victim(stage, cluster)).kill()
        await waiting
        await cluster.finish(begun)
        cut = any(life.of("cut", "unknown") for life in stage.lives(requests(begun)))
        moved = not worker_too or stage.moved(requests(begun))
        stage.bit(cut and moved, "no stream was cut" if moved else "the worker held no job")
        await cluster.ready()


async def f10(stage: FaultTestbed) -> None:
    """Resumed on another API process: the first frame within a second."""
    async with stage.cluster() as cluster:
        await _kill_door(stage, cluster, worker_too=False)
    _resumed(stage, 1000.0)


async def f10b(stage: FaultTestbed) -> None:
    """API process and worker die at once: the stall is a lease and the sweep, the resume is not."""
    async with stage.cluster() as cluster:
        await _kill_door(stage, cluster, worker_too=True)
    _resumed(stage, None)


def _resumed(stage: FaultTestbed, limit_ms: float | None) -> None:
    """From the moment a connection broke to the first token of the next one."""
    times = []
    for life in lives_of(stage.history.events).values():
        cut: float | None = None
        for event in life.of("cut", "token"):
            if event["event"] == "cut":
                cut = event["t"] if cut is None else cut
            elif cut is not None:
                times.append(1000 * (event["t"] - cut))
                cut = None
    times.sort()
    stage.figures["streams resumed"] = len(times)
    stage.must(len(times) >= stage.wanted, f"only {len(times)} streams were resumed in {stage.wanted} kills")
    p99 = percentile(times, 0.99)
    if p99 is not None:
        stage.figures["resumed p99 ms"] = round(p99)
        stage.must(limit_ms is None or p99 <= limit_ms, f"resume p99 {p99:.0f} ms, allowed: {limit_ms} ms")


PHASES = ("accept", "queue", "prefill", "decode", "last")
POLICIES = ("cancel", "cancel", "continue", "grace:1")
TOKENS, DECODED = 220, 50
"""What is left after so many takes longer than any grace time, also for a client that reads late."""
SLOTS = 8
MAX_CANCEL_S = bound("chaos.cancelled")
"""From the leaving (and the grace time) to the end of the work."""


async def f08(stage: FaultTestbed) -> None:
    """Each phase, with each policy, several at once."""
    environ = {"PENSTOCK_SIM_SLOTS": str(SLOTS), "PENSTOCK_WORKER_PREFETCH": "0", "PENSTOCK_SIM_PREFILL_MS": "400"}
    async with stage.cluster(workers=1, environ=environ) as cluster:
        turn = 0
        while stage.trials < stage.wanted and stage.missed <= stage.row.most_missed:
            turn += 1
            for phase in PHASES:
                # In the queue: every slot is taken by jobs that outlast the leaving.
                hogs = [Ask(f"hog {turn} {n}", 300, chat=False) for n in range(SLOTS)] if phase == "queue" else []
                begun = cluster.begin(hogs)
                await cluster.all_begun(begun)
                await asyncio.gather(*(_leave(stage, cluster, phase, policy, n) for n, policy in enumerate(POLICIES)))
                await cluster.finish(begun)


async def _leave(stage: FaultTestbed, cluster: PenstockCluster, phase: str, policy: str, number: int) -> None:
    mark = f"{phase} {stage.trials} {number} {policy}"
    ends = ("completed",) if policy == "continue" else ("cancelled",)
    may = ("cancelled", "completed") if phase == "last" else ends
    told = cluster.clients.tell(
        Ask(mark, TOKENS, may=may, reads=False, queue={"on_disconnect": policy}, metadata={"mark": mark})
    )
    port = cluster.ports[number % 2]
    exchange = await Exchange.begin(port, "POST", told.ask.path, told.ask.body)
    reached = await _until_phase(exchange, phase)
    stage.fault(f"leaves at {phase}, {policy}")
    exchange.close()
    cluster.history.add("left", req=told.req)
    left = time.time()
    view = await _judge(stage, cluster, told.req, mark, policy, left)
    stage.bit(reached and was_in(phase, view, left), f"it did not leave in {phase}")


async def _until_phase(exchange: Exchange, phase: str) -> bool:
    """Go on reading until then; False: the stream was over before. In the queue and in prefill nothing has come yet:
    only time tells."""
    if phase in ("queue", "prefill"):
        await asyncio.sleep(0.2)
    if phase in ("decode", "last"):
        await exchange.answer()
        seen = 0
        async for _ in exchange.blocks():
            seen += 1
            if seen == (DECODED if phase == "decode" else TOKENS):
                return True
        return False
    return True


def was_in(phase: str, view: Mapping[str, Any], left: float) -> bool:
    """Whether a job was in this phase when its client left (Unix time), by what the job itself says afterwards. One
    that was never accepted is none; whether the last token is the end cannot be seen from outside."""
    times = ("created_at", "started_at", "first_token_at", "completed_at")
    accepted, begun, first, ended = (view.get(name) or math.inf for name in times)
    match phase:
        case "accept":
            return accepted > left
        case "last":
            return first <= left
        case "queue":
            return bool(view) and begun > left
        case "prefill":
            return begun <= left < first
        case "decode":
            return first <= left < ended
    raise ValueError(phase)


async def _judge(
    stage: FaultTestbed, cluster: PenstockCluster, req: int, mark: str, policy: str, left: float
) -> dict[str, Any]:
    """The job as it says it ended, found by what it was marked with; one that never came to be is none."""
    found: list[str] = []

    async def is_listed() -> bool:
        found.extend(await _marked(cluster, mark))
        return bool(found)

    if not await becomes(is_listed, 1.5, 0.05):
        stage.must(mark.startswith("accept"), f"no job was ever there for {mark!r}")
        return {}
    cluster.history.add("accepted", req=req, job=found[0], status=200, ms=0)
    if policy == "continue":
        await cluster.clients.read_finally(found[0])
        return await cluster.view(found[0])
    grace = 1.0 if policy.startswith("grace") else 0.0
    stage.must(await becomes(lambda: _end_of(cluster, found[0]), 10, 0.1), f"{mark!r}: still at work after 10 s")
    spent = await _end_of(cluster, found[0]) - left - grace
    key = "left to cancelled s, worst"
    stage.figures[key] = max(float(stage.figures.get(key, 0)), round(spent, 2))
    stage.must(
        spent <= MAX_CANCEL_S, f"{mark!r}: work ended {spent:.2f} s after the leaving, allowed: {MAX_CANCEL_S} s"
    )
    await cluster.clients.read_finally(found[0])
    return await cluster.view(found[0])


async def _marked(cluster: PenstockCluster, mark: str) -> list[str]:
    try:
        _, _, body = await fetch(cluster.ports[0], "GET", "/v1/jobs?limit=30")
    except Cut:
        return []
    return [view["id"] for view in msgspec.json.decode(body)["data"] if view["metadata"].get("mark") == mark]


async def _end_of(cluster: PenstockCluster, job: str) -> float:
    """When it ended, in Unix seconds; 0 while it has not."""
    return float((await cluster.view(job))["completed_at"] or 0)


SEND_TIMEOUT_S = 10.0
MAX_LATE_S = bound("chaos.cut_late")
FULL_S = 14.0
"""Until every buffer between a slow reader and the process is full, about."""
STEP_MS = 20
OTHERS = 8
WAVES = 3
"""Crowds, one after the other. The slowest 1 % of the gaps come from three engine steps, so one pause of the machine
decides the figure; three crowds show its spread."""
BUFFER = 4096
MAX_RSS_BYTES = int(bound("chaos.slow_reader") * 1024)


@dataclass(frozen=True, slots=True)
class Wave:
    """What one crowd of slow readers did to the others, beside the same work that nobody reads slowly."""

    others_ms: float
    """99th percentile of the time between two tokens of the others."""
    undisturbed_ms: float
    bare_ms: float
    """99th percentile of a bare server's answers, beside the crowd and, next, without it."""
    bare_undisturbed_ms: float
    cut_s: tuple[float, ...]
    each: float
    """Bytes of memory the API process took for each reader."""


async def f09(stage: FaultTestbed) -> None:
    """Crowds of readers that stall at once, beside eight that do not; the others must not notice."""
    environ = {"PENSTOCK_SIM_STEP_MS": str(STEP_MS), "PENSTOCK_API_SEND_TIMEOUT_S": str(SEND_TIMEOUT_S)}
    async with stage.cluster(apis=1, workers=1, environ=environ) as cluster, yardstick(stage) as bare_ms:
        crowd = stage.wanted // WAVES
        warm = cluster.begin([Ask(f"warm {n}", 20) for n in range(crowd)])
        await asyncio.gather(*(task for _, task in warm))
        await cluster.finish(warm)
        # One reader shows how long the buffers take to fill; a crowd must be cut as timely as that one.
        alone_s = await _stall(stage, cluster, "alone", takes_some=False)
        waves = [await _wave(stage, cluster, f"{wave}", crowd, bare_ms) for wave in range(WAVES)]
    spent = [each for wave in waves for each in wave.cut_s]
    late = max(abs(each - alone_s) for each in spent)
    stage.must(late <= MAX_LATE_S, f"slow readers were cut up to {late:.1f} s off the time, allowed: {MAX_LATE_S} s")
    stage.must(min(spent) >= SEND_TIMEOUT_S, f"a slow reader was cut after {min(spent):.1f} s")
    most = max(wave.each for wave in waves)
    stage.must(most <= MAX_RSS_BYTES, f"{most / 1024:.0f} KiB for each slow reader, allowed: {MAX_RSS_BYTES // 1024}")
    stage.figures |= {
        "memory each KiB": round(most / 1024, 1),
        "others' gap p99 ms": _listed(wave.others_ms for wave in waves),
        "undisturbed p99 ms": _listed(wave.undisturbed_ms for wave in waves),
        "bare server, p99 ms": _listed(wave.bare_ms for wave in waves),
        "bare server, undisturbed": _listed(wave.bare_undisturbed_ms for wave in waves),
        "cut after s, worst": round(max(spent), 1),
        "cut after s, one alone": round(alone_s, 1),
    }
    for wave in waves:
        allowed = 1.1 * wave.undisturbed_ms + PASSES * max(0.0, wave.bare_ms - wave.bare_undisturbed_ms)
        stage.must(wave.others_ms <= allowed, f"others' p99 {wave.others_ms:.1f} ms, allowed: {allowed:.1f} ms")


async def _wave(stage: FaultTestbed, cluster: PenstockCluster, name: str, crowd: int, bare_ms: list[float]) -> Wave:
    unread = cluster.begin([Ask(f"unread {name} {n}", 500, chat=False, reads=False) for n in range(crowd)])
    undisturbed, bare_then = await _others(cluster, f"undisturbed {name}", bare_ms)
    await cluster.finish(unread)
    before = rss_bytes(cluster.apis[0].pid)
    slow = [asyncio.create_task(_stall(stage, cluster, f"{name} {n}", takes_some=n % 2 == 1)) for n in range(crowd)]
    await asyncio.sleep(FULL_S)
    beside = asyncio.create_task(_others(cluster, f"beside {name}", bare_ms))
    most = before
    while not beside.done():
        most = max(most, rss_bytes(cluster.apis[0].pid))
        await asyncio.sleep(0.1)
    disturbed, bare_now = await beside
    spent = await asyncio.gather(*slow)
    return Wave(disturbed, undisturbed, bare_now, bare_then, tuple(spent), (most - before) / (crowd + OTHERS))


def _listed(figures: Iterable[float]) -> str:
    return " / ".join(f"{each:.1f}" for each in figures)


async def _others(cluster: PenstockCluster, name: str, bare_ms: list[float]) -> tuple[float, float]:
    """p99 of the time between two tokens of some readers, and of the bare server's answers meanwhile, in ms."""
    bare_ms.clear()
    begun = cluster.begin([Ask(f"{name} {n}", 300) for n in range(OTHERS)])
    await asyncio.gather(*(task for _, task in begun))
    await cluster.finish(begun)
    requests = {told.req for told, _ in begun}
    gaps = []
    for req, life in lives_of(cluster.history.events).items():
        if req in requests:
            gaps += [b["t"] - a["t"] for a, b in itertools.pairwise(life.of("token"))]
    bare = percentile(sorted(bare_ms), 0.99) or 0.0
    return 1000 * (percentile(sorted(gaps), 0.99) or 0.0), bare


async def _stall(stage: FaultTestbed, cluster: PenstockCluster, name: str, *, takes_some: bool) -> float:
    """Ask, then read 100 B/s, or nothing; seconds to the end of its work, which is looked at only then."""
    told = cluster.clients.tell(Ask(f"slow {name}", 6000, may=("cancelled",), reads=False))
    exchange = await Exchange.begin(cluster.ports[0], "POST", told.ask.path, told.ask.body, receive_buffer=BUFFER)
    with suppress(Cut):
        await exchange.answer()
    job = exchange.headers["x-job-id"]
    cluster.history.add("accepted", req=told.req, job=job, status=exchange.status, ms=0)
    stage.fault("reads 100 B/s" if takes_some else "reads nothing")
    sipping = asyncio.create_task(_sip(exchange)) if takes_some else None
    await asyncio.sleep(FULL_S + SEND_TIMEOUT_S + MAX_LATE_S)
    state = await cluster.clients.read_finally(job, patience_s=1.0)
    if sipping:
        sipping.cancel()
    exchange.close()
    stage.must(state == "cancelled", f"the job of slow reader {name} ended {state!r}")
    view = await cluster.view(job)
    return float((view["completed_at"] or time.time()) - view["created_at"])


async def _sip(exchange: Exchange) -> None:
    while await exchange.sip(100):  # noqa: ASYNC110 - a slow reader's pace
        await asyncio.sleep(1.0)


BATCH = 64
COPIES = 50
EXPIRED_IN_QUEUE = 408
POISON_MODELS = ("m1", "m2", "m3", "m4")


async def f11(stage: FaultTestbed) -> None:
    """Each model gets one request that kills its engine, among 63 that do not."""
    faults = {"PENSTOCK_SIM_FAULTS": "true", "PENSTOCK_SIM_STEP_MS": "5"}
    async with stage.cluster(models=POISON_MODELS, workers=2, environ=faults) as cluster:
        for turn in range(-(-stage.wanted // len(POISON_MODELS))):
            await asyncio.gather(*(_poison(stage, cluster, model, turn) for model in POISON_MODELS))
        crashes = sum(worker.exits.count(-signal.SIGKILL) for worker in cluster.workers)
        letters = await _dead_letters(cluster)
    stage.figures["engine crashes"] = crashes
    stage.must(crashes <= 3 * stage.trials, f"{crashes} crashes for {stage.trials} poison requests, allowed: 3 each")
    poisons = {event["job"] for event in of_kind(stage.history.events, "final") if event["code"] == "poison"}
    stage.must(len(poisons) == stage.trials, f"{len(poisons)} jobs failed as poison, expected {stage.trials}")
    stage.must(letters.count('"reason":"poison"') == stage.trials, "not exactly one dead letter for each poison")
    stage.must("crash@" not in letters, "a dead letter shows the prompt")


async def _poison(stage: FaultTestbed, cluster: PenstockCluster, model: str, turn: int) -> None:
    name = f"{model} turn {turn}"
    stage.fault(f"poison, {name}")
    poison = Ask(f"[[crash@{5 + turn}]] {name}", 30, chat=False, may=("failed",), model=model)
    mates = [Ask(f"{name} mate {n}", 30, chat=n < 8, reads=False, model=model) for n in range(BATCH - 1)]
    await cluster.finish(cluster.begin([poison, *mates]))


async def _dead_letters(cluster: PenstockCluster) -> str:
    _, _, body = await fetch(cluster.ports[0], "GET", "/admin/dlq?limit=100")
    return body.decode()


async def f13(stage: FaultTestbed) -> None:
    """The same key fifty times at once, once more after a lost answer, and with another body."""
    async with stage.cluster(workers=2) as cluster:
        for number in stage.tries():
            key, loses = f"key {number}", stage.trials % 4 > 1
            ask = Ask(f"once, {key}", 20, chat=stage.trials % 2 == 0, key=key)
            headers = {"Idempotency-Key": key}
            if loses:  # the first answer is lost: the client goes before it has read it
                lost = await Exchange.begin(cluster.ports[0], "POST", ask.path, ask.body, headers)
                await asyncio.sleep(stage.rng.uniform(0, 0.1))
                lost.close()
            again = time.time()
            stage.fault(f"{COPIES} times {key}")
            # The other tenant means another job by the same key.
            theirs = replace(ask, prompt=f"theirs, {key}", tenant=SECOND)
            begun = cluster.begin([*[ask] * COPIES, theirs])
            await cluster.finish(begun)
            other = Ask(f"something else, {key}", 20, chat=ask.chat)
            status, _, body = await fetch(cluster.ports[1], "POST", other.path, other.body, headers)
            stage.must(status == 422, f"another body with {key} was answered {status}: {body[:80]!r}")
            met = [told.job for told, _ in begun[:COPIES] if told.job]
            before = again if loses else math.inf
            stage.bit(
                len(met) > 1 and float((await cluster.view(met[0]))["created_at"]) < before,
                "the key was not known when it came again",
            )
        jobs = await _count_jobs(cluster)
    stage.figures["jobs"] = jobs
    keys = stage.trials + stage.missed
    stage.must(jobs == keys, f"{jobs} jobs for {keys} keys")


async def _count_jobs(cluster: PenstockCluster) -> int:
    count, cursor = 0, ""
    while True:
        _, _, body = await fetch(cluster.ports[0], "GET", f"/v1/jobs?limit=100{cursor}")
        page = msgspec.json.decode(body)
        count += len(page["data"])
        if not page["has_more"]:
            return count
        cursor = f"&cursor={page['next_cursor']}"


async def f16(stage: FaultTestbed) -> None:
    """Two slots, both taken: what may wait 300 ms expires unbegun; what runs is stopped at its deadline."""
    environ = {"PENSTOCK_SIM_SLOTS": "12", "PENSTOCK_WORKER_PREFETCH": "0"}
    async with stage.cluster(workers=1, environ=environ) as cluster:
        for turn in stage.tries():
            limits = {"deadline_ms": 1000}
            running = [Ask(f"stopped {turn} {n}", 900, queue=limits, may=("expired",)) for n in range(12)]
            begun = cluster.begin(running)
            await cluster.all_begun(begun)
            limits = {"max_queue_ms": 300}
            waiting = [
                Ask(f"unbegun {turn} {n}", 50, n % 2 == 0, queue=limits, may=("expired",), retries=False)
                for n in range(12)
            ]  # refused if the wait is known to be longer; asked again, it would come when slots are free
            for _ in range(24):
                stage.fault("a deadline")
            begun += cluster.begin(waiting)
            await cluster.finish(begun)
            for number, (told, _) in enumerate(begun):
                await _judge_expiry(stage, cluster, told.job, begun=number < 12)
                stage.bit(has_expired(told, begun=number < 12), "a job was not begun, or did not expire")


def has_expired(told: ClientView, *, begun: bool) -> bool:
    """Whether a request's time was over: after its reader was shown a token, or before, and so perhaps refused."""
    if begun:
        return told.shown > 0 and told.state == "expired"
    return told.state == "expired" or told.refused == EXPIRED_IN_QUEUE


async def _judge_expiry(stage: FaultTestbed, cluster: PenstockCluster, job: str, *, begun: bool) -> None:
    if not job:
        return  # refused or expired without an id: the client was told, and the checker has seen it
    view = await cluster.view(job)
    if begun:
        over = view["completed_at"] - view["created_at"] - 1.0
        stage.must(over <= 0.5, f"{job} ran {over:.2f} s past its deadline, allowed: 0.5 s")
    else:
        stage.must(view["started_at"] is None, f"{job} was begun although its time in the queue was over")


async def f22(stage: FaultTestbed) -> None:
    """Cancels at random moments of queued, running and just finished jobs, twice, at both API processes."""
    environ = {"PENSTOCK_SIM_SLOTS": "6", "PENSTOCK_WORKER_PREFETCH": "1"}
    may = ("completed", "cancelled")
    async with stage.cluster(workers=2, environ=environ) as cluster:
        for turn in range(-(-stage.wanted // 20)):
            asks = [
                Ask(f"cancel {turn} {n}", 40, n % 2 == 0, may=may, reads=n % 4 != 3, tenant=TENANTS[n // 10])
                for n in range(20)
            ]
            begun = cluster.begin(asks)
            await asyncio.gather(*(_cancel(stage, cluster, told) for told, _ in begun))
            await cluster.finish(begun)
        ends = [event["state"] for event in of_kind(stage.history.events, "final")]
    for state in may:
        stage.figures[state] = ends.count(state)
        stage.must(
            ends.count(state) >= stage.wanted // 10, f"only {ends.count(state)} jobs were {state}: no race was run"
        )


async def _cancel(stage: FaultTestbed, cluster: PenstockCluster, told: ClientView) -> None:
    after, at_end = stage.rng.uniform(0, 1.0), stage.rng.random() < 0.3
    await told.accepted.wait()
    if at_end:
        await becomes(lambda: told.shown >= told.ask.tokens - 1 or told.state, after + 1.0, 0.001)
    else:
        await asyncio.sleep(after)
    if told.job:
        await cluster.clients.try_as_other(told.job, cluster.ports[0], *CANCEL)
        stage.fault("cancel, twice")
        await asyncio.gather(*(cluster.clients.cancel(told.job, port) for port in cluster.ports))


async def f24(stage: FaultTestbed) -> None:
    """What is no job lies in the lanes, between jobs that are."""
    async with stage.cluster(workers=2) as cluster:
        prefix, redis = partition_prefix(0), cluster.wire.redis
        lane = f"{prefix}lane:sim:interactive"
        for trial in range(stage.wanted):
            begun = cluster.begin([Ask(f"beside {trial} {n}", 40, n % 2 == 0) for n in range(4)])
            stage.fault("alien entries")
            noise = stage.rng.randbytes(64)
            await redis.xadd(lane, {noise: noise})
            await redis.xadd(lane, {"job": "job_00" + "0" * 30, "more": "x"})
            await redis.xadd(lane, {"version": "0", "payload": "x" * (10_000_000 if trial == 0 else 1000)})
            await _old_schema(cluster, lane, prefix, trial)
            await cluster.finish(begun)
        expected = 4 * stage.wanted

        async def all_buried() -> bool:
            return int(await redis.xlen(f"{prefix}dead")) >= expected

        await becomes(all_buried, 10, 0.1)
        letters = await redis.xlen(f"{prefix}dead")
        exits = [list(worker.exits) for worker in cluster.workers]
    stage.figures["dead letters"] = letters
    stage.must(letters == expected, f"{letters} dead letters for {expected} entries that are no jobs")
    stage.must(not any(exits), f"workers ended: {exits}")


_PUT_OLD = """
local entry = redis.call('XADD', KEYS[1], '*', 'job', ARGV[1])
redis.call('HSET', KEYS[2], 'lane', KEYS[1], 'entry', entry, unpack(ARGV, 2))
"""


async def _old_schema(cluster: PenstockCluster, lane: str, prefix: str, trial: int) -> None:
    """A job whose body nobody can read any more: it must end, as failed."""
    await put_raw(cluster.wire.redis, lane, prefix, f"job_00{trial:030x}", b"\x93old")


async def put_raw(redis: Any, lane: str, prefix: str, job: str, body: bytes) -> None:
    """A job with any body, as if a process had put it."""
    fields: dict[str, str | bytes | int] = {
        "state": "queued",
        "body": body,
        "tenant": "first",
        "model": "sim",
        "priority": "interactive",
        "reply": "",
        "attempt": 0,
        "losses": 0,
        "created": 1,
        "keep": 60,
        "runs": "",
    }
    flat = [part for pair in fields.items() for part in pair]
    await cast(Any, redis.eval(_PUT_OLD, 2, lane, f"{prefix}job:{job}", job, *flat))
