"""An API process inside the test's own: its services can be looked at, and told what a scheduler would tell them."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx2
import msgspec
import uvicorn

from api.app import build_app
from api.auth.keys import Keyring, issuer_of
from api.openai.errors import Wait
from api.services import Services
from api.settings import ApiSettings, KeySettings, OidcSettings
from api.stream.connection import Connection
from api.stream.connection_guard import ConnectionGuard
from api.waits import MIN_ERRORS, EstimateSource, Prediction
from streaming.batches.file_store import FilesSettings
from streaming.fleet.plans import Plan, Prospect
from streaming.fleet.processes import this_process
from streaming.fleet.settings import ModelSettings
from streaming.jobs.settings import UNLIMITED, QuotaSettings
from streaming.keys import FLEET_SLOT, fleet_key
from streaming.order import Priority
from streaming.redis.client import RedisClient
from telemetry.metrics import Metrics
from telemetry.tracing import Tracing


def key_of(secret: str, tenant: str, **more: Any) -> KeySettings:
    """The settings of a key."""
    return KeySettings(sha256=hashlib.sha256(secret.encode()).hexdigest(), tenant=tenant, **more)


def keyless(admin_token_sha256: str = "") -> Keyring:
    """No keys, also none in the store."""
    ring = Keyring({}, admin_token_sha256)
    ring.learn({})
    return ring


FAR_MS = 1 << 45
"""A plan of that time is as new as one can be, however long the test takes."""


@dataclass(frozen=True, slots=True)
class LocalApi:
    """A server with the model `sim` and no worker, and a client of it."""

    services: Services
    client: httpx2.AsyncClient

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx2.Response:
        """Send a JSON body; `headers` with underscores."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(path, json=body, headers=named)

    async def plan(self, lane: Priority, *, want: int = 1, at_ms: int = FAR_MS, **prospect: Any) -> None:
        """Publish what a scheduler expects of one lane, and that a worker is ready, and have this process read it."""
        plan = Plan(model="sim", want=want, reason="test", at_ms=at_ms, lanes={lane: Prospect(**prospect)})
        store = self.services.store_client
        await store.redis.hset(fleet_key("plan"), "sim", msgspec.json.encode(plan))
        self.services.waits.plans.learn({"sim": plan}, await store.now_ms())
        await self.work("ready")

    async def work(self, state: str) -> None:
        """Report a worker in this state, for longer than a test takes, and have this process read it."""
        worker = msgspec.structs.replace(this_process("worker", "worker-1"), life="1", state=state, model="sim")
        store = self.services.store_client
        await store.call("report", FLEET_SLOT, "worker:1", msgspec.json.encode(worker), 3_600)
        self.services.waits.readiness.learn([worker])

    def calibrate(self, lane: Priority, spread: float, *, limited: bool) -> None:
        """Past waits of jobs, with or without a time limit, were as long as predicted, give or take `spread` of it."""
        source = EstimateSource("sim", lane, "plan", limited)
        for number in reversed(range(MIN_ERRORS)):  # more and less in turns, the exact ones last
            off = (number // 2) / (MIN_ERRORS // 2 - 1) * (1 if number % 2 else -1)
            waited_s = 100 * (1 + spread * off)
            self.services.waits.errors.learn(Prediction(source, 100.0), Wait(100_000), waited_s)


@asynccontextmanager
async def api_in_process(
    client: RedisClient,
    keys: dict[str, KeySettings] | None = None,
    quotas: QuotaSettings = UNLIMITED,
    files: Path | None = None,
    admin_token: str = "",
    oidc: OidcSettings | None = None,
) -> AsyncIterator[LocalApi]:
    """Serve on a free port of loopback until the block ends. The services close `client`. `files`: folder of files;
    `admin_token`: of a server without keys."""
    token = hashlib.sha256(admin_token.encode()).hexdigest() if admin_token else ""
    services = Services(
        settings=ApiSettings(),
        store_client=client,
        models={"sim": ModelSettings(engine="sim")},
        keyring=Keyring(keys or {}, token, None if oidc is None else issuer_of(oidc)),
        metrics=Metrics.start("", "api"),
        tracing=Tracing(),
        version="0",
        quota_settings=quotas,
        files_settings=FilesSettings() if files is None else FilesSettings(dir=files),
    )
    await services.store.try_to_enter()
    listener = socket.create_server(("127.0.0.1", 0))
    guard = ConnectionGuard(services.settings)
    http = cast(type[asyncio.Protocol], partial(Connection, guard=guard))
    config = uvicorn.Config(build_app(services), http=http, log_config=None, access_log=False, lifespan="on", ws="none")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with httpx2.AsyncClient(base_url=url, timeout=30) as http_client:
        while not server.started:
            assert not serving.done(), serving.exception()
            await asyncio.sleep(0.01)
        try:
            yield LocalApi(services, http_client)
        finally:
            server.should_exit = True
            await serving
