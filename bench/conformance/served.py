"""Served: an ASGI application of this process on a port of its own, in a thread, as long as a context lasts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

from bench.ports import free_port
from bench.processes import Died

STOP_TIMEOUT_S = 30.0
START_INTERVAL_S = 0.02


@contextmanager
def serving(app: Starlette) -> Iterator[int]:
    """Serve until the end of the context; the port on 127.0.0.1. Raises Died."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise Died("the adapter did not start")
            time.sleep(START_INTERVAL_S)
        yield port
    finally:
        server.should_exit = True
        thread.join(STOP_TIMEOUT_S)
