"""Pods of a Deployment, on an API server of our own: real HTTP, the real client, and the real fence in Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
from kube import COST, Kube
from worker_report import a_worker

from scheduler.pools.base import Move
from scheduler.pools.kubernetes import EPOCH_ANNOTATION, LOWEST_COST, KubernetesPool
from scheduler.settings import KubernetesSettings
from streaming.fleet.plans import Plan
from streaming.fleet.process import Cordoned, Process

MODEL = "Llama-3.1_8B"
NAME = "penstock-worker-llama-3-1-8b"


@pytest.fixture
def kube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kube]:
    with Kube(tmp_path) as kube:
        monkeypatch.setenv("KUBECONFIG", str(kube.config))
        yield kube


@pytest.fixture
async def pool(kube: Kube) -> AsyncIterator[KubernetesPool]:
    pool = KubernetesPool(KubernetesSettings(), "s")
    yield pool
    await pool.close()


def a_plan(want: int, **more: object) -> Plan:
    return Plan(model=MODEL, want=want, reason="because", pool="kubernetes", **more)  # type: ignore[arg-type]


def workers(kube: Kube, **states: str) -> list[Process]:
    """One worker in every ready pod, with one job; other states by pod."""
    ready = {pod.name: states.get(pod.name.rpartition("-")[2], "ready") for pod in kube.pods.values() if pod.ready}
    return [
        a_worker(name, state, running=1, host=name, model=MODEL, lease=f"lease-{name}") for name, state in ready.items()
    ]


async def follow(pool: KubernetesPool, plan: Plan, seen: list[Process], epoch: int) -> Move:
    """A tick with a leader nobody disputes."""
    (move,) = await pool.moves([plan], seen, epoch)
    await pool.carry_out([move], epoch)
    return move


def again(move: Move) -> Plan:
    """The next decision: the same number, nobody cordoned, and what was published of who is leaving."""
    return msgspec.structs.replace(move.plan, cordon=())


async def test_more_pods_at_once(kube: Kube, pool: KubernetesPool) -> None:
    """From one to three: the epoch is written first, then the scale, under the version that has it."""
    kube.deploy(NAME, 1)
    move = await follow(pool, a_plan(3), workers(kube), 7)
    assert (kube.deployments[NAME].replicas, len(kube.pods)) == (3, 3)
    writes = [(method, path.rpartition("/")[2].partition("?")[0]) for method, path, _ in kube.writes]
    assert writes == [("PATCH", NAME), ("PUT", "scale")]
    assert kube.deployments[NAME].annotations == {EPOCH_ANNOTATION: "7"}
    assert [(action.kind, action.was, action.want, action.by) for action in move.actions] == [("scale", 1, 3, "s")]
    kube.writes.clear()
    await follow(pool, a_plan(3), workers(kube), 7)
    assert kube.writes == [], "what is as planned is left alone"


async def test_a_pod_is_drained_before_it_goes(kube: Kube, pool: KubernetesPool) -> None:
    """Two of three leave: told to drain, waited for, made the cheapest, and just those are taken."""
    kube.deploy(NAME, 3)
    first, second, third = kube.pods
    move = await follow(pool, a_plan(1), workers(kube), 7)
    assert set(move.plan.leaving) == {second, third}, "all have one job: the youngest"
    assert {each.worker for each in move.plan.cordon} == {f"lease-{second}", f"lease-{third}"}
    assert [(action.kind, action.worker) for action in move.actions] == [("drain", third), ("drain", second)]
    assert kube.deployments[NAME].replicas == 3 and not kube.deleted, "both still work"

    second_drained = workers(kube, **{second.rpartition("-")[2]: "drained", third.rpartition("-")[2]: "draining"})
    move = await follow(pool, again(move), second_drained, 7)
    assert kube.deleted == [second] and set(kube.pods) == {first, third}
    (body,) = [body for _, path, body in kube.writes if second in path]
    assert body == {"metadata": {"annotations": {COST: LOWEST_COST}}}
    assert [each.worker for each in move.plan.cordon] == [f"lease-{third}"], "told again until it has drained"

    gone_silent = [worker for worker in workers(kube) if worker.host != third]
    move = await follow(pool, again(move), gone_silent, 7)
    assert kube.deleted == [second, third]
    move = await follow(pool, again(move), workers(kube), 7)
    assert move.plan.leaving == () and move.actions == ()


async def test_a_cordoned_worker_is_replaced(kube: Kube, pool: KubernetesPool) -> None:
    """Its replacement is asked for at once; when it has drained it is its pod that goes."""
    kube.deploy(NAME, 2)
    slow, _ = kube.pods
    cordon = (Cordoned(f"lease-{slow}", "its steps take 5.0 times its peers'"),)
    move = await follow(pool, a_plan(2, cordon=cordon), workers(kube), 7)
    assert len(kube.pods) == 3 and move.plan.cordon == cordon
    kube.all_ready()
    await follow(pool, again(move), workers(kube, **{slow.rpartition("-")[2]: "drained"}), 7)
    assert kube.deleted == [slow] and len(kube.pods) == 2


@pytest.mark.parametrize("has_stamped", [False, True])
async def test_a_stale_leader_is_refused(kube: Kube, pool: KubernetesPool, has_stamped: bool) -> None:
    """Stopped between looking and doing, at any point, it changes nothing once another has begun: also when its epoch
    was on the Deployment, because the next one's changes the version that it has seen."""
    kube.deploy(NAME, 3)
    old = KubernetesPool(KubernetesSettings(), "old")
    if has_stamped:
        await follow(old, a_plan(3), workers(kube), 7)
    moves = await old.moves([a_plan(9)], workers(kube), 7)
    await follow(pool, a_plan(3), workers(kube), 8)
    await old.carry_out(moves, 7)
    assert [code for code, _, _ in kube.refused] == [409]
    stamped = await old.moves([a_plan(9)], workers(kube), 7)
    assert stamped == [Move(a_plan(9))], "and what it looks at now is another's"
    await old.carry_out(stamped, 7)
    await old.close()
    assert (kube.deployments[NAME].replicas, kube.deployments[NAME].annotations) == (3, {EPOCH_ANNOTATION: "8"})


async def test_trouble_is_said_once(kube: Kube, pool: KubernetesPool, caplog: pytest.LogCaptureFixture) -> None:
    """No Deployment of that name, an API server in trouble: the plan is published, nothing else happens."""
    for _ in range(2):
        assert await follow(pool, a_plan(2), [], 7) == Move(a_plan(2))
    kube.deploy(NAME, 1)
    kube.down = True
    assert await follow(pool, a_plan(2), [], 7) == Move(a_plan(2))
    kube.down = False
    await follow(pool, a_plan(2), workers(kube), 7)
    assert len(kube.pods) == 2
    said = [record.message for record in caplog.records if record.name == "scheduler.pools.kubernetes"]
    assert [words.partition(": ")[2].partition(" ")[0] for words in said[:2]] == ["its", "its"]
    assert "not found" in said[0] and "etcd is away" in said[1] and len(said) <= 3


async def test_without_a_cluster_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither in a cluster nor told of one."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    pool = KubernetesPool(KubernetesSettings(), "s")
    assert await pool.moves([a_plan(1)], [], 7) == [Move(a_plan(1))]
    assert "stay as they are" in caplog.text
    await pool.close()


async def test_each_shape_has_its_deployment(kube: Kube, pool: KubernetesPool) -> None:
    """Both are sized in one tick; whom the wide one lets go stands in the one plan of the model, and only its own."""
    wide, narrow = f"{NAME}-wide", f"{NAME}-narrow"
    kube.deploy(wide, 2)
    kube.deploy(narrow, 1)
    first, second, only = kube.pods

    def seen(**states: str) -> list[Process]:
        shape = {first: "wide", second: "wide", only: "narrow"}
        return [msgspec.structs.replace(each, shape=shape.get(each.id, "narrow")) for each in workers(kube, **states)]

    plan = a_plan(4, shapes={"wide": 1, "narrow": 3}, takes=("narrow",))
    moves = await pool.moves([plan], seen(), 7)
    await pool.carry_out(moves, 7)
    assert {move.plan.leaving for move in moves} == {(second,)}
    assert [each.worker for each in moves[0].plan.cordon] == [f"lease-{second}"]
    assert (kube.deployments[wide].replicas, kube.deployments[narrow].replicas) == (2, 3)
    moves = await pool.moves([again(moves[0])], seen(**{second.rpartition("-")[2]: "drained"}), 7)
    await pool.carry_out(moves, 7)
    assert kube.deleted == [second] and len(kube.pods) == 4 and only in kube.pods


@pytest.mark.parametrize("labelled", [False, True])
async def test_pods_that_labels_alone_do_not_select_are_left_alone(
    kube: Kube, pool: KubernetesPool, caplog: pytest.LogCaptureFixture, labelled: bool
) -> None:
    """Among them would be those of others; without labels, every pod of the namespace."""
    kube.deploy(NAME, 2)
    own = kube.deployments[NAME]
    own.expressions = [{"key": "app", "operator": "In", "values": ["worker"]}]
    own.labels = own.labels if labelled else {}
    move = await follow(pool, a_plan(1), workers(kube), 7)
    assert move.plan.leaving == () and not kube.writes and not kube.deleted
    assert "matchLabels alone" in caplog.text
