"""Wait-time estimates: when a waiting job will start, by the scheduler's plan or, without a scheduler, by the
completion rate of this process, corrected by the errors of past estimates."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Mapping

from api.openai.wait import Wait
from api.waits.calibration import EstimateSource, Estimator, Prediction, WaitErrors
from api.waits.readiness import WorkerReadiness
from api.waits.shown import ShownWaits
from streaming.fleet.plans import Plan
from streaming.jobs.job import Job
from streaming.order import HIGHER, Priority

STALE_S = 10.0
"""A plan older than this is ignored."""
FRESH_S = 3.0
"""No request is refused by a plan older than this."""
DEFAULT_RETRY_S = 5.0
"""Asked of a client if no wait is known."""
FULL_LANE_SHARE = 10
"""A full lane is worth a retry once one job in so many of it has started."""
WINDOW_S = 60.0
MAX_ENDS = 4096


class PlanReader:
    """Answers from the plans that this process read last."""

    def __init__(self) -> None:
        self._plans: Mapping[str, Plan] = {}
        self._ages: dict[str, float] = {}
        self._ordered: dict[str, float] = {}
        """When this process saw last that a model should have more workers, in monotonic time."""
        self._read = time.monotonic()

    def learn(self, plans: Mapping[str, Plan], now_ms: int) -> None:
        """Store the plans, read at `now_ms` of Redis time."""
        before, self._plans, self._read = self._plans, plans, time.monotonic()
        for model, plan in plans.items():
            if model not in before or plan.want > before[model].want:
                self._ordered[model] = self._read
        self._ages = {model: max(0, now_ms - plan.at_ms) / 1000 for model, plan in plans.items()}

    def eta_ms(self, model: str, lane: Priority, before: int | None) -> int | None:
        """Return the milliseconds until a job with `before` others ahead of it in its lane starts; None: unknown.

        The plan holds the wait at the lane's end when it was made (`before` None: this one); each job more or less
        since then adds or removes the plan's time per job. A job never starts before the first worker is ready.
        """
        plan, age = self._plans.get(model), self._age(model)
        prospect = plan.lanes.get(lane) if plan is not None else None
        if plan is None or prospect is None or prospect.wait_s is None or age > STALE_S:
            return None
        wake_s = self.wake_s(model)
        more = 0 if before is None else before - prospect.waiting
        behind_s = prospect.wait_s - plan.wake_s + more * prospect.each_s
        return int(1000 * (wake_s + max(0.0, behind_s)))

    def wake_s(self, model: str) -> float:
        """Return the seconds until the model's first worker is ready; 0 if one is, or was expected by now."""
        plan = self._plans.get(model)
        if plan is None:
            return 0.0
        # With zero workers wanted, this job causes the cold start, which has not begun; draining workers do not help.
        return max(0.0, plan.wake_s - self._age(model)) if plan.want else max(plan.wake_s, plan.cold_start_s)

    def expects_start(self, model: str, missing_s: float) -> bool:
        """Whether the model's first worker is still expected: not if it has not become ready within a cold start.

        Args:
            missing_s: seconds for which no worker of the model has been ready.
        """
        plan, wake_s = self._plans.get(model), self.wake_s(model)
        if plan is None or not plan.want:
            return wake_s > 0
        waited_s = min(missing_s, time.monotonic() - self._ordered[model])
        return wake_s > 0 and waited_s <= max(plan.wake_s, plan.cold_start_s)

    def knows(self, model: str) -> bool:
        """Whether a scheduler has published a fresh plan for this model, even one without an estimate."""
        return self._age(model) <= STALE_S

    def can_judge(self, model: str) -> bool:
        """Whether a plan is fresh, and workers are there or wanted. While the model sleeps, its first job wakes it."""
        plan = self._plans.get(model)
        return plan is not None and plan.want > 0 and self._age(model) <= FRESH_S

    def wanted(self, model: str) -> int:
        """How many workers the model should have; 0 without a plan."""
        plan = self._plans.get(model)
        return 0 if plan is None else plan.want

    def above(self, model: str, lane: Priority) -> int:
        """Return the jobs that waited in higher lanes when the plan was made."""
        plan = self._plans.get(model)
        lanes = {} if plan is None else plan.lanes
        return sum([lanes[higher].waiting for higher in HIGHER[lane] if higher in lanes])

    def _age(self, model: str) -> float:
        """Return the seconds since the plan was made; infinite without one."""
        return self._ages.get(model, math.inf) + time.monotonic() - self._read


class CompletionRate:
    """Counts ended jobs by model, over the last WINDOW_S seconds."""

    def __init__(self) -> None:
        self._ends: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=MAX_ENDS))

    def ended(self, model: str) -> None:
        """Count a job that ended now."""
        self._ends[model].append(time.monotonic())

    def eta_ms(self, model: str, position: int) -> int | None:
        """Return the milliseconds until `position` more jobs have ended at the present rate; None if it is unknown."""
        ends, now = self._ends[model], time.monotonic()
        while ends and ends[0] < now - WINDOW_S:
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
        estimator: Estimator = "plan" if self.plans.knows(job.model) else "rate"
        if self.readiness.problem(job.model):
            missing_s = self.readiness.missing_s(job.model)
            if estimator == "rate" or not self.plans.expects_start(job.model, missing_s):
                return None
        if estimator == "plan":
            eta_ms = self.plans.eta_ms(job.model, job.priority, before)
        else:
            eta_ms = self.completions.eta_ms(job.model, before or 0)
        return None if eta_ms is None else Prediction(EstimateSource.of(job, estimator), eta_ms / 1000)

    def predict_at(self, job: Job, position: int) -> Prediction | None:
        """The same by a position in one partition: workers take from all of them alike."""
        return self.predict(job, position * self._partitions)

    def wait(self, job: Job, before: int | None = None) -> Wait | None:
        """Return the corrected wait of a job that is put now, with its band if that is known."""
        prediction = self.predict(job, before)
        return None if prediction is None else self.errors.wait(prediction)

    def wait_of(self, job: Job, position: int) -> Wait | None:
        """Return the wait to show for a waiting job: it rises only if more jobs are ahead of it than before."""
        prediction = self.predict_at(job, position)
        return None if prediction is None else self.shown_wait(job, position, prediction)

    def shown_wait(self, job: Job, position: int, prediction: Prediction) -> Wait:
        """The same for a prediction made just now, for that position."""
        ahead = position + self.plans.above(job.model, job.priority)
        return self.shown.settle(job.id, self.errors.wait(prediction), ahead)

    def has_all_workers(self, model: str) -> bool:
        """Whether no worker is on its way that could shorten a wait: the plan counts those that are ready."""
        return self.readiness.ready(model) >= self.plans.wanted(model)

    def retry_s(self, job: Job, position: int | None = None) -> float:
        """Return when to try again: once a job put now would start or, with the `position` of the last job of a full
        lane, once part of the lane has started."""
        before = None if position is None else position * self._partitions // FULL_LANE_SHARE
        wait = self.wait(job, before)
        return DEFAULT_RETRY_S if wait is None else wait.eta_ms / 1000
