"""A real HTTP or HTTPS receiver of webhooks, on loopback, that answers as it is told and keeps what it was sent; and a
way to hear the next attempt without waiting for it."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Any

from house import House
from http_serving import QuietHandler, serving_http
from redis import Redis, WatchError

from streaming.ids import partition_of
from streaming.keys import partition_key


@dataclass
class Receiver:
    """`answer` is given the number of the request, from 1, and returns status and headers; it may take its time."""

    answer: Callable[[int], tuple[int, dict[str, str]]] = lambda _: (204, {})
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    """Headers (lower case) and body of each request."""
    paths: list[str] = field(default_factory=list)
    url: str = ""
    port: int = 0

    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.got]

    def ids(self) -> list[str]:
        return [headers["webhook-id"] for headers, _ in self.got]


@contextmanager
def receiving(receiver: Receiver, tls: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    """Serve within the block; whose handshake fails is not heard."""
    lock = threading.Lock()

    class Handler(QuietHandler):
        def do_POST(self) -> None:  # noqa: N802 - the name http.server looks for
            size = int(self.headers["content-length"])
            body = self.rfile.read(size)
            if len(body) < size:
                return  # the sender was killed in the middle
            with lock:
                receiver.paths.append(self.path)
                receiver.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
                number = len(receiver.got)
            status, headers = receiver.answer(number)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    with serving_http(server):
        receiver.port = server.server_port
        receiver.url = f"{'https' if tls else 'http'}://127.0.0.1:{receiver.port}/hook"
        yield receiver


def due_now(house: House, message: dict[str, Any]) -> None:
    """The time of a message's next attempt has come, unless one has been begun since it was looked at."""
    name, partition = message["id"], partition_of(message["id"], "msg_")
    assert partition is not None
    hook, due = partition_key(partition, "hook", name), partition_key(partition, "hook_due", "test")
    with Redis.from_url(house.redis_url) as redis, redis.pipeline() as pipeline, suppress(WatchError):
        pipeline.watch(hook)
        if int(pipeline.hget(hook, "attempt") or 0) == message["attempts"]:
            pipeline.multi()
            pipeline.zadd(due, {name: 1}, xx=True)
            pipeline.execute()
