"""/admin/pools: shows each model's pool of workers and the autoscaler's decisions, and sets manual overrides."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from api.admission import caller_of, read_body, services_of
from api.auth import audit
from api.jobs import as_json, fields_of
from api.openai import errors
from api.openai.fields import ClosedBody, refusal
from api.openai.json_body import read_object, validated
from api.services import Services
from streaming.fleet.plans import LEADER, Lead, Noted, Override, Plan, stall_of
from streaming.fleet.process import Process, Prospect
from streaming.order import LaneDepth

MAX_ACTIONS = 20
MAX_OVERRIDE_S = 30 * 86_400
"""Longest duration of a manual override."""


def _only_true(paused: Any) -> Any:
    if paused is not None and paused is not True:
        raise refusal("can only be set to true; DELETE lets the scheduler decide again")
    return paused


class PoolOverride(ClosedBody):
    """The body of PUT /admin/pools/{model}: either `want` or `paused`."""

    want: int | None = None
    """The number of workers, within the bounds of the pool."""
    paused: Annotated[Literal[True] | None, BeforeValidator(_only_true)] = None
    """The number of workers stays as it is."""
    for_s: Annotated[int, Field(ge=1, le=MAX_OVERRIDE_S)] | None = None
    """Seconds it holds; without it, until it is deleted."""


@dataclass(frozen=True, slots=True)
class PoolsView:
    """Plans, workers, lanes and overrides of all pools at one moment."""

    plans: Mapping[str, Plan]
    workers: Sequence[Process]
    lanes: Sequence[LaneDepth]
    overrides: Mapping[str, Override]
    lead: Lead


async def listing(request: Request) -> Response:
    """List worker pools, the leading scheduler and its actions.

    GET /admin/pools: list every model's pool, the leading scheduler, and the newest scaling actions.
    """
    services = services_of(request)
    view, actions = await asyncio.gather(pools_view(services, services.models), services.plans.actions(MAX_ACTIONS))
    pools = [pool_object(services, model, view) for model in services.models]
    return as_json({"object": "list", "data": pools, **leading(view.lead, actions)})


async def show(request: Request) -> Response:
    """Show a model's pool.

    GET /admin/pools/{model}: show the pool.
    """
    services, model = services_of(request), _model(request)
    return as_json(pool_object(services, model, await pools_view(services, [model])))


async def override(request: Request) -> Response:
    """Set a number of workers by hand, or pause.

    PUT /admin/pools/{model} with {"want": 3} or {"paused": true}, optionally "for_s": set an override; 200.
    """
    caller, services, model = caller_of(request), services_of(request), _model(request)
    body = await read_body(request.scope, request.receive, services.settings.body_limit)
    asked, settings = validated(PoolOverride, read_object(body)), services.model(model)
    want, least, most = asked.want, settings.least_wanted, settings.most_wanted
    if (want is None) == (asked.paused is None):
        raise errors.invalid_request('Say either "want", a number of workers, or "paused": true.', "want")
    if want is not None and not least <= want <= most:
        do = "fewer, lower min_workers" if want < least else "more, raise max_workers"
        fix = f"for {do} of [models.{model}] (or --workers of penstock up), and start again"
        raise errors.invalid_request(f"want must be a whole number from {least} to {most}: {fix}.", "want")
    audit.detail(request.scope, want=want, paused=want is None, for_s=asked.for_s)
    hold_ms = None if asked.for_s is None else asked.for_s * 1000
    await services.overrides.put(model, want, caller.name or caller.tenant, hold_ms)
    return await show(request)


async def resume(request: Request) -> Response:
    """Let the scheduler decide again.

    DELETE /admin/pools/{model}: end the override, if there is one, so that the scheduler decides again; 200.
    """
    caller, services = caller_of(request), services_of(request)
    await services.overrides.end(_model(request), caller.name or caller.tenant)
    return await show(request)


def _model(request: Request) -> str:
    """Return the model in the path. Raises ApiError (404)."""
    name: str = request.path_params["model"]
    services_of(request).model(name)
    return name


async def pools_view(services: Services, models: Iterable[str]) -> PoolsView:
    """Read the state of these models' pools. Raises Unavailable."""
    return PoolsView(
        *await asyncio.gather(
            services.plans.read(),
            services.fleet.processes("worker"),
            services.backlog.lanes(models),
            services.overrides.of(models),
            services.store_client.ask(LEADER),
        )
    )


# --- rendering -------------------------------------------------------------------------------------------------------


def pool_object(services: Services, model: str, view: PoolsView) -> dict[str, Any]:
    plan, settings, override = view.plans.get(model), services.model(model), view.overrides.get(model)
    stall = stall_of(model, settings, view.workers, plan, override, lead=view.lead)
    workers = [worker for worker in view.workers if worker.model == model]
    cordons = {each.worker: each.reason for each in plan.cordon} if plan is not None else {}
    return {
        "object": "pool",
        "model": model,
        "engine": settings.engine,
        **{name: getattr(plan, name, None) for name in OF_PLAN},
        **_counts(workers),
        "min": settings.least_wanted,
        "max": settings.most_wanted,
        "decided_at": plan.at_ms / 1000 if plan else None,
        "override": override and _override(override),
        "stalled": stall and stall._asdict(),
        "lanes": {
            lane.priority.value: _lane(lane, plan.lanes.get(lane.priority) if plan else None)
            for lane in view.lanes
            if lane.model == model
        },
        "workers": [_worker(worker, cordons.get(worker.lease)) for worker in workers],
        "leaving": list(plan.leaving) if plan else [],
        "shapes": {
            shape: {
                "want": plan.shapes.get(shape) if plan else None,
                **_counts(worker for worker in workers if worker.shape == shape),
                "min": pool.min_workers,
                "max": pool.most_workers,
                "takes": plan is not None and shape in plan.takes,  # new jobs go there
            }
            for shape, pool in settings.pools.items()
            if shape
        },
    }


OF_PLAN = ("want", "reason", "pool", "epoch", "wake_s", "cold_start_s")


def _counts(workers: Iterable[Process]) -> dict[str, int]:
    states = Counter(worker.state for worker in workers)
    draining = states["draining"] + states["drained"]
    return {"ready": states["ready"], "starting": states["starting"], "draining": draining}


def _lane(lane: LaneDepth, prospect: Prospect | None) -> dict[str, Any]:
    """Render a lane. `wait_s`: expected wait of a job put now; null: unknown, or no worker will start it."""
    wait_s = prospect.wait_s if prospect else None
    return {**fields_of(lane, "waiting", "running", "oldest_s"), "wait_s": wait_s}


def _worker(worker: Process, cordon: str | None) -> dict[str, Any]:
    return {
        **fields_of(worker, "id", "host", "state", "since", "slots", "running", "phase", "away_s"),
        "shape": worker.shape or None,
        "step_ms": 1000 * worker.step_s / worker.steps if worker.steps else None,
        "cordon": cordon,
        "away": list(worker.away),
    }


def _override(override: Override) -> dict[str, Any]:
    until = None if override.until_ms is None else override.until_ms / 1000
    return {**fields_of(override, "want", "paused", "by"), "at": override.at_ms / 1000, "until": until}


def leading(lead: Lead, actions: Iterable[Noted]) -> dict[str, Any]:
    """Render the leading scheduler and the newest scaling actions."""
    return {
        "leader": {"id": lead.holder, "epoch": lead.epoch} if lead.holder else None,
        "actions": [
            {
                **fields_of(noted.action, "was", "want", "reason", "by"),
                **{name: getattr(noted.action, name) or None for name in ("model", "worker", "shape")},
                "at": noted.at_ms / 1000,
                "epoch": noted.epoch,
                "action": noted.action.kind,
            }
            for noted in actions
        ],
    }
