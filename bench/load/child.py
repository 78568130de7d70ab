"""The load generator as a process of its own, so that neither its work nor its memory is the measuring program's."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from bench.load.plan import LoadPlan, StreamReading

SPARE_S = 60.0
"""For starting, warming up, and reading hundreds of thousands of tokens afterwards."""


class LoadFailed(RuntimeError):
    """The load generator itself came to grief: nothing is known of the system."""


def measure(plan: LoadPlan) -> StreamReading:
    """Carry out the plan. Bounded in time by its `limit_s`. Raises LoadFailed."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "bench.load"],
            input=msgspec.json.encode(plan),
            capture_output=True,
            timeout=4 * plan.limit_s + SPARE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise LoadFailed(f"no end after {error.timeout:.0f} s") from error
    if done.returncode:
        raise LoadFailed(done.stderr.decode(errors="replace")[-2000:])
    return msgspec.json.decode(done.stdout, type=StreamReading)
