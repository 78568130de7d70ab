"""Verdict: decides from the state of the deployment whether jobs flow, what is wrong, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias
from urllib.parse import quote

from penstock.text import counted

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
    lapsed: int = 0
    """Workers whose lease ran out in the last minute."""
    failed: int = 0
    """Jobs that failed in the last minute."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The state in one word and one sentence, and its problems, the worst first."""

    flow: Flow
    title: str
    problems: tuple[ServiceProblem, ...]


def assess(now: Situation) -> Verdict:
    """Decide what is wrong now."""
    order = ("error", "warning", "note")
    problems = tuple(sorted(_problems(now), key=lambda problem: order.index(problem.severity)))
    late = next((problem for problem in problems if problem.delays), None)
    if late is None:
        return Verdict("flowing", "Flowing: jobs start as soon as there is room for them.", problems)
    if late.severity == "error":
        return Verdict("stopped", f"Stopped: {late.title}.", problems)
    return Verdict("behind", f"Falling behind: {late.title}.", problems)


def _problems(now: Situation) -> Iterator[ServiceProblem]:
    if now.store_refusal:
        cause, fix = now.store_refusal, "penstock doctor shows the reason and the fix"
        yield ServiceProblem("error", "the store takes no new jobs", cause, fix, delays=True)
    elif now.memory_share is not None and now.memory_share >= NEARLY_FULL:
        cause = f"{now.memory_share:.0%} of the memory that jobs may use is taken"
        yield ServiceProblem(
            "note", "the store is nearly full", cause, "raise maxmemory, or shorten [redis] retention_s"
        )
    for pool in now.pools:
        yield from _of_pool(pool)
    if not now.has_leader:
        cause, fix = "no scheduler leads, so nobody changes the number of workers", "penstock ps; start a scheduler"
        yield ServiceProblem("note", "no scheduler leads", cause, fix)
    if now.lapsed:
        title = f"{counted(now.lapsed, 'worker')} lost in the last minute"
        cause, fix = "a lease ran out; the jobs continue elsewhere", "penstock logs --role worker shows why"
        yield ServiceProblem("warning", title, cause, fix, "/models")
    if now.failed:
        title = f"{counted(now.failed, 'job')} failed in the last minute"
        yield ServiceProblem("note", title, "see the error of each", "open them", "/jobs?status=failed&tenant=*")
    if now.dead_letters:
        title = f"{counted(now.dead_letters, 'dead letter')} to look at"
        yield ServiceProblem("note", title, "jobs that were given up", "replay or drop them", "/dead-letters")


def _of_pool(pool: Mapping[str, Any]) -> Iterator[ServiceProblem]:
    model, lanes = pool["model"], pool["lanes"]
    waiting = sum(lane["waiting"] for lane in lanes.values())
    link = f"/jobs?status=queued&tenant=*&model={quote(model, safe='')}"
    away = [worker for worker in pool["workers"] if worker["away"] and worker["state"] == "ready"]
    if away and len(away) == pool["ready"]:
        yield _without_server(model, max(away, key=lambda worker: float(worker["away_s"])), waiting, link)
    elif (stalled := pool.get("stalled")) and (waiting or pool["override"] is None):
        yield _stalled(model, stalled, waiting, link)
    elif waiting and not pool["ready"]:
        yield _without_worker(pool, waiting, link)
    elif not pool["ready"] and (pool["want"] or 0) > 0:
        cause = f"{counted(pool['want'], 'worker')} wanted, {pool['starting']} starting; a job put now waits for one"
        fix = "nothing, if it has just started; else penstock logs --role worker"
        yield ServiceProblem("warning", f"no worker of {model} runs yet", cause, fix, "/models")
    else:
        for name, limit_s in PATIENCE_S.items():
            lane = lanes[name]
            if lane["waiting"] and lane["oldest_s"] > limit_s:
                cause = f"the oldest of {counted(lane['waiting'], 'job')} waits {lane['oldest_s']:.0f} s"
                title = f"lane {name} of {model} is behind"
                said = f"{cause}; {pool['reason'] or 'no plan yet'}"
                yield ServiceProblem("warning", title, said, _more(pool), link, delays=True)
    for worker in pool["workers"]:
        if worker["cordon"]:
            title = f"{worker['id']} takes no more jobs"
            yield ServiceProblem("note", title, worker["cordon"], "it is replaced when its jobs have ended", "/models")
    if pool["override"] is not None:
        by, paused = pool["override"]["by"] or "an operator", pool["override"]["paused"]
        what = "scaling is paused" if paused else f"the number of workers is set to {pool['override']['want']}"
        yield ServiceProblem("note", f"{model}: {what}", f"by {by}", f"penstock scale resume {model}", "/models")


def _without_server(model: str, worker: Mapping[str, Any], waiting: int, link: str) -> ServiceProblem:
    """That none of a model's servers (engine `upstream`) is there: more workers would change nothing."""
    servers = worker["away"]
    one = len(servers) == 1
    name, verb, it = ("the server", "has", "it") if one else ("all servers", "have", "them")
    title = f"{name} of {model} {verb} been away for {worker['away_s']:.0f} s: {'; '.join(servers)}"
    cause = f"{counted(waiting, 'job')} of {model} waiting; jobs are kept until {'it' if one else 'one'} is back"
    fix = f"start {it}, or correct the address: penstock doctor -v"
    return ServiceProblem("error", title, cause, fix, link, delays=True)


def _stalled(model: str, stalled: Mapping[str, str], waiting: int, link: str) -> ServiceProblem:
    """That no worker can ever run a model's jobs as things are."""
    cause, fix = stalled["cause"], stalled["fix"]
    if waiting:
        verb = "waits" if waiting == 1 else "wait"
        title = f"{counted(waiting, 'job')} of {model} {verb} and no worker runs or may start"
        return ServiceProblem("error", title, cause, fix, link, delays=True)
    return ServiceProblem("note", f"no worker of {model} may run, so a new job would wait", cause, fix, "/models")


def _without_worker(pool: Mapping[str, Any], waiting: int, link: str) -> ServiceProblem:
    """Why no worker serves a model whose jobs wait."""
    model, jobs = pool["model"], counted(waiting, "job")
    if pool["starting"]:
        phase = next((worker["phase"] for worker in pool["workers"] if worker["phase"]), "it loads the model")
        left = f"about {pool['wake_s']:.0f} s left" if pool["wake_s"] else phase
        return ServiceProblem(
            "warning", f"{jobs} of {model} wait for a worker to start", left, "nothing", link, delays=True
        )
    title = f"{jobs} of {model} wait and no worker runs"
    cause = pool["reason"] or "the scheduler has not decided yet"
    return ServiceProblem(
        "error", title, cause, "penstock logs --role worker: does it crash at its start?", link, delays=True
    )


def _more(pool: Mapping[str, Any]) -> str:
    """How to get more workers."""
    model = pool["model"]
    if pool["override"] is not None:
        return f"penstock scale resume {model}"
    if pool["want"] is not None and pool["want"] >= pool["max"]:
        return f"raise max_workers of [models.{model}] (now {pool['max']})"
    return "more workers are on their way, if the plan wants them"
