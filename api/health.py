"""Operational endpoints: liveness, readiness, metrics, version and the OpenAPI document."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from api.admission import services_of
from api.jobs import as_json
from api.services import Services
from streaming.errors import Unavailable
from streaming.jobs.settings import DEFAULT_WEIGHT, class_of
from telemetry.catalogue import JobMetrics, OfflineMetrics
from telemetry.metrics import CONTENT_TYPE, GaugeSample


async def healthz(_request: Request) -> Response:
    """GET /healthz: 200 while the process runs."""
    return as_json({"status": "ok"})


async def readyz(request: Request) -> Response:
    """GET /readyz: 200 if Redis answers and a worker is ready or can be started; else 503 with the reason. Either names
    models whose jobs no worker may run (`stalled`), which does not make this process unready for the others."""
    services = services_of(request)
    try:
        ready, reason = await _ready(services)
    except Unavailable as error:
        ready, reason = False, str(error)
    stalled = services.waits.readiness.stalled
    more = {"stalled": stalled} if stalled else {}
    if ready:
        return as_json({"status": "ready", **more})
    return as_json({"status": "not ready", "reason": reason, **more}, 503, {"Retry-After": "1"})


async def _ready(services: Services) -> tuple[bool, str]:
    await services.store_client.ping()
    if reason := services.store.brief:
        return False, reason
    processes = await services.fleet.processes()
    if any(process.role == "worker" and process.state == "ready" for process in processes):
        await services.learn_cards()
        return True, ""
    scalable = any(model.least_wanted == 0 and model.most_wanted > 0 for model in services.models.values())
    has_scheduler = any(process.role == "scheduler" for process in processes)
    if scalable and has_scheduler:
        return True, ""
    if any(process.role == "worker" for process in processes):
        return False, "a worker is starting"
    return False, "no worker is running; look at penstock ps, or start one: penstock up --workers 1"


async def version(request: Request) -> Response:
    """GET /version."""
    return as_json({"name": "penstock", "version": services_of(request).version})


async def root(request: Request) -> Response:
    """GET /: links to the endpoints, for people who open the address in a browser."""
    links = ["/v1/models", "/v1/chat/completions", "/v1/jobs", "/openapi.json", "/readyz", "/metrics"]
    services = services_of(request)
    see = [services.settings.base_path + link for link in links]
    return as_json({"name": "penstock", "version": services.version, "see": see})


async def openapi(request: Request) -> Response:
    """GET /openapi.json."""
    return as_json(request.app.state.document())


async def metrics(request: Request) -> Response:
    """GET /metrics: Prometheus text of this machine's processes, and the present state of lanes and batches.

    The latter are left out, not zero, while Redis does not answer.
    """
    services = services_of(request)
    samples = await live_samples(services)
    page = await asyncio.to_thread(services.metrics.expose, samples)
    return Response(page, media_type=CONTENT_TYPE)


async def live_samples(services: Services) -> list[GaugeSample]:
    """Return gauges of lanes and batches; none while Redis does not answer."""
    try:
        found = await asyncio.gather(_lanes(services), _classes(services), _batches(services))
    except Unavailable:
        return []
    return [sample for samples in found for sample in samples]


async def _lanes(services: Services) -> list[GaugeSample]:
    """Return depth and age of every lane. Raises Unavailable."""
    lanes = await services.backlog.lanes(services.models)
    return [
        GaugeSample(gauge, (lane.model, str(lane.priority)), value)
        for lane in lanes
        for gauge, value in (
            (JobMetrics.lane_waiting, lane.waiting),
            (JobMetrics.lane_running, lane.running),
            (JobMetrics.lane_oldest, lane.oldest_ms / 1000),
        )
    ]


async def _classes(services: Services) -> list[GaugeSample]:
    """Return the longest wait of each class of tenants in every lane. Raises Unavailable."""
    weights, samples = services.weights, list[GaugeSample]()
    classes = {class_of(DEFAULT_WEIGHT), *map(class_of, weights.values())}
    for (model, priority), waits in (await services.backlog.ages(services.models)).items():
        longest = dict.fromkeys(sorted(classes), 0)
        for tenant, ms in waits.items():
            name = class_of(weights.get(tenant, DEFAULT_WEIGHT))
            longest[name] = max(longest[name], ms)
        samples += [
            GaugeSample(JobMetrics.lane_class_oldest, (model, str(priority), name), ms / 1000)
            for name, ms in longest.items()
        ]
    return samples


async def _batches(services: Services) -> list[GaugeSample]:
    """Return the number of unfinished batches and their tokens, summed over tenants because /metrics may be public.

    Raises Unavailable.
    """
    unfinished, tokens = await services.batches.totals(services.keyring.tenants)
    return [
        GaugeSample(OfflineMetrics.batches_unfinished, (), unfinished),
        GaugeSample(OfflineMetrics.batch_tokens, (), tokens),
    ]
