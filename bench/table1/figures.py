"""From answers to the table's rows: pure arithmetic."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from bench.report import columns
from bench.stats import quantile
from bench.table1.client import ConcurrencyLevel

TIMEOUT = "Timeout"

COLUMNS = columns("""
    server: server; streams: concurrency; ttft_ms: TTFT ms; ttft_p99_ms: p99 .1; tbt_ms: TBT ms .2;
    tbt_p99_ms: p99 .2; tokens_per_s: tok/s .0; finished: finished; asked: of
""")


def row(server: str, level: ConcurrencyLevel) -> dict[str, Any]:
    """TTFT and TBT as the mean over the requests that finished, as in the paper; TBT is one request's mean time between
    tokens, (t6 - t5) / (Ng - 1)."""
    latencies = [answer.latency for answer in level.finished]
    ttft = sorted(1e3 * latency.ttft for latency in latencies)
    tbt = sorted(1e3 * value for latency in latencies if (value := latency.tpot) is not None)
    found: dict[str, Any] = {
        "server": server,
        "streams": level.streams,
        "finished": len(latencies),
        "asked": level.asked,
        "timeout": level.timed_out,
        "faults": sorted({answer.fault for answer in level.answers if answer.fault})[:3],
        "own_cpu": level.own_cpu,
    }
    if level.timed_out:
        return found | dict.fromkeys(("ttft_ms", "tbt_ms"), TIMEOUT)
    return found | {
        "ttft_ms": fmean(ttft),
        "ttft_p99_ms": quantile(ttft, 0.99),
        "tbt_ms": fmean(tbt) if tbt else None,
        "tbt_p99_ms": quantile(tbt, 0.99) if tbt else None,
        "tokens_per_s": sum(latency.tokens for latency in latencies) / level.seconds,
    }
