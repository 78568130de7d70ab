"""Whether this process lives, whether a request would be served, what it counts, and what it is."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from api.admission import services_of
from api.jobs import as_json
from api.services import Services
from streaming.errors import Unavailable
from telemetry.live_gauges import BATCH_TOKENS, BATCHES_UNFINISHED, LANE_OLDEST, LANE_RUNNING, LANE_WAITING, GaugeSample
from telemetry.metrics import CONTENT_TYPE


async def healthz(_request: Request) -> Response:
    """The process lives: nothing more."""
    return as_json({"status": "ok"})


async def readyz(request: Request) -> Response:
    """200 if Redis answers and some model has a ready worker or can be given one; else 503 with the reason."""
    services = services_of(request)
    try:
        ready, reason = await _ready(services)
    except Unavailable as error:
        ready, reason = False, str(error)
    if ready:
        return as_json({"status": "ready"})
    return as_json({"status": "not ready", "reason": reason}, 503, {"Retry-After": "1"})


async def _ready(services: Services) -> tuple[bool, str]:
    await services.wire.ping()
    if reason := services.store.brief:
        return False, reason
    processes = await services.fleet.processes()
    if any(process.role == "worker" and process.state == "ready" for process in processes):
        return True, ""
    asleep = any(model.least_wanted == 0 and model.most_wanted > 0 for model in services.models.values())
    gated = any(process.role == "scheduler" for process in processes)
    if asleep and gated:
        return True, ""
    if any(process.role == "worker" for process in processes):
        return False, "a worker is starting"
    return False, "no worker is running; look at penstock ps, or start one: penstock up --workers 1"


async def version(request: Request) -> Response:
    """The program's version."""
    return as_json({"name": "penstock", "version": services_of(request).version})


async def root(request: Request) -> Response:
    """A signpost for whoever opens the address in a browser."""
    links = ["/v1/models", "/v1/chat/completions", "/v1/jobs", "/openapi.json", "/readyz", "/metrics"]
    return as_json({"name": "penstock", "version": services_of(request).version, "see": links})


async def openapi(request: Request) -> Response:
    """The OpenAPI document."""
    return as_json(services_of(request).document)


async def metrics(request: Request) -> Response:
    """Prometheus text: this machine's processes together, and lanes and batches as they are now; these are left out,
    not zero, while Redis does not answer."""
    services = services_of(request)
    samples = await live_samples(services)
    page = await asyncio.to_thread(services.metrics.expose, samples)
    return Response(page, media_type=CONTENT_TYPE)


async def live_samples(services: Services) -> list[GaugeSample]:
    """Lanes and batches as they are now; nothing while Redis does not answer."""
    try:
        lanes, batches = await asyncio.gather(_lanes(services), _batches(services))
    except Unavailable:
        return []
    return [*lanes, *batches]


async def _lanes(services: Services) -> list[GaugeSample]:
    """Depth and age of every lane. Raises Unavailable."""
    lanes = await services.backlog.lanes(services.models)
    return [
        GaugeSample(gauge, (lane.model, str(lane.priority)), value)
        for lane in lanes
        for gauge, value in (
            (LANE_WAITING, lane.waiting),
            (LANE_RUNNING, lane.running),
            (LANE_OLDEST, lane.oldest_ms / 1000),
        )
    ]


async def _batches(services: Services) -> list[GaugeSample]:
    """How many there are, and what they still have to compute; of all tenants together, for this page may be open.
    Raises Unavailable."""
    unfinished, tokens = await services.batches.totals(services.keyring.tenants)
    return [GaugeSample(BATCHES_UNFINISHED, (), unfinished), GaugeSample(BATCH_TOKENS, (), tokens)]
