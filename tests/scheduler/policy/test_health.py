"""Stragglers are found within a minute, and nobody else ever is."""

from __future__ import annotations

import math
import random

import pytest
from worker_report import a_worker

from scheduler.policy.health import PoolHealth, judge, usual_step
from streaming.fleet.process import Process, Served


class Team:
    """Workers whose steps take 30 ms and 1 ms for each request of the batch, with noise, as they report them."""

    def __init__(self, count: int, seed: int, noise: float = 0.25) -> None:
        self.chance = random.Random(seed)
        self.noise = noise
        self.slow: dict[int, float] = {}
        self.failing: set[int] = set()
        self.idle: set[int] = set()
        self.starting = 0
        """So many more have not begun yet."""
        self.steps, self.seconds, self.tokens = [0.0] * count, [0.0] * count, [0.0] * count
        self.served = [Served()] * count
        self.health = PoolHealth()
        self.now = 0.0

    def pass_by(self, seconds: float, tick_s: float = 2.0) -> PoolHealth:
        """Work and be judged; batches are other each tick, and long prompts hold a few of them up."""
        end = self.now + seconds
        while self.now < end:
            self.now += tick_s
            for number in sorted({*range(len(self.steps))} - self.idle):
                batch = self.chance.randint(1, 32)
                took = (0.030 + 0.001 * batch) * self.chance.lognormvariate(0, self.noise)
                took *= self.slow.get(number, 1.0) * (1.8 if self.chance.random() < 0.05 else 1.0)
                self.steps[number] += tick_s / took
                self.seconds[number] += tick_s
                self.tokens[number] += batch * tick_s / took
                past, fails = self.served[number], number in self.failing
                self.served[number] = Served(past.jobs + 2, past.tokens + 200, past.failed + 2 * fails)
            self.health = judge(self.health, self.workers(), self.now)
        return self.health

    def workers(self) -> list[Process]:
        return [a_worker(f"s{number}", state="starting") for number in range(self.starting)] + [
            a_worker(
                f"w{number}", served={"standard": served}, steps=int(steps), step_s=seconds, step_tokens=int(tokens)
            )
            for number, (steps, seconds, tokens, served) in enumerate(
                zip(self.steps, self.seconds, self.tokens, self.served, strict=True)
            )
        ]


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_worker_five_times_slower_is_cordoned_within_a_minute(count: int, seed: int) -> None:
    """Whenever it becomes slow, and nobody else with it."""
    team = Team(count, seed)
    assert team.pass_by(300 + seed).cordons == ()
    team.slow[1] = 5.0
    health = team.pass_by(58)
    assert [cordon.worker for cordon in health.cordons] == ["w1"]
    assert "times its peers'" in health.cordons[0].reason


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 5, 16])
def test_a_healthy_worker_is_not_cordoned_in_an_hour(count: int) -> None:
    """With noise of a quarter, batches from 1 to 32 and prompts that hold some steps up."""
    assert Team(count, seed=count).pass_by(3600).cordons == ()


@pytest.mark.parametrize(("count", "noise", "slow"), [
    (4, 0.0, {1: 1.5}),  # half as slow again, among workers so alike that this is many deviations
    (4, 0.25, dict.fromkeys(range(4), 5.0)),  # all: a machine that is busy slows every worker on it
    (1, 0.25, {0: 5.0}),  # a lonely one has no peers
])  # fmt: skip
def test_others_are_not_to_blame(count: int, noise: float, slow: dict[int, float]) -> None:
    team = Team(count, seed=7, noise=noise)
    team.pass_by(120)
    team.slow = slow
    assert team.pass_by(600).cordons == ()


def test_at_most_a_quarter_is_cordoned_at_once() -> None:
    """Three of eight are slow: two are cordoned; the third when those are gone."""
    team = Team(8, seed=7)
    team.pass_by(120)
    team.slow = {0: 5.0, 1: 5.0, 2: 5.0}
    health = team.pass_by(120)
    assert len(health.cordons) == 2
    gone = {cordon.worker for cordon in health.cordons}
    left = [worker for worker in team.workers() if worker.id not in gone]
    others = [name for name in ("w0", "w1", "w2") if name not in gone]
    assert [cordon.worker for cordon in judge(health, left, team.now + 2).cordons] == others


def test_a_worker_whose_jobs_fail_is_cordoned() -> None:
    """All of its jobs fail while its peers' do not; when everybody's fail, the cause is elsewhere."""
    team = Team(3, seed=7)
    team.pass_by(60)
    team.failing = {2}
    health = team.pass_by(58)
    assert [(cordon.worker, cordon.reason) for cordon in health.cordons] == [
        ("w2", "100% of its jobs fail, 5 times in a row")
    ]
    everybody = Team(3, seed=7)
    everybody.failing = {0, 1, 2}
    assert everybody.pass_by(120).cordons == ()


def test_a_peer_that_has_long_been_idle_judges_nobody() -> None:
    """What it did before says nothing of now: the machine may have become slow for all since."""
    team = Team(2, seed=7)
    assert team.pass_by(120).cordons == ()
    team.idle, team.slow = {0}, {1: 5.0}
    assert team.pass_by(600).cordons == ()


def test_the_usual_step_is_not_moved_by_outliers() -> None:
    """A fifth of windows five times slower: the line stays within a tenth."""
    chance = random.Random(5)
    batches = [chance.uniform(1, 32) for _ in range(32)]
    history = [(b, (0.03 + 0.001 * b) * (5 if n % 5 == 0 else 1)) for n, b in enumerate(batches)]
    base, slope = usual_step(history)
    assert math.isclose(base + 16 * slope, 0.046, rel_tol=0.1)
    assert usual_step([]) == (1.0, 0.0)
