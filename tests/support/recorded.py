"""Records of requests as tests make them: times in milliseconds after the window's beginning."""

from __future__ import annotations

from telemetry.records.schema import DeliveryRecord, RequestRecord, SampleRecord

BEGIN_S = 1_800_000_000
_BEGIN_US = BEGIN_S * 1_000_000


def us(ms: float) -> int:
    """A time of the window in microseconds."""
    return _BEGIN_US + round(ms * 1000)


def request(
    number: int,
    at: float = 0.0,
    *,
    wait: float = 1.0,
    prefill: float = 10.0,
    per_token: float = 5.0,
    tokens: int = 11,
    prompt: int = 20,
    gate: float = 1.0,
    model: str = "m",
    lane: str = "standard",
    tenant: str = "t",
    by: str = "worker-1",
) -> RequestRecord:
    """A completed request that was received `at`."""
    claimed = at + 1.0 + wait
    first = claimed + gate + prefill
    last = first + per_token * (tokens - 1)
    return RequestRecord(
        id=f"job_{number:032x}", ended_us=us(last + 1), state="completed", model=model, lane=lane, tenant=tenant, by=by,
        received_us=us(at), accepted_us=us(at + 1.0), started_us=us(claimed), claimed_us=us(claimed),
        released_us=us(claimed + gate), scheduled_us=us(claimed + gate), first_us=us(first), last_us=us(last),
        prompt_tokens=prompt, completion_tokens=tokens, attempts=1,
    )  # fmt: skip


def delivery(record: RequestRecord, late: float = 1.0) -> DeliveryRecord:
    """Of a streamed request, each token `late` after the engine gave it."""
    first, last = record.first_us + round(late * 1000), record.last_us + round(late * 1000)
    sent = {"first_got_us": first, "first_sent_us": first, "last_got_us": last, "last_sent_us": last}
    return DeliveryRecord(id=record.id, by="api-1", **sent)


def sample(role: str, process: str, at: float, cpu_s: float, **more: float) -> SampleRecord:
    """Of a process, `at` that time."""
    return SampleRecord(at_us=us(at), role=role, process=process, pid=1, cpu_s=cpu_s, **more)  # type: ignore[arg-type]
