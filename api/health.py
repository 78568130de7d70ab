"""Operational endpoints: liveness, readiness, metrics, version and the OpenAPI document."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from api.admission import services_of
from api.jobs import as_json
from api.services import Services
from streaming.errors import Unavailable
from streaming.fleet.plans import LEADER
from streaming.fleet.processes import processes_of
from streaming.jobs.settings import DEFAULT_WEIGHT, class_of
from telemetry.catalogue import JobMetrics, OfflineMetrics
from telemetry.metrics import CONTENT_TYPE, GaugeSample


async def healthz(_request: Request) -> Response:
    """Whether this process is alive.

    GET /healthz: 200 while the process runs.
    """
    return as_json({"status": "ok"})


async def readyz(request: Request) -> Response:
    """Whether requests can be accepted.

    GET /readyz: 200 if Redis answers and a worker is ready or can be started; else 503 with the reason. Either names
    models whose jobs no worker may run (`stalled`), which does not make this process unready for the others.
    """
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
    workers, lead = await services.store_client.ask_all(processes_of("worker"), LEADER)
    if any(worker.state == "ready" for worker in workers):
        await services.learn_cards()
        return True, ""
    scalable = any(model.least_wanted == 0 and model.most_wanted > 0 for model in services.models.values())
    if scalable and lead.holder:
        return True, ""
    if workers:
        return False, "a worker is starting"
    if scalable:
        return False, "no scheduler leads; look at penstock ps"
    return False, "no worker is running; look at penstock ps, or start one: penstock up --workers 1"


async def version(request: Request) -> Response:
    """Which version this is.

    GET /version.
    """
    return as_json({"name": "penstock", "version": services_of(request).version})


async def root(request: Request) -> Response:
    """GET /: links to the endpoints, for people who open the address in a browser."""
    links = ["/v1/models", "/v1/chat/completions", "/v1/jobs", "/openapi.json", "/readyz", "/metrics"]
    services = services_of(request)
    see = [services.settings.base_path + link for link in links]
    return as_json({"name": "penstock", "version": services.version, "see": see})


async def openapi(request: Request) -> Response:
    """This document.

    GET /openapi.json.
    """
    return as_json(request.app.state.document())


async def metrics(request: Request) -> Response:
    """Counters for Prometheus.

    GET /metrics: Prometheus text of this machine's processes, and the present state of lanes and batches.

    The latter are left out, not zero, while Redis does not answer.
    """
    services = services_of(request)
    samples = await live_samples(services)
    page = await asyncio.to_thread(services.metrics.expose, samples)
    return Response(page, media_type=CONTENT_TYPE)


async def live_samples(services: Services) -> list[GaugeSample]:
    """Return gauges of lanes, with the longest wait of each class of tenants, and of batches, summed over tenants
    because /metrics may be public; none while Redis does not answer."""
    backlog, models, weights = services.backlog, services.models, services.weights
    totals = services.batches.totals(services.keyring.tenants)
    try:
        lanes, ages, (unfinished, tokens) = await asyncio.gather(backlog.lanes(models), backlog.ages(models), totals)
    except Unavailable:
        return []
    samples = [
        GaugeSample(OfflineMetrics.batches_unfinished, (), unfinished),
        GaugeSample(OfflineMetrics.batch_tokens, (), tokens),
    ]
    for lane in lanes:
        labels = (lane.model, str(lane.priority))
        samples.append(GaugeSample(JobMetrics.lane_waiting, labels, lane.waiting))
        samples.append(GaugeSample(JobMetrics.lane_running, labels, lane.running))
        samples.append(GaugeSample(JobMetrics.lane_oldest, labels, lane.oldest_s))
    classes = {class_of(DEFAULT_WEIGHT), *map(class_of, weights.values())}
    for (model, priority), waits in ages.items():
        longest = dict.fromkeys(sorted(classes), 0)
        for tenant, ms in waits.items():
            name = class_of(weights.get(tenant, DEFAULT_WEIGHT))
            longest[name] = max(longest[name], ms)
        for name, ms in longest.items():
            samples.append(GaugeSample(JobMetrics.lane_class_oldest, (model, str(priority), name), ms / 1000))
    return samples
