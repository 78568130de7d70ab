"""/admin/overview: what an operator needs to know now, in one answer. Needs an admin key.

All who ask within a second get the same answer, so any number of open consoles costs what one does. Nothing is read
while nobody asks.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from api.admin.pools import MAX_ACTIONS, action_object, pool_object, pools_view
from api.admin.rates import Rates, RateWindow, read
from api.admin.verdict import Situation, assess
from api.openai.rendering import to_json
from api.services import Services
from streaming.errors import Unavailable
from streaming.fleet.process import Process
from streaming.jobs.dead_letters import DeadLetters
from streaming.store.memory import ADMISSION_SHARE

MAX_AGE_S = 0.9
MAX_POINTS = 150
"""Points of the history: five minutes of a console that asks every two seconds."""
MAX_LETTERS = 100
"""Dead letters that are counted."""


class LiveOverview:
    """The newest overview of this process, shared by all who ask, and the points of the recent ones."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._lock = asyncio.Lock()
        self._rates = RateWindow()
        self._points: deque[dict[str, Any]] = deque(maxlen=MAX_POINTS)
        self._body, self._made_at = b"", 0.0

    async def body(self) -> bytes:
        """Return the overview as JSON, at most MAX_AGE_S old. Raises Unavailable."""
        async with self._lock:
            if not self._body or time.monotonic() - self._made_at > MAX_AGE_S:
                self._body = to_json(await self._made())
                self._made_at = time.monotonic()
            return self._body

    async def _made(self) -> dict[str, Any]:
        services = self._services
        view, processes, actions, letters, reading = await asyncio.gather(
            pools_view(services, services.models),
            services.fleet.processes(),
            services.plans.actions(MAX_ACTIONS),
            DeadLetters(services.store_client).recent(MAX_LETTERS),
            asyncio.to_thread(lambda: read(services.metrics.collect(), time.time())),
        )
        lead, rates = view.lead, self._rates.add(reading)
        pools = [pool_object(services, model, view) for model in services.models]
        memory = _memory(services)
        now = Situation(
            pools=pools,
            has_leader=bool(lead.holder),
            store_refusal=_refusal(services),
            memory_share=memory["share"],
            dead_letters=len(letters),
            lapsed=rates.lapsed,
            failed=rates.failed,
        )
        tokens_per_s = sum(process.tokens_per_s for process in processes)
        self._points.append(_point(reading.at, rates, tokens_per_s, pools))
        return {
            "object": "overview",
            "at": reading.at,
            "verdict": asdict(assess(now)),
            "rates": _rates(rates, tokens_per_s),
            "pools": pools,
            "leader": {"id": lead.holder, "epoch": lead.epoch} if lead.holder else None,
            "actions": [action_object(entry) for entry in actions],
            "processes": [_process(process) for process in processes],
            "store": memory,
            "dead_letters": {"count": len(letters), "more": len(letters) == MAX_LETTERS},
            "history": list(self._points),
        }


async def show(request: Request) -> Response:
    """GET /admin/overview: the verdict, rates, pools, processes and the store."""
    overview: LiveOverview = request.app.state.overview
    return Response(await overview.body(), media_type="application/json")


def _refusal(services: Services) -> str:
    try:
        return services.refusal
    except Unavailable as error:
        return str(error)


def _memory(services: Services) -> dict[str, Any]:
    """The memory of all servers of the store. `share`: of what admission may fill; null without a limit."""
    memories = services.headroom.memories
    used, owed = sum(each.used for each in memories), sum(sum(each.owed.values()) for each in memories)
    allowed = sum(each.allowed for each in memories) if all(each.allowed for each in memories) else 0
    share = (used + owed) / (ADMISSION_SHARE * allowed) if allowed else None
    return {"used_bytes": used, "reserved_bytes": owed, "allowed_bytes": allowed or None, "share": share}


def _rates(rates: Rates, tokens_per_s: float) -> dict[str, Any]:
    return {
        "window_s": rates.window_s,
        "first_token_ms": _percentiles(rates.first_token_ms),
        "per_token_ms": _percentiles(rates.per_token_ms),
        "tokens_per_s": tokens_per_s,
        "jobs_per_s": rates.ended_per_s,
        "failed": rates.failed,
        "open_streams": rates.streams,
    }


def _percentiles(pair: tuple[float, float] | None) -> dict[str, float] | None:
    return None if pair is None else {"p50": pair[0], "p95": pair[1]}


def _point(at: float, rates: Rates, tokens_per_s: float, pools: list[dict[str, Any]]) -> dict[str, Any]:
    """One point of the charts."""
    lanes = [lane for pool in pools for lane in pool["lanes"].values()]
    return {
        "at": at,
        "tokens_per_s": tokens_per_s,
        "first_token_ms": rates.first_token_ms[0] if rates.first_token_ms else None,
        "per_token_ms": rates.per_token_ms[0] if rates.per_token_ms else None,
        "waiting": sum(lane["waiting"] for lane in lanes),
        "running": sum(lane["running"] for lane in lanes),
    }


def _process(process: Process) -> dict[str, Any]:
    return {
        "role": process.role,
        "id": process.id,
        "host": process.host,
        "pid": process.pid,
        "state": process.state,
        "away": list(process.away),
        "since": process.since,
        "model": process.model or None,
        "slots": process.slots if process.role == "worker" else None,
        "running": process.running if process.role == "worker" else None,
        "waiting": process.waiting if process.role == "worker" else None,
        "tokens_per_s": process.tokens_per_s if process.role == "worker" else None,
        "kv_tokens": process.kv_tokens or None,
        "kv_used": process.kv_used if process.kv_tokens else None,
    }
