"""Waits: how long a waiting job is expected to wait, how well past estimates held, and what clients were told."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, TypeAlias

from api.openai.errors import Wait
from penstock.loops import ExpectedErrors, run_periodically
from streaming.errors import Unavailable
from streaming.fleet.plans import Plan, Stall
from streaming.fleet.process import Process
from streaming.jobs.job import Job, JobState
from streaming.jobs.reader import JobReader
from streaming.jobs.records import JobRecord
from streaming.order import HIGHER, Priority

# Waits are compared as ratios, r(a, b) = (a + 1 s) / (b + 1 s): the second makes the ratio defined for a prediction of
# zero, and keeps a few milliseconds from counting as a large error. The median of the latest r(measured, predicted)
# corrects the next prediction. The 10 % and 90 % quantiles of r(measured, told) are its band: they are of what clients
# were told, so a correction that lags behind a changing load widens the band.
#
# A job that expires in the queue gives a bound: it would have waited longer. A bound takes part as in the estimator
# of Kaplan and Meier (1958): its share goes to the waits above it. Where too many are bounds for a quantile, the
# largest ratio stands for it: at least 1 for the median, at least 1 / TRUSTED_FACTOR for the low end.


LEARNED_S = 900.0
"""Older errors are forgotten."""
MAX_ERRORS = 128
"""Errors kept for each source."""
LATEST = 16
"""Of these, the ones that correct a prediction: few, to follow a changing load."""
MIN_ERRORS = 20
"""With fewer errors there is no band: two of them lie outside it on average."""
OFFSET_S = 1.0
TRUSTED_FACTOR = 10
"""A wait that no measured one contradicts is at least the predicted one divided by this. The plan is made of the
mean size of jobs and the mean pace of slots; allowing each to be wrong by three, it is wrong by about ten."""
LOW, HIGH = 0.1, 0.9

Estimator: TypeAlias = Literal["plan", "rate"]
"""The scheduler's plan, or this process's completion rate."""


class EstimateSource(NamedTuple):
    """What a prediction is about and how it was made: errors are comparable only within one source."""

    model: str
    lane: Priority
    estimator: Estimator
    limited: bool = False
    """Of jobs with a time limit, which the order of the queue may prefer."""

    @classmethod
    def of(cls, job: Job, estimator: Estimator) -> EstimateSource:
        limited = job.max_queue_ms is not None or job.deadline_ms is not None
        return cls(job.model, job.priority, estimator, limited)


class Prediction(NamedTuple):
    """A wait as an estimator predicts it, not corrected."""

    source: EstimateSource
    seconds: float


class _Error(NamedTuple):
    """How one prediction held."""

    learned: float
    of_predicted: float
    """The measured wait over the predicted one."""
    of_told: float
    bound: bool
    """It ended in the queue: both ratios would be larger."""


class WaitErrors:
    """The latest errors of each source, in one process; bounded by models times lanes times four."""

    def __init__(self) -> None:
        self._kept: defaultdict[EstimateSource, deque[_Error]] = defaultdict(lambda: deque(maxlen=MAX_ERRORS))
        self._factors: dict[EstimateSource, tuple[float, float | None, float | None]] = {}
        """What a prediction is multiplied by, and then the ends of its band."""

    def learn(self, prediction: Prediction, told: Wait, waited_s: float, *, bound: bool = False) -> None:
        """Add a measured wait, and what its client was told. `bound`: the job would have waited longer."""
        now, kept = time.monotonic(), self._kept[prediction.source]
        of_predicted = (waited_s + OFFSET_S) / (prediction.seconds + OFFSET_S)
        of_told = (waited_s + OFFSET_S) / (told.eta_ms / 1000 + OFFSET_S)
        kept.append(_Error(now, of_predicted, of_told, bound))
        while kept[0].learned < now - LEARNED_S:
            kept.popleft()
        latest = sorted((each.of_predicted, each.bound) for each in list(kept)[-LATEST:])
        middle, low, high = _quantile(latest, 0.5) or max(1.0, latest[-1][0]), None, None
        if len(kept) >= MIN_ERRORS:
            ordered = sorted((each.of_told, each.bound) for each in kept)
            low = _quantile(ordered, LOW) or max(1 / TRUSTED_FACTOR, ordered[-1][0])
            high = _quantile(ordered, HIGH)
        self._factors[prediction.source] = middle, low, high

    def wait(self, prediction: Prediction) -> Wait:
        """Correct a prediction, with its band if enough errors are known."""
        kept = self._kept[prediction.source]
        is_known = kept and kept[-1].learned >= time.monotonic() - LEARNED_S
        middle, low, high = self._factors[prediction.source] if is_known else (1.0, None, None)
        eta_s = _scaled(prediction.seconds, middle)
        if low is None:
            return Wait(int(1000 * eta_s))
        low_s, high_s = _scaled(eta_s, low), math.inf if high is None else _scaled(eta_s, high)
        eta_s = min(max(eta_s, low_s), high_s)
        return Wait(int(1000 * eta_s), int(1000 * low_s), None if high is None else int(1000 * high_s))


def _scaled(seconds: float, factor: float) -> float:
    return max(0.0, (seconds + OFFSET_S) * factor - OFFSET_S)


def _quantile(ordered: list[tuple[float, bool]], share: float) -> float | None:
    """The quantile of sorted ratios and whether they are bounds, interpolated; None if too many are bounds."""
    if not any(bound for _, bound in ordered):
        place = share * (len(ordered) - 1)
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below][0] + (place - below) * (ordered[above][0] - ordered[below][0])
    longer = 1.0
    for place, (ratio, bound) in enumerate(ordered):
        longer *= 1.0 if bound else 1 - 1 / (len(ordered) - place)
        if longer <= 1 - share + 1e-9:
            return ratio
    return None


STALE_S = 10.0
"""A plan or a report of a worker that is older than this is ignored."""
WAITING = "waiting for its server"
"""State of a worker that is ready, none of whose servers are there."""


class WorkerReadiness:
    """Readiness of each model's workers, from their reports."""

    def __init__(self) -> None:
        self._states: Mapping[str, Counter[str]] = {}
        """How many workers of each model are in each state."""
        self._stalls: Mapping[str, Stall] = {}
        self._read = -math.inf
        self._ready: dict[str, float] = {}
        """When a worker of each model was last seen ready, else when this process first looked; monotonic time."""

    def learn(self, workers: Iterable[Process], stalls: Mapping[str, Stall] | None = None) -> None:
        """Store the reports of all workers, and which models are stalled."""
        states: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for worker in workers:
            states[worker.model][WAITING if worker.away and worker.state == "ready" else worker.state] += 1
        self._states, self._stalls, self._read = states, stalls or {}, time.monotonic()
        self._ready |= {model: self._read for model, found in states.items() if "ready" in found}

    @property
    def _is_fresh(self) -> bool:
        return time.monotonic() - self._read <= STALE_S

    def missing_s(self, model: str) -> float:
        """For how many seconds no worker of this model has been ready, as far as this process knows."""
        now = time.monotonic()
        return now - self._ready.setdefault(model, now)

    def ready(self, model: str) -> int:
        """How many workers of the model are ready; 0 if that is not known."""
        return self._states[model]["ready"] if self._is_fresh and model in self._states else 0

    @property
    def stalled(self) -> dict[str, str]:
        """By model, why no worker may run its jobs; of stalled models only."""
        return {model: stall.cause for model, stall in self._stalls.items()} if self._is_fresh else {}

    def problem(self, model: str) -> str:
        """Why no worker can claim a job of this model now; "" if one can, or if it is not known."""
        if not self._is_fresh:
            return ""
        if stall := self._stalls.get(model):
            return f"no worker may run it: {stall.cause}"
        states = self._states.get(model, ())
        if "ready" in states:
            return ""
        found = ", ".join(f"one is {state}" for state in sorted(states)) or "none is running"
        return f"no worker is ready: {found}"


MAX_SHOWN = 10_000
"""Jobs remembered; the one not shown for longest is forgotten first."""


class ShownWaits:
    """The estimate that each waiting job was last shown with, in one process."""

    def __init__(self) -> None:
        self._shown: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """By job: its `eta_ms`, and the jobs that were ahead of it."""

    def settle(self, job_id: str, wait: Wait, ahead: int) -> Wait:
        """Return the wait to show: at most the last one, unless more jobs are ahead of the job than then.

        The upper end of the band is not held down: it shows if the job starts later than it was told.

        Args:
            ahead: Jobs of its own lane and of higher ones that are to start before it.
        """
        shown = self._shown.pop(job_id, None)
        eta_ms = wait.eta_ms if shown is None or ahead > shown[1] else min(wait.eta_ms, shown[0])
        self._shown[job_id] = (eta_ms, ahead)
        if len(self._shown) > MAX_SHOWN:
            self._shown.popitem(last=False)
        if eta_ms == wait.eta_ms:
            return wait
        return Wait(eta_ms, None if wait.low_ms is None else min(wait.low_ms, eta_ms), wait.high_ms)


class WaitLimit(NamedTuple):
    """The time that a request allows until its start.

    A request is refused if no worker would begin it at once, which the store finds out as it would accept it, and if
    the waits that were measured lately say so: nine of ten jobs with its estimate wait longer than its limit. Without
    enough measured waits, it is refused if the estimate is more than TRUSTED_FACTOR times the limit and no further
    worker is on its way. Without a fresh plan, or while the model sleeps (its first job wakes it), the request is
    accepted.
    """

    field: str
    ms: int


def limit_of(job: Job) -> WaitLimit | None:
    """Return the tighter limit of a job; None if it has none. The time to compute the answer is not counted."""
    limits = (("queue.max_queue_ms", job.max_queue_ms), ("queue.deadline_ms", job.deadline_ms))
    given = [WaitLimit(field, ms) for field, ms in limits if ms is not None]
    if not given or job.scheduled:
        return None  # of a scheduled one: by then others wait
    return min(given, key=lambda limit: limit.ms)


def exceeds(wait: Wait | None, limit: WaitLimit, *, settled: bool = False) -> bool:
    """Whether even the low end of the wait's band is longer than the limit. `settled`: no worker is on its way, so that
    an estimate without a band can be far too long."""
    if wait is None:
        return False
    if wait.low_ms is not None:
        return wait.low_ms > limit.ms
    return settled and wait.eta_ms > TRUSTED_FACTOR * limit.ms


FRESH_S = 3.0
"""No request is refused by a plan older than this."""
DEFAULT_RETRY_S = 5.0
"""Asked of a client if no wait is known."""
FULL_LANE_SHARE = 10
"""A full lane is worth a retry once one job in so many of it has started."""
RATE_WINDOW_S = 60.0
MAX_ENDS = 4096


class _ReadPlan(NamedTuple):
    """A plan, when it was made, and when this process saw last that the model should have more workers (both in
    monotonic time)."""

    plan: Plan
    made: float
    ordered: float


class PlanReader:
    """The plans that this process read last, and the waits that follow from them."""

    def __init__(self) -> None:
        self._plans: Mapping[str, _ReadPlan] = {}

    def learn(self, plans: Mapping[str, Plan], now_ms: int) -> None:
        """Store the plans, read at `now_ms` of Redis time."""
        before, now = self._plans, time.monotonic()
        self._plans = {
            model: _ReadPlan(
                plan,
                now - max(0, now_ms - plan.at_ms) / 1000,
                before[model].ordered if model in before and plan.want <= before[model].plan.want else now,
            )
            for model, plan in plans.items()
        }

    def fresh(self, model: str, most_s: float = STALE_S) -> Plan | None:
        """Return the plan that a scheduler has published for this model, unless it is older than `most_s` seconds."""
        known = self._plans.get(model)
        return known.plan if known is not None and time.monotonic() - known.made <= most_s else None

    def eta_ms(self, model: str, lane: Priority, before: int | None) -> int | None:
        """Return the milliseconds until a job with `before` others ahead of it in its lane starts; None: unknown.

        The plan holds the wait at the lane's end when it was made (`before` None: this one); each job more or less
        since then adds or removes the plan's time per job. A job never starts before the first worker is ready.
        """
        plan = self.fresh(model)
        prospect = plan.lanes.get(lane) if plan is not None else None
        if plan is None or prospect is None or prospect.wait_s is None:
            return None
        more = 0 if before is None else before - prospect.waiting
        behind_s = prospect.wait_s - plan.wake_s + more * prospect.each_s
        return int(1000 * (self._wake_s(model) + max(0.0, behind_s)))

    def _wake_s(self, model: str) -> float:
        """Return the seconds until the model's first worker is ready; 0 if one is, or was expected by now."""
        plan, made, _ = self._plans[model]
        # With zero workers wanted, this job causes the cold start, which has not begun; draining workers do not help.
        if not plan.want:
            return max(plan.wake_s, plan.cold_start_s)
        return max(0.0, plan.wake_s - (time.monotonic() - made)) if plan.wake_s else 0.0

    def expects_start(self, model: str, missing_s: float) -> bool:
        """Whether the model's first worker is still expected: not if it has not become ready within a cold start.

        Args:
            missing_s: seconds for which no worker of the model has been ready.
        """
        if model not in self._plans or self._wake_s(model) <= 0:
            return False
        plan, _, ordered = self._plans[model]
        return not plan.want or min(missing_s, time.monotonic() - ordered) <= max(plan.wake_s, plan.cold_start_s)

    def can_judge(self, model: str) -> bool:
        """Whether a plan is fresh, and workers are there or wanted. While the model sleeps, its first job wakes it."""
        plan = self.fresh(model, FRESH_S)
        return plan is not None and plan.want > 0

    def wanted(self, model: str) -> int:
        """How many workers the model should have; 0 without a plan."""
        return self._plans[model].plan.want if model in self._plans else 0

    def above(self, model: str, lane: Priority) -> int:
        """Return the jobs that waited in higher lanes when the plan was made."""
        lanes = self._plans[model].plan.lanes if model in self._plans else {}
        return sum([lanes[higher].waiting for higher in HIGHER[lane] if higher in lanes])


class CompletionRate:
    """Counts ended jobs by model, over the last RATE_WINDOW_S seconds."""

    def __init__(self) -> None:
        self._ends: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=MAX_ENDS))

    def ended(self, model: str) -> None:
        """Count a job that ended now."""
        self._ends[model].append(time.monotonic())

    def eta_ms(self, model: str, position: int) -> int | None:
        """Return the milliseconds until `position` more jobs have ended at the present rate; None if it is unknown."""
        ends, now = self._ends[model], time.monotonic()
        while ends and ends[0] < now - RATE_WINDOW_S:
            ends.popleft()
        if len(ends) < 2:
            return None
        per_second = len(ends) / max(now - ends[0], 0.001)
        return int(1000 * (position + 1) / per_second)


class WaitEstimates:
    """What this process tells its clients about waits. `partitions`: those of the store."""

    def __init__(self, partitions: int = 1) -> None:
        self.plans, self.completions = PlanReader(), CompletionRate()
        self.errors, self.shown, self.readiness = WaitErrors(), ShownWaits(), WorkerReadiness()
        self._partitions = partitions

    def predict(self, job: Job, before: int | None) -> Prediction | None:
        """Return the uncorrected wait of a job with `before` others ahead of it in its lane; None: unknown, also if no
        worker is ready and none is expected to be.

        Args:
            before: Of all partitions; None: all jobs of the lane.
        """
        estimator: Estimator = "plan" if self.plans.fresh(job.model) else "rate"
        if self.readiness.problem(job.model):
            missing_s = self.readiness.missing_s(job.model)
            if estimator == "rate" or not self.plans.expects_start(job.model, missing_s):
                return None
        if estimator == "plan":
            eta_ms = self.plans.eta_ms(job.model, job.priority, before)
        else:
            eta_ms = self.completions.eta_ms(job.model, before or 0)
        return None if eta_ms is None else Prediction(EstimateSource.of(job, estimator), eta_ms / 1000)

    def wait(self, job: Job, before: int | None = None) -> Wait | None:
        """Return the corrected wait of a job that is put now, with its band if that is known."""
        prediction = self.predict(job, before)
        return None if prediction is None else self.errors.wait(prediction)

    def wait_of(self, job: Job, position: int) -> Wait | None:
        """Return the wait to show for a waiting job: it rises only if more jobs are ahead of it than before."""
        found = self.show(job, position)
        return found and found[1]

    def show(self, job: Job, position: int) -> tuple[Prediction, Wait] | None:
        """Return the same with the prediction. `position` is in one partition: workers take from all of them alike."""
        prediction = self.predict(job, position * self._partitions)
        if prediction is None:
            return None
        ahead = position + self.plans.above(job.model, job.priority)
        return prediction, self.shown.settle(job.id, self.errors.wait(prediction), ahead)

    def has_all_workers(self, model: str) -> bool:
        """Whether no worker is on its way that could shorten a wait: the plan counts those that are ready."""
        return self.readiness.ready(model) >= self.plans.wanted(model)

    def retry(self, job: Job, position: int | None = None) -> tuple[float, int | None]:
        """Return in how many seconds to try again, and in how many milliseconds a job put now would start (None:
        unknown). `position`: of the last job of a full lane, in which it is worth a retry once a part has started."""
        now = sooner = self.wait(job)
        if position is not None:
            sooner = self.wait(job, position * self._partitions // FULL_LANE_SHARE)
        return (sooner.eta_ms / 1000 if sooner else DEFAULT_RETRY_S), now and now.eta_ms


log = logging.getLogger(__name__)

MAX_WATCHED = 32
"""Waiting jobs watched for each source."""
SAMPLE_INTERVAL_S = 1.0
"""Least time between two sampled jobs of one source, and between two looks."""
RECHECK_SHARE = 0.1
"""A job that still waits is looked at again after this share of its age."""
CLOCK_SLACK_S = 1.0
"""A wait that is longer by more than this than the job has been watched is not one: its record is corrupt, or the
store's clock was set."""


class _Watched(NamedTuple):
    """A sampled job: what was predicted and told, and when it was accepted and is looked at next (monotonic time)."""

    prediction: Prediction
    told: Wait
    since: float
    look_at: float


class WaitSampler:
    """Watches sampled jobs and teaches their waits to `errors`.

    It reads the record of a sampled job until the job has started. The record holds when the first worker claimed it,
    so a late look costs no accuracy. For each source it takes at most one job a second and watches MAX_WATCHED at once.
    """

    def __init__(self, reader: JobReader, errors: WaitErrors) -> None:
        self._reader, self._errors = reader, errors
        self.watched: dict[str, _Watched] = {}
        """The sampled jobs, by id."""
        self._sampled_at: dict[EstimateSource, float] = {}

    def note(self, job_id: str, prediction: Prediction, told: Wait, limit_ms: int | None = None) -> None:
        """Consider a job for the sample; it was accepted just now, and its client was told this wait. `limit_ms`: it
        expires then."""
        now, source = time.monotonic(), prediction.source
        if now - self._sampled_at.get(source, -math.inf) < SAMPLE_INTERVAL_S:
            return
        if sum(each.prediction.source == source for each in self.watched.values()) >= MAX_WATCHED:
            return
        self._sampled_at[source] = now
        ends_s = prediction.seconds if limit_ms is None else min(prediction.seconds, limit_ms / 1000)
        self.watched[job_id] = _Watched(prediction, told, now, now + max(SAMPLE_INTERVAL_S, ends_s))

    async def keep_measuring(self) -> None:
        """Look at the watched jobs for ever."""
        expected = ExpectedErrors(Unavailable, log.debug, "waits are not measured: %s")
        await run_periodically(self.look, SAMPLE_INTERVAL_S, expected)

    async def look(self) -> None:
        """Read the jobs that are due, and learn from those that have started. Raises Unavailable."""
        now = time.monotonic()
        due = [job_id for job_id, watched in self.watched.items() if watched.look_at <= now]
        records = await self._reader.records(due, bodies=False, resultless=due) if due else []
        for job_id, record in zip(due, records, strict=True):
            prediction, told, since, _ = watched = self.watched.pop(job_id)
            measured = None if record is None else measured_wait(record, prediction.seconds)
            if measured is not None:
                seconds, bound = measured
                if seconds <= now - since + CLOCK_SLACK_S:
                    self._errors.learn(prediction, told, seconds, bound=bound)
            elif record is not None and not record.state.final:
                look_at = now + max(SAMPLE_INTERVAL_S, RECHECK_SHARE * (now - since))
                self.watched[job_id] = watched._replace(look_at=look_at)


def measured_wait(record: JobRecord, predicted_s: float) -> tuple[float, bool] | None:
    """Return for how many seconds a job waited, and whether it would have waited longer; None while it waits.

    A job that ended in the queue would have waited longer still. If it expired, or waited for longer than predicted,
    its wait is a bound; else it says nothing (None): its client cancelled it early.
    """
    if record.started_ms:
        return max(0, record.started_ms - record.created_ms) / 1000, False
    waited_s = max(0, record.done_ms - record.created_ms) / 1000
    if record.state is JobState.EXPIRED or (record.state.final and waited_s > predicted_s):
        return waited_s, True
    return None
