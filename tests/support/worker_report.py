"""Workers as they report themselves to the scheduler."""

from __future__ import annotations

from typing import Any

from streaming.fleet.process import Process


def a_worker(name: str, state: str = "ready", slots: int = 0, running: int = 0, **load: Any) -> Process:
    """A report with this load."""
    about: dict[str, Any] = {"role": "worker", "id": name, "life": name, "pid": 1, "host": "h", "since": 0.0}
    return Process(**about | {"state": state, "slots": slots, "running": running} | load)
