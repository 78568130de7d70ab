"""The client's I/O against servers that answer what no Penstock does: every failure is a PenstockError."""

from __future__ import annotations

import http.server
from collections.abc import Iterator

import pytest
from house import free_port
from http_serving import serving_http

from penstock.client import FIRST_PATIENCE_S, PATIENCE_S, AsyncPenstockClient, NoAnswer, Pause, PenstockClient


class Garbled(http.server.BaseHTTPRequestHandler):
    """Announces a compressed body and sends another."""

    def do_GET(self) -> None:
        kind = "text/event-stream" if self.path.endswith("/events") else "application/json"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", "7")
        self.end_headers()
        self.wfile.write(b"no gzip")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with serving_http(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Garbled)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


async def test_a_compressed_body_that_broke_is_a_broken_connection(url: str) -> None:
    with PenstockClient(url, patience_s=0) as client:
        with pytest.raises(NoAnswer):
            client.get("job_1")
        with pytest.raises(NoAnswer):
            list(client.stream("job_1"))
    async with AsyncPenstockClient(url, patience_s=0) as other:
        with pytest.raises(NoAnswer):
            await other.get("job_1")
        with pytest.raises(NoAnswer):
            [event async for event in other.stream("job_1")]


@pytest.mark.slow
def test_an_address_where_nothing_runs_is_told_soon() -> None:
    """With the default patience, which is for servers that were there before."""
    pauses: list[Pause] = []
    url = f"http://127.0.0.1:{free_port()}"
    with PenstockClient(url, on_retry=pauses.append) as client, pytest.raises(NoAnswer) as told:
        client.submit({"model": "m"})
    assert str(told.value).startswith(f"no penstock answers at {url}: ") and "refused" in told.value.cause
    assert len(pauses) > 1 and sum(pause.seconds for pause in pauses) < FIRST_PATIENCE_S < PATIENCE_S / 10
