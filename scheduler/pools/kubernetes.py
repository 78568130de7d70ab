"""Kubernetes pool: runs workers as the pods of one Deployment per model and shape, and scales it to the plan.

This is the only file that knows Kubernetes. It uses no watches, which end by themselves after some minutes: every tick
reads the objects and patches what differs. It drains a worker first, then gives its pod the lowest deletion cost and
lowers the Deployment's scale.

Fencing has two parts. A plan is published, fenced, immediately before the pool acts on it. And every leader first
writes its epoch into the Deployment, which changes the resource version: requests of an earlier leader name the old
version, and the API server refuses them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import httpx2
import msgspec
from lightkube import ApiError, AsyncClient, ConfigError
from lightkube.models.autoscaling_v1 import ScaleSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import Pod
from lightkube.types import PatchType

from scheduler.pools.base import LeavingStep, Member, Move, Pool, PoolError, next_step
from scheduler.settings import KubernetesSettings
from streaming.fleet.plans import Action, Plan, PoolKind, pool_name
from streaming.fleet.process import Cordoned, Process

log = logging.getLogger(__name__)

EPOCH_ANNOTATION = "penstock/leader-epoch"
COST_ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
LOWEST_COST = "-2147483648"
TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class PodMove(Move):
    """A move, with the Deployment's state as it was read."""

    pool: str = ""
    name: str = ""
    version: str = ""
    """The Deployment's resource version."""
    replicas: int = 0
    stamped: int = 0
    """The leader epoch written in its annotation."""
    step: LeavingStep = field(default_factory=lambda: LeavingStep((), 0))


class KubernetesPool(Pool):
    """Scales the Deployments of all models. `moves` reads and decides, `carry_out` changes the cluster."""

    kind: PoolKind = "kubernetes"

    def __init__(self, settings: KubernetesSettings, by: str) -> None:
        self._settings, self._by = settings, by
        self._client: AsyncClient | None = None
        self._problems: dict[str, str] = {}

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def moves(self, plans: Sequence[Plan], workers: Sequence[Process], epoch: int) -> list[Move]:
        """One move per Deployment. A Deployment that cannot be read stays as it is; the error is logged once."""
        found = await asyncio.gather(*(self._moves_of(plan, workers, epoch) for plan in plans))
        return [move for moves in found for move in moves]

    async def carry_out(self, moves: Sequence[Move], epoch: int) -> None:
        """Change the cluster, after the plans were published. The next tick retries what fails."""
        await asyncio.gather(*(self._carry_out(move, epoch) for move in moves if isinstance(move, PodMove)))

    # --- reading the cluster -----------------------------------------------------------------------------------------

    async def _moves_of(self, plan: Plan, workers: Sequence[Process], epoch: int) -> list[Move]:
        """The moves of one plan. Each carries the whole plan, with the leavers and cordons of all Deployments."""
        own = [worker for worker in workers if worker.model == plan.model]
        moves = await asyncio.gather(*(self._move(plan, shape, own, epoch) for shape in plan.pools))
        leaving = dict.fromkeys(pod for move in moves for pod in move.plan.leaving)
        cordon = {each.worker: each for move in moves for each in move.plan.cordon}
        whole = msgspec.structs.replace(plan, leaving=tuple(leaving), cordon=tuple(cordon.values()))
        return [replace(move, plan=whole) for move in moves]

    async def _move(self, plan: Plan, shape: str, workers: Sequence[Process], epoch: int) -> Move:
        pool = pool_name(plan.model, shape)
        try:
            move = await self._read(plan, shape, [worker for worker in workers if worker.shape == shape], epoch)
        except (httpx2.HTTPError, ConfigError, PoolError) as error:
            self._log_problem(pool, str(error) or type(error).__name__)
            return Move(plan)
        self._log_problem(pool, "")
        return move

    async def _read(self, plan: Plan, shape: str, workers: Sequence[Process], epoch: int) -> Move:
        """Read one Deployment and its pods, and decide its move. Raises HTTPError, ConfigError, PoolError."""
        client, name = self._open(), self._settings.deployment_of(plan.model, shape)
        deployment = await client.get(Deployment, name)
        meta, spec = deployment.metadata, deployment.spec
        assert meta is not None and spec is not None and meta.resourceVersion is not None
        stamp = (meta.annotations or {}).get(EPOCH_ANNOTATION, "")
        stamped = int(stamp) if stamp.isdecimal() else 0
        if stamped > epoch:
            raise PoolError(f"{name} is another leader's (epoch {stamped}, this one's is {epoch})")
        by_host = {worker.host: worker for worker in workers}
        labels: dict[str, Any] = dict(spec.selector.matchLabels or {})
        if not labels or spec.selector.matchExpressions:  # the labels alone would also find pods of others
            raise PoolError(f"{name} must select its pods by matchLabels alone")
        pods = [_member(pod, by_host) async for pod in client.list(Pod, labels=labels) if not _is_ending(pod)]
        slow = {cordoned.worker: cordoned for cordoned in plan.cordon}
        cordoned = {worker.host for worker in workers if worker.lease in slow}
        step = next_step(pods, plan.pools[shape], plan.leaving, cordoned)
        leavers = [by_host[pod] for pod in step.leaving if pod in by_host]
        told = [
            slow.get(worker.lease) or Cordoned(worker.lease, f"one worker too many: {plan.reason}")
            for worker in leavers
            if worker.lease and worker.state != "drained"
        ]
        others = [each for each in plan.cordon if each.worker not in {one.worker for one in told}]
        replicas = 1 if spec.replicas is None else spec.replicas
        return PodMove(
            msgspec.structs.replace(plan, leaving=step.leaving, cordon=(*others, *told)),
            tuple(self._actions(plan, shape, step, replicas)),
            pool_name(plan.model, shape),
            name,
            meta.resourceVersion,
            replicas,
            stamped,
            step,
        )

    def _actions(self, plan: Plan, shape: str, step: LeavingStep, replicas: int) -> Iterator[Action]:
        act = partial(Action, model=plan.model, shape=shape, by=self._by)
        for pod in step.leaving:
            if pod not in plan.leaving:
                yield act(kind="drain", worker=pod, reason=plan.reason)
        for pod in step.remove:
            yield act(kind="remove", worker=pod, reason="drained")
        if replicas != step.replicas:
            yield act(kind="scale", want=step.replicas, was=replicas, reason=plan.reason)

    # --- changing the cluster ----------------------------------------------------------------------------------------

    async def _carry_out(self, move: PodMove, epoch: int) -> None:
        try:
            await self._change(move, epoch)
        except ApiError as error:
            if error.status.code == 409:  # it changed since it was read: the next tick reads it again
                log.info("%s: changed meanwhile, looking again: %s", move.plan.model, error)
            else:
                self._log_problem(move.pool, str(error))
        except httpx2.HTTPError as error:
            self._log_problem(move.pool, str(error) or type(error).__name__)

    async def _change(self, seen: PodMove, epoch: int) -> None:
        client, step, version = self._open(), seen.step, seen.version
        if seen.stamped < epoch:
            stamp = {"metadata": {"resourceVersion": version, "annotations": {EPOCH_ANNOTATION: str(epoch)}}}
            stamped = await client.patch(Deployment, seen.name, stamp, patch_type=PatchType.MERGE)
            assert stamped.metadata is not None and stamped.metadata.resourceVersion is not None
            version = stamped.metadata.resourceVersion
        for pod in step.remove:
            await self._unless_gone(client.delete(Pod, pod))
        if step.replicas == seen.replicas:
            return
        for pod in step.cheapest:
            cost = {"metadata": {"annotations": {COST_ANNOTATION: LOWEST_COST}}}
            await self._unless_gone(client.patch(Pod, pod, cost, patch_type=PatchType.MERGE))
        scale = Deployment.Scale(
            metadata=ObjectMeta(name=seen.name, namespace=client.namespace, resourceVersion=version),
            spec=ScaleSpec(replicas=step.replicas),
        )
        await client.replace(scale, seen.name)

    @staticmethod
    async def _unless_gone(request: Any) -> None:
        try:
            await request
        except ApiError as error:
            if error.status.code != 404:
                raise

    # --- the client --------------------------------------------------------------------------------------------------

    def _open(self) -> AsyncClient:
        """The client of the cluster this process runs in, or of the one KUBECONFIG names. Raises ConfigError."""
        if self._client is None:
            timeout = httpx2.Timeout(TIMEOUT_S)
            self._client = AsyncClient(namespace=self._settings.namespace or None, timeout=timeout)
        return self._client

    def _log_problem(self, pool: str, what: str) -> None:
        """Log a pool's problem when it begins, changes or ends; `what` is "" if there is none."""
        before = self._problems.get(pool, "")
        if what and what != before:
            log.warning("%s: its pods stay as they are: %s", pool, what)
        elif before and not what:
            log.info("%s: its Deployment can be seen again", pool)
        self._problems[pool] = what


def _is_ending(pod: Pod) -> bool:
    phase = pod.status.phase if pod.status is not None else ""
    return bool(pod.metadata and pod.metadata.deletionTimestamp) or phase in ("Succeeded", "Failed")


def _member(pod: Pod, workers: dict[str, Process]) -> Member:
    """A pod with its worker's report; a worker's host name is its pod's name."""
    meta, status = pod.metadata, pod.status
    assert meta is not None and meta.name is not None
    conditions = (status.conditions if status is not None else None) or []
    worker = workers.get(meta.name)
    return Member(
        name=meta.name,
        ready=any(condition.type == "Ready" and condition.status == "True" for condition in conditions),
        since=meta.creationTimestamp.timestamp() if meta.creationTimestamp else 0.0,
        running=worker.running if worker is not None else 0,
        drained=worker is None or worker.state == "drained",
    )
