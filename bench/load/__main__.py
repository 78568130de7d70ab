"""`python -m bench.load`: carry out the plan that comes in as JSON, write what was seen as JSON."""

from __future__ import annotations

import asyncio
import sys

import msgspec
import uvloop

from bench.load.plan import LoadPlan
from bench.load.run import LoadRun


def main() -> int:
    """Returns the exit code."""
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=LoadPlan)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        reading = runner.run(LoadRun(plan).run())
    sys.stdout.buffer.write(msgspec.json.encode(reading))
    return 0


if __name__ == "__main__":
    sys.exit(main())
