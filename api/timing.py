"""GET /v1/jobs/{id}/timing: latency breakdown of one job, by stage, with the clocks' error bounds."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from api.admission import services_of
from api.jobs import as_json, job_headers, own_record
from streaming.jobs.records import Delivered, JobRecord, with_delivery
from telemetry import latency

LATENCIES = ("time_to_first_token_ms", "gateway_time_to_first_token_ms", "time_per_output_token_ms")
"""Fields of a job's timing."""


async def show(request: Request) -> Response:
    """See where a job's time went.

    GET /v1/jobs/{id}/timing: the stages measured so far; all of them once the job has ended.
    """
    services, record = services_of(request), await own_record(request)
    if record.rowless:
        record = await services.job_reader.record(record.job.id, rows=False)
    delivered = record.delivered or services.deliveries.of(record.job.id)
    return as_json(timing_object(record, delivered), headers=job_headers(record))


def timing_object(record: JobRecord, delivered: Delivered | None) -> dict[str, Any]:
    """Render the breakdown: times in milliseconds (None with a reason), timestamps in Unix seconds of Redis time."""
    stamps = with_delivery(record.stamps, delivered) if delivered else record.stamps
    found = latency.split(stamps, over=record.state.final, unsent=_unsent(record, delivered))
    reasons = dict(found.reasons)
    if delivered and delivered.whole:
        reasons[latency.EGRESS_FIRST.name] = "the answer was sent in one piece"
    generated = record.terminal.generated if record.terminal else None
    return {
        "id": record.job.id,
        "object": "job.timing",
        "status": record.state.value,
        "attempts": record.attempt,
        "parts_ms": {name: _ms(time) for name, time in found.parts.items()},
        "reasons": reasons,
        "groups_ms": {name: _ms(found.group(name)) for name in latency.GROUPS},
        "sum_ms": _ms(found.total),
        "end_to_end_ms": _ms(found.end_to_end),
        "until": found.until or None,
        **_latencies(record, stamps, delivered),
        "clock_error_ms": {
            "api": _ms(max(record.job.clock_us, delivered.clock_us if delivered else 0)),
            "worker": _ms(generated.clock_us if generated else 0),
        },
        "stamps": {name: getattr(stamps, name) / 1_000_000 or None for name in latency.STAMPS},
    }


def _unsent(record: JobRecord, delivered: Delivered | None) -> str:
    """Return why there is no timestamp of sending the answer, or its end."""
    if delivered:
        return "the answer broke off before its end"
    if not record.job.reply_to:
        return "the request did not wait for the answer"
    return "not noted: the client left or waited too long, its API process was lost, or this was a moment ago"


def _latencies(record: JobRecord, stamps: latency.Stamps, delivered: Delivered | None) -> dict[str, float | None]:
    """Return the latencies at this server, without the network to the client; in the engine, if no request waited."""
    whole, tokens = bool(delivered and delivered.whole), record.terminal.usage.completion if record.terminal else 0
    sent, first, last = stamps.received, stamps.first_sent, stamps.last_sent
    if not sent:
        return dict.fromkeys(LATENCIES)
    if delivered is None:
        first, last = stamps.first_token, stamps.last_token
    got = stamps.last_got if whole else stamps.first_got
    shown = latency.first_seen(stamps, whole=whole)
    per_token = latency.time_per_output_token(first, last, tokens) if first and last else None
    seen, at_gateway = (latency.time_to_first_token(sent, at) if at else None for at in (shown, got))
    return dict(zip(LATENCIES, map(_ms, (seen, at_gateway, per_token)), strict=True))


def _ms(us: float | None) -> float | None:
    return None if us is None else round(us / 1000, 3)
