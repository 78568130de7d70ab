"""Simulated pools: texts, steps and workers keep their books, leaps change nothing, and the scheduler sees the load."""

from __future__ import annotations

from random import Random

import pytest

from planner.simulator.engine import EngineShape, Greedy, ModelEngine, ModelText, StepCosts
from planner.simulator.pool import PoolEngine, PoolSimulation
from planner.simulator.queues import ModelWorker, PenstockQueue, PenstockWorker, Simulation, SortedQueue, by_arrival
from planner.simulator.trace import TraceRow
from scheduler.policy.snapshot import LaneLoad

ENGINE = PoolEngine(EngineShape(1000, 2, costs=StepCosts(1.0, 0.0, 0.0, 0.0)), start_s=10.0)
"""A token a second, whatever else runs."""


def test_texts_take_their_tokens_and_the_highest_lane_goes_first() -> None:
    ended: list[tuple[float, str]] = []
    pool = PoolSimulation(ENGINE, on_ended=lambda text, _: ended.append((pool.now_s, text.lane)))
    pool.order(at_once=True)
    pool.feed([TraceRow(1.0, 1, 5), TraceRow(1.0, 1, 8), TraceRow(2.0, 1, 3, "standard"), TraceRow(3.0, 1, 3)])
    pool.run(100.0)
    # The second of the first two comes when the step of the first has begun.
    assert ended == [(6.0, "interactive"), (9.0, "interactive"), (10.0, "interactive"), (12.0, "standard")]


def test_a_fuller_batch_and_a_slow_worker_take_longer() -> None:
    ended: list[float] = []
    engine = PoolEngine(EngineShape(1000, 4, costs=StepCosts(1.0, 1.0, 0.0, 0.0)))
    pool = PoolSimulation(engine, on_ended=lambda *_: ended.append(pool.now_s))
    pool.order(at_once=True)
    pool.feed([TraceRow(0.0, 1, 6), TraceRow(6.0, 1, 6)])
    # Alone two seconds a token: three by 6, and a fourth by 8. Together three: the first ends at 14, the other has two.
    pool.at(14.0, lambda _: pool.slow_down(next(iter(pool.workers.values())), 5.0))
    pool.run(100.0)
    assert ended == pytest.approx([14.0, 54.0])


def test_workers_start_drain_and_are_paid_for_from_order_to_end() -> None:
    """What runs is never cut; a worker that goes is paid until its last text."""
    pool = PoolSimulation(ENGINE)
    pool.order(at_once=True)
    pool.feed([TraceRow(0.0, 1, 50), TraceRow(0.0, 1, 20)])
    pool.run(10.0)
    pool.resize(2)
    pool.run(25.0)
    assert [worker.state for worker in pool.workers.values()] == ["ready", "ready"]
    pool.resize(0)
    pool.run(100.0)
    assert not pool.workers and pool.total_worker_s() == pytest.approx(50.0 + 15.0)


def test_the_snapshot_is_what_the_scheduler_would_see() -> None:
    pool = PoolSimulation(ENGINE)
    pool.order(at_once=True)
    pool.feed(TraceRow(0.0, 7, 10) for _ in range(3))
    pool.run(12.5)
    found = pool.snapshot()
    assert found.lanes[0] == LaneLoad("interactive", 0, 1, 0.0, 3)
    (worker,) = found.workers
    assert (worker.state, worker.slots, worker.running) == ("ready", 2, 1)
    assert (worker.served["interactive"].jobs, worker.served["interactive"].tokens) == (2, 34)
    # Ten seconds of the first text, the first nine of the second beside it, then its last beside the third.
    assert (worker.steps, worker.step_s, worker.step_tokens, worker.kv_used) == (12, 12.0, 10 + 10 + 2, 7 + 2)


def made(seed: int, count: int = 400) -> list[TraceRow]:
    random, at_s, rows = Random(seed), 0.0, []
    for _ in range(count):
        at_s += random.expovariate(6.0)
        lane = random.choice(["interactive", "standard", "batch"])
        rows.append(TraceRow(at_s, random.randint(1, 300), random.randint(1, 120), lane))
    return rows


@pytest.mark.parametrize("held_s", [0.0, 2e-6])
def test_leaps_give_the_times_of_single_steps(held_s: float) -> None:
    """One worker: the pool and the simulation of single steps end every text at the same time."""
    shape = EngineShape(3000, 8, costs=StepCosts(0.006, 0.0003, held_s, 0.00005))
    rows, ended = made(1), dict[float, float]()

    def note(text: ModelText, _: float) -> None:
        ended[text.arrived_s] = pool.now_s

    pool = PoolSimulation(PoolEngine(shape), queue=SortedQueue(by_arrival), on_ended=note)
    pool.order(at_once=True)
    pool.feed(rows)
    pool.run(1000.0)
    texts = [ModelText(row.prompt, row.answer, row.answer, row.at, row.lane) for row in rows]
    Simulation(SortedQueue(by_arrival), [ModelWorker(ModelEngine(shape), Greedy())]).run(texts)
    assert [ended[text.arrived_s] for text in texts] == pytest.approx([text.ended_s for text in texts], abs=0.05)


def test_a_leap_is_as_many_single_steps() -> None:
    shape = EngineShape(100, 8, costs=StepCosts(1.0, 0.1, 0.01, 0.0))
    one, other = ModelEngine(shape), ModelEngine(shape)
    for engine in (one, other):
        for prompt, output in ((10, 9), (20, 30)):
            engine.submit(ModelText(prompt, output, output))
        assert engine.alike() == 0, "it would begin them"
        engine.step()
    assert one.alike() == 8
    leap, single = one.leap(8), [other.step() for _ in range(8)]
    assert leap.duration_s == pytest.approx(sum(step.duration_s for step in single))
    assert (one.held, len(leap.ended), len(single[-1].ended)) == (other.held, 1, 1)


def test_no_leap_passes_an_eviction() -> None:
    engine = ModelEngine(EngineShape(50, 8, costs=StepCosts(1.0, 0.0, 0.0, 0.0)))
    for _ in range(2):
        engine.submit(ModelText(10, 30, 30))
    engine.step()
    engine.leap(engine.alike())
    assert engine.held <= 50 and engine.alike() == 0
    assert len(engine.step().evicted) == 1


def test_every_text_ends_once_with_the_workers_and_the_order_of_the_product() -> None:
    """While workers come and go: all tokens, lanes that count to nothing, and nobody waits for ever."""
    random, ended = Random(2), list[ModelText]()
    pool = PoolSimulation(
        PoolEngine(EngineShape(4000, 8), start_s=2.0),
        queue=PenstockQueue(),
        make_worker=lambda engine: PenstockWorker(engine, Random(3)),
        on_ended=lambda text, _: ended.append(text),
    )
    pool.order(at_once=True)
    pool.every(3.0, lambda _: pool.resize(random.randint(1, 4)))
    rows = made(4, 1500)
    pool.feed(rows)
    pool.run(3000.0)
    assert len(ended) == len({id(text) for text in ended}) == len(rows)
    assert all(text.generated == text.output and (text.begun_s or -1) >= text.arrived_s for text in ended)
    assert [(lane.running, len(lane.waiting)) for lane in pool.queue.lanes.values()] == [(0, 0)] * 3


def test_workers_of_another_shape_take_nothing_new() -> None:
    ended: list[float] = []
    pool = PoolSimulation(ENGINE, wake="freest", on_ended=lambda *_: ended.append(pool.now_s))
    for shape in ("big", "small"):
        pool.order(shape=shape, at_once=True)
    pool.run(0.0)
    pool.send_to("small")
    pool.feed(TraceRow(0.0, 1, 4) for _ in range(3))
    pool.run(20.0)
    assert [sum(served.jobs for served in worker.served.values()) for worker in pool.workers.values()] == [0, 3]
    pool.send_to("big")
    pool.put(TraceRow(0.0, 1, 4))
    pool.run(30.0)
    assert [sum(served.jobs for served in worker.served.values()) for worker in pool.workers.values()] == [1, 3]
