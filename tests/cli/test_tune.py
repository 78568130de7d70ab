"""`penstock tune`: a server with a known curve is measured, and a Penstock gets the lines of its settings."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from house import eventually

from cli.tune import MeasuredSweep
from planner.tuning import LevelReading

pytestmark = pytest.mark.slow

T_MEM, T_COMP = 0.010, 0.002
"""Of a step: its knee is 4.5 * 5 = 22.5, so 32."""


class CurveServer:
    """A server whose steps take T_MEM + T_COMP * requests at once, and whose answers have `max_tokens` tokens."""

    def __init__(self) -> None:
        self.owner, self.refuses = "penstock", ""
        self.most = 1 << 20
        """Requests after which it refuses all."""
        self.dies_after, self.hangs = 1 << 20, False
        """Requests after which it no longer answers: it closes, or it keeps silent."""
        self.t_mem, self.context = T_MEM, 0
        self.closes = False
        """Whether it closes a connection after each answer, without saying so, as llama-server does."""
        self.bodies: list[dict[str, Any]] = []
        self.port = 0
        self._running = 0
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> CurveServer:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._connected, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for task in (tasks := asyncio.all_tasks(self._loop)):
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(server.wait_closed())
        self._loop.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                size = int(head.partition("content-length: ")[2].partition("\r\n")[0] or 0)
                body = await reader.readexactly(size)
                if head.startswith("get"):
                    await self._whole(
                        writer, {"data": [{"id": "m", "owned_by": self.owner, "context_length": self.context}]}
                    )
                else:
                    await self._answer(writer, json.loads(body))
                    if self.closes:
                        return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _whole(self, writer: asyncio.StreamWriter, value: object, status: str = "200 OK") -> None:
        data = json.dumps(value).encode()
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()

    async def _answer(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.bodies.append(body)
        if len(self.bodies) > self.dies_after:
            await asyncio.sleep(3600 if self.hangs else 0)
            raise ConnectionError
        if self.refuses in (*body, "all") or len(self.bodies) > self.most:
            await self._whole(writer, {"error": "no"}, "400 Bad Request")
            return
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        self._running += 1
        try:
            for number in range(body["max_tokens"]):
                await asyncio.sleep(self.t_mem + T_COMP * self._running)
                self._write(writer, json.dumps({"choices": [{"delta": {"content": f" t{number}"}}]}))
        finally:
            self._running -= 1
        self._write(writer, json.dumps({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}))
        self._write(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    @staticmethod
    def _write(writer: asyncio.StreamWriter, data: str) -> None:
        event = f"data: {data}\n\n".encode()
        writer.write(b"%x\r\n%b\r\n" % (len(event), event))


@pytest.fixture
def server() -> Iterator[CurveServer]:
    with CurveServer() as found:
        yield found


def tuned(told: Any, server: CurveServer, *words: str) -> dict[str, Any]:
    line = ["tune", "frontier", "--url", server.url, "--in", "32", "--out", "4", "--repeats", "1", *words, "--json"]
    said = told(*line)
    assert "measuring m with 1, 2, 4" in said.err and "a pass" in said.err
    return json.loads(said.out)


def test_a_frontier_of_a_known_curve(told: Any, server: CurveServer) -> None:
    """Throughput rises with concurrency, every request differs, and lengths are those that were asked for."""
    found = tuned(told, server, "--requests", "32", "--max", "16")
    points = {point["concurrency"]: point for point in found["points"]}
    assert set(points) == {1, 2, 4, 8, 16} and all(point["failed"] == 0 for point in points.values())
    assert points[16]["tokens_s"] > 3 * points[1]["tokens_s"]
    assert points[1]["requests_s"] == pytest.approx(points[1]["tokens_s"] / 4)
    prompts = [body["messages"][0]["content"] for body in server.bodies]
    assert len(set(prompts)) == len(prompts) and {body["max_tokens"] for body in server.bodies} == {4}
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in server.bodies)
    assert found["knee"]["confidence"] is None
    assert found["curve"] == [[point, round(points[point]["tokens_s"], 1)] for point in sorted(points)]
    wanted, knee = found["recommended"], found["knee"]
    assert wanted["max_batch_size"] == (None if knee["is_beyond"] else knee["concurrency"])


@pytest.mark.parametrize("change", [{"refuses": "ignore_eos"}, {"closes": True}])
def test_a_server_of_another_kind_fails_no_request(change: dict[str, Any], told: Any, server: CurveServer) -> None:
    """One that refuses a field is asked without it; one that closes after each answer loses none."""
    vars(server).update(change)
    found = tuned(told, server, "--requests", "8", "--max", "4")
    assert all(point["failed"] == 0 for point in found["points"])


def yields(monkeypatch: pytest.MonkeyPatch, *rates: float) -> None:
    """The measurement has found these tokens a second at 1, 2, 4, ... requests at once."""
    readings = {2**at: [LevelReading(2**at, 8, 0, rate, rate / 4, 0.1, 1.0, [])] * 2 for at, rate in enumerate(rates)}
    monkeypatch.setattr("cli.tune.measured", lambda *_: MeasuredSweep(readings))


@pytest.mark.parametrize(("owner", "shown"), [("penstock", True), ("llamacpp", False)])
def test_a_penstock_gets_the_lines_of_its_settings(
    told: Any, server: CurveServer, monkeypatch: pytest.MonkeyPatch, owner: str, shown: bool
) -> None:
    """Its cache holds one whole context of the model at least. All get the table and the advice."""
    server.owner, server.context = owner, 8192
    yields(monkeypatch, 100, 180, 182, 183)
    words = "--in 32 --out 4 --repeats 1 --requests 16 --max 8 --card opt-125m --gpu a100-40gb"
    page = told(f"tune frontier --url {server.url} {words}").out
    assert "requests at once" in page and "Set a batch of 2" in page and "% sure" in page
    assert ("Put this into penstock.toml" in page) == shown
    assert ("# engine sim: options.slots = 2, options.kv_tokens = 8192" in page) == shown


def test_requests_that_fail_end_it(told: Any, server: CurveServer) -> None:
    server.refuses = "all"
    said = told("tune frontier --url", server.url, code=1).err
    assert "1 of 1 requests failed" in said and "status 400" in said


def test_what_was_measured_before_a_failure_counts(told: Any, server: CurveServer) -> None:
    """Six requests probe it, then 1 and 2 clients ask 8 and 16 times; with 4 it breaks down."""
    server.most = 6 + 8 + 16
    found = tuned(told, server, "--requests", "32", "--max", "8")
    assert [point["concurrency"] for point in found["points"]] == [1, 2] and found["left_out"] == [4, 8]
    assert "4, 8 at once were not measured: too many requests failed" in found["advice"]


def test_a_server_that_dies_or_hangs_ends_it_within_the_budget(told: Any, server: CurveServer) -> None:
    """What it answered before counts, if that is two concurrencies."""
    server.dies_after, server.hangs = 6 + 8 + 16, True
    began = time.monotonic()
    found = tuned(told, server, "--requests", "16", "--max", "8", "--budget", "8s")
    assert [point["concurrency"] for point in found["points"]] == [1, 2] and time.monotonic() - began < 60
    assert found["left_out"] == [4, 8] and "4, 8 at once were not measured: the budget ended" in found["advice"]


@pytest.mark.parametrize(
    ("words", "answered", "shows"),
    [
        (["frontier", "--requests", "16", "--max", "8", "--repeats", "1"], 6 + 8 + 16, "it was interrupted"),
        (["goodput", "--requests", "20"], 1 + 1 + 32 + 20, "The search was interrupted"),
    ],
)
def test_ctrl_c_shows_what_was_measured(server: CurveServer, words: list[str], answered: int, shows: str) -> None:
    """And what it did from the first second on: each phase is a line in a pipe."""
    out, err = interrupted(server, answered, *words, "--json")
    found = json.loads(out)
    assert found.get("points") or found["rates"]
    assert shows in found["advice"] and "warming up" in err and "probing" in err


def interrupted(server: CurveServer, answered: int, *words: str) -> tuple[str, str]:
    """What it says after Ctrl-C, sent once the server has answered so often and then hangs."""
    server.dies_after, server.hangs = answered, True
    command = [sys.executable, "-m", "cli", "tune", *words, "--url", server.url, "--in", "32", "--out", "4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        eventually(lambda: len(server.bodies) > answered, seconds=60)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    return out, err


def test_a_budget_without_a_unit_or_for_no_pass_is_refused(told: Any, server: CurveServer) -> None:
    line = f"tune frontier --url {server.url} --in 32 --out 4 --budget"
    assert "write 90s, 10m" in told(line, "2", code=2).err and not server.bodies
    server.t_mem = 0.15
    assert "of the budget are left after the probes" in told(line, "3s", code=2).err


@pytest.mark.parametrize(("command", "limit"), [("frontier", "--max 2"), ("goodput", "--ttft-ms 9000")])
def test_without_an_url_it_asks_where_other_commands_do(
    told: Any, server: CurveServer, monkeypatch: pytest.MonkeyPatch, command: str, limit: str
) -> None:
    """A goodput of so few requests, which would all run at once before one ends, tells of no high rate."""
    monkeypatch.setenv("PENSTOCK_URL", server.url.removesuffix("/v1"))
    found = json.loads(told(f"tune {command} {limit} --requests 12 --in 16 --out 4 --json").out)
    assert found["url"] == server.url
    if command == "goodput":
        assert not found["is_bisected"] and "more --requests" in found["advice"]


def test_the_rate_that_is_served_in_time(told: Any, server: CurveServer) -> None:
    """Steps of 10 ms and 2 ms for each request at once: 60 ms a token allow at most 25 at once."""
    words = ["--requests", "40", "--in", "16", "--out", "4", "--ttft-ms", "300", "--tpot-ms", "60"]
    found = json.loads(told("tune goodput --url", server.url, *words, "--json").out)
    kept_rates = [each["requests_s"] for each in found["rates"] if each["kept_both"] >= 0.9]
    assert found["is_bisected"] and found["requests_s"] == max(kept_rates) > 1
    assert any(each["kept_both"] < 0.9 for each in found["rates"])
    assert "keep 300 ms to the first token and 60 ms for each further one for 90 % of them" in found["advice"]
    told("tune goodput --requests 2 --url", server.url, code=2)


def test_a_server_that_dies_tells_no_rate(told: Any, server: CurveServer) -> None:
    """Its failed requests are not those of a rate that is too high."""
    server.dies_after = 60
    words = ["--requests", "20", "--in", "16", "--out", "4", "--ttft-ms", "300", "--tpot-ms", "60"]
    assert "1 of 1 requests failed" in told("tune goodput --url", server.url, *words, code=1).err
