"""Which of a model's shapes take new jobs, and how many workers each has, as the load moves and workers come and go."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from lane_depth import a_lane
from worker_report import a_worker

from scheduler.policy.decide import PolicyState, Switch, SwitchDecision, decide, decide_pool
from scheduler.policy.snapshot import ScalingLimits, Shape, Snapshot, takers
from streaming.fleet.process import Served

NAMES = ("wide", "narrow")
SLOTS = {"wide": 16, "narrow": 8}
IDLE_S = 10.0
EACH = {
    "wide": ScalingLimits(0, 1, idle_s=IDLE_S, cold_start_s=4.0),
    "narrow": ScalingLimits(0, 6, idle_s=IDLE_S, cold_start_s=4.0),
}
LIMITS = ScalingLimits(0, 6, shapes=(Shape("wide", 16.0), Shape("narrow")), pools=EACH)
START_TICKS = 3

counts = st.dictionaries(st.sampled_from("abc"), st.integers(0, 3))


@given(st.sampled_from("abc"), st.lists(st.sampled_from("abcx"), unique=True, max_size=4), counts, st.integers(0, 4))
def test_somebody_may_always_take_new_jobs(aim: str, before: list[str], ready: dict[str, int], wanted: int) -> None:
    """As long as any worker is ready, one of a shape that takes jobs is; never a shape that is not there."""
    takes = takers(("a", "b", "c"), aim, before, ready, wanted)
    assert takes and set(takes) <= set("abc")
    assert any(ready.values()) == any(ready.get(name) for name in takes)
    if ready.get(aim, 0) >= max(1, wanted):
        assert takes == (aim,)


def test_the_shape_before_goes_on_until_the_next_has_its_workers() -> None:
    """Then the next one alone takes jobs, also when it has lost some; when it has lost all, whoever is there does."""
    seen: list[tuple[str, ...]] = [("wide",)]
    for wide, narrow in ((1, 0), (1, 1), (1, 3), (1, 1), (1, 0), (1, 2), (0, 1), (0, 0), (0, 3)):
        seen.append(takers(NAMES, "narrow", seen[-1], {"wide": wide, "narrow": narrow}, 3))
    both, narrow_only, wide_only = NAMES, ("narrow",), ("wide",)
    assert seen[1:] == [
        wide_only, both, narrow_only, narrow_only, wide_only, both, narrow_only, narrow_only, narrow_only,
    ]  # fmt: skip


@dataclass
class Plant:
    """Jobs of one lane and workers that start within a few ticks; what is put in is run at once if there is room."""

    state: Switch | None = None
    now: float = 0.0
    workers: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in NAMES})
    """By shape: the tick count each has been there for."""

    def tick(self, jobs: int, limits: ScalingLimits = LIMITS) -> SwitchDecision:
        decision = decide(self.seen(jobs), limits, self.state, self.now)
        self.state = decision.state
        for shape, plan in decision.pools.items():
            there = self.workers[shape]
            there[:] = [age + 1 for age in there][: plan.want]
            there += [0] * (plan.want - len(there))
        self.now += 1.0
        return decision

    def ready(self, shape: str) -> int:
        return sum(age >= START_TICKS for age in self.workers[shape])

    def kill(self, shape: str) -> None:
        """All of it: they start anew."""
        self.workers[shape] = [0] * len(self.workers[shape])

    def seen(self, jobs: int) -> Snapshot:
        """Each shape that takes jobs runs what it has room for."""
        left, workers = jobs, []
        takes = self.state.takes if self.state is not None and self.state.takes else NAMES
        for shape, ages in self.workers.items():
            for number, age in enumerate(ages):
                runs = min(left, SLOTS[shape]) if age >= START_TICKS and shape in takes else 0
                left -= runs
                state = "ready" if age >= START_TICKS else "starting"
                served = {"interactive": Served(10 * age, 1000 * age)}
                workers.append(a_worker(f"{shape}{number}", state, SLOTS[shape], runs, served=served, shape=shape))
        lane = a_lane("interactive", left, jobs - left, 0.5 if left else 0.0, int(10 * self.now))
        return Snapshot("m", (lane,), tuple(workers))


def test_a_load_that_crosses_the_threshold_and_comes_back() -> None:
    """Wide alone, then narrow with all it needs while wide goes on until it is there; then wide rests and is given
    back with patience; and the same backwards. One switch each way, and jobs never lack a shape that is ready."""
    plant, seen = Plant(), []
    for jobs in [5] * 40 + [40] * 60 + [5] * 60:
        decision = plant.tick(jobs)
        wants = {shape: plan.want for shape, plan in decision.pools.items()}
        seen.append((decision.shape, decision.takes, wants, {name: plant.ready(name) for name in NAMES}))
    assert seen[39] == ("wide", ("wide",), {"wide": 1, "narrow": 0}, {"wide": 1, "narrow": 0})
    assert seen[99] == ("narrow", ("narrow",), {"wide": 0, "narrow": 6}, {"wide": 0, "narrow": 6})
    assert seen[159] == ("wide", ("wide",), {"wide": 1, "narrow": 0}, {"wide": 1, "narrow": 0})
    assert sum(one[0] != other[0] for one, other in pairwise(seen)) == 2
    first = next(tick for tick, (shape, *_) in enumerate(seen) if shape == "narrow")
    over = next(tick for tick, (_, takes, *_) in enumerate(seen) if takes == ("narrow",))
    gone = next(tick for tick, (_, _, wants, _) in enumerate(seen) if tick > 40 and not wants["wide"])
    assert all("wide" in takes for _, takes, *_ in seen[first:over])
    assert seen[over][3]["narrow"] == 6 and any(takes == NAMES for _, takes, *_ in seen[first:over])
    assert gone - over >= IDLE_S


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.sampled_from(["", "", "", "", *NAMES])), min_size=1, max_size=80))
def test_jobs_never_wait_for_ever(steps: list[tuple[int, str]]) -> None:
    """Whatever the load does and whoever dies: at every tick a shape that has a ready worker takes new jobs, if there
    is such a worker; and where there is none, one is on its way to a shape that takes them."""
    plant = Plant()
    for jobs, killed in steps:
        if killed:
            plant.kill(killed)
        ready = {name: plant.ready(name) for name in NAMES}
        decision = plant.tick(jobs)
        assert decision.takes
        if any(ready.values()):
            assert any(ready[name] for name in decision.takes)
        elif jobs:
            assert decision.shape in decision.takes and decision.pools[decision.shape].want >= 1


def test_pinned_counts_for_the_shape_with_the_jobs_and_paused_changes_nothing() -> None:
    """While it is paused the load may do what it likes."""
    plant = Plant()
    for _ in range(10):
        plant.tick(5)

    def held(**what: object) -> ScalingLimits:
        pools = {name: replace(each, **what) for name, each in EACH.items()}  # type: ignore[arg-type]
        return replace(LIMITS, pools=pools, **what)  # type: ignore[arg-type]

    for _ in range(20):
        paused = plant.tick(50, held(paused=True))
    assert (paused.shape, paused.want) == ("wide", 1)
    for _ in range(20):
        pinned = plant.tick(50, held(pinned=3))
    assert (pinned.shape, pinned.pools["narrow"].want) == ("narrow", 3)


def test_what_a_held_shape_does_not_take_says_nothing_of_it() -> None:
    """Narrow leaves jobs that wait long to wide: it is not taken for a shape that can hold only what it has left."""
    state = Switch({"narrow": PolicyState(2)}, takes=("wide",))
    waiting = a_lane("standard", 9, 17, 30.0)
    workers = (a_worker("w", "ready", 16, 16, shape="wide"), a_worker("n", "ready", 8, 1, shape="narrow"))
    decision = decide(Snapshot("m", (waiting,), workers), LIMITS, state, 0.0)
    assert decision.pools["narrow"].state.demand.learned is None
    assert decision.pools["wide"].state.demand.learned is None


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 4), st.floats(0, 100))
def test_a_model_of_one_pool_is_decided_on_as_ever(waiting: int, running: int, ready: int, age: float) -> None:
    """Its decision is the policy's own, word for word."""
    workers = tuple(a_worker(f"w{number}", slots=8, running=running // max(1, ready)) for number in range(ready))
    snapshot = Snapshot("m", (a_lane("standard", waiting, running, age if waiting else 0.0),), workers)
    limits = ScalingLimits(0, 9)
    one, state = decide(snapshot, limits, None, 1.0), None
    for now in (1.0, 2.0, 40.0):
        plan = decide_pool(snapshot, limits, state, now)
        state = plan.state
        if now > 1.0:
            one = decide(snapshot, limits, one.state, now)
        assert (one.main, one.want, one.reason, one.shape) == (plan, plan.want, plan.reason, "")
