"""kill -9 in mid-stream: a worker, an API process, the server, each with the reader's text exact to the byte.

The whole fault matrix is a suite of its own; these are its most telling rows.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Container, Iterator
from functools import partial
from typing import Any

import pytest
from batching import said
from house import House, eventually, free_port, redis_process
from redis import Redis
from stream_reader import StreamReader

from streaming.keys import partition_key
from workers.engines.sim.answers import count_tokens, token_text

pytestmark = pytest.mark.slow

TOKENS = 400


def ask(house: House, text: str) -> StreamReader:
    body = {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": TOKENS, "stream": True}
    return StreamReader(house.port, "/v1/chat/completions", body)


def has_some(readers: list[StreamReader]) -> Callable[[], bool]:
    return lambda: all(len(reader.text()) > 200 for reader in readers)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_a_killed_workers_streams_go_on_without_a_lost_or_doubled_token(empty_house: House) -> None:
    """Readers on the same open connections get the rest from another worker, exactly."""
    house = empty_house
    house.environ["PENSTOCK_SIM_STEP_MS"] = "5"
    house.start("scheduler")
    first = house.start("workers", "--id", "worker-1")
    house.start_api()
    house.wait_ready()
    readers = [ask(house, f"kill {number}") for number in range(8)]
    eventually(has_some(readers))
    house.start("workers", "--id", "worker-2")
    kill(first.pid)
    for number, reader in enumerate(readers):
        reader.join(60)
        assert reader.is_whole and not reader.error and reader.text() == said(f"kill {number}", TOKENS)
        job = json.loads(house.get(f"/v1/jobs/{reader.job}")[1])
        assert job["attempts"] == 2 and job["usage"]["completion_tokens"] == TOKENS


def test_a_prompt_whose_answer_had_ended_is_counted_after_its_worker_was_killed(empty_house: House) -> None:
    """Two prompts of one job, the first answered by its stop string; then both workers in turn are killed."""
    house, prompts = empty_house, ["a first prompt of some length", "and a second one that is longer than the first is"]
    house.environ["PENSTOCK_SIM_STEP_MS"] = "5"
    workers = {name: house.start("workers", "--id", name) for name in ("worker-1", "worker-2", "worker-3")}
    house.start_api()
    house.wait_ready()
    asked = {"model": "sim", "prompt": prompts, "max_tokens": TOKENS, "stop": [token_text(prompts[0], 5)]}
    job_id = json.loads(house.post("/v1/completions", asked, {"Prefer": "respond-async"})[2])["id"]
    for _ in range(2):
        name = str(eventually(lambda: running_at(house, job_id, workers)))
        before = steps_in(house)
        eventually(lambda before=before: steps_in(house) > before + 30)  # more than the first answer has tokens
        workers.pop(name).kill()
    eventually(lambda: json.loads(house.get(f"/v1/jobs/{job_id}")[1])["status"] == "completed")
    job = json.loads(house.get(f"/v1/jobs/{job_id}")[1])
    assert job["attempts"] == 3
    assert [choice["finish_reason"] for choice in job["result"]["choices"]] == ["stop", "length"]
    assert job["usage"]["prompt_tokens"] == sum(count_tokens(prompt) for prompt in prompts)


def running_at(house: House, job_id: str, among: Container[str]) -> str:
    """The worker that runs a job now, if it is one of these."""
    job = json.loads(house.get(f"/v1/jobs/{job_id}")[1])
    name = job["attempt_log"][-1]["worker"] if job["status"] == "in_progress" and job["attempt_log"] else ""
    return name if name in among else ""


def steps_in(house: House) -> int:
    """Steps in the logs of all workers."""
    with Redis.from_url(house.redis_url) as redis:
        return sum(redis.xlen(key) for key in redis.scan_iter(partition_key(0, "log", "*")))


def test_a_killed_api_process_is_left_for_another_with_the_cursor(empty_house: House) -> None:
    """The job goes on; another API process gives every following token, none twice."""
    house = empty_house
    house.environ["PENSTOCK_SIM_STEP_MS"] = "5"
    house.start("workers")
    other = free_port()
    doomed = house.start_api()
    house.start_api(other)
    house.wait_ready()
    reader = ask(house, "api")
    eventually(has_some([reader]))
    kill(doomed.pid)
    reader.join(30)
    assert not reader.is_whole and said("api", TOKENS).startswith(reader.text())
    whole = list(_deltas(house.get(f"/v1/jobs/{reader.job}/events", other)[1]))
    assert "".join(text for _, text in whole) == said("api", TOKENS)
    cursor = next(cursor for place, (cursor, _) in enumerate(whole, 1) if len(said("api", place)) >= len(reader.text()))
    rest = house.get(f"/v1/jobs/{reader.job}/events?after={cursor}", other)[1]
    assert reader.text() + "".join(text for _, text in _deltas(rest)) == said("api", TOKENS)


def _deltas(data: bytes) -> Iterator[tuple[str, str]]:
    """The id and the text of every delta event."""
    for block in data.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if fields.get("event") == "delta":
            yield fields["id"], json.loads(fields["data"])["text"]


def test_a_killed_server_comes_back_with_everything(tmp_path: Any) -> None:
    """With the append-only file, jobs and tokens survive the server; readers and workers wait and go on."""
    port = free_port()
    options = ("--appendonly", "yes", "--appendfsync", "everysec")
    with redis_process(tmp_path, port, *options) as url, House(url, tmp_path) as house:
        house.environ["PENSTOCK_SIM_STEP_MS"] = "5"
        house.environ["PENSTOCK_REDIS_LEASE_MS"] = "5000"
        house.start_all("scheduler", "workers")
        reader = ask(house, "redis")
        eventually(has_some([reader]))
        kill(server_pid(port))
        refused = eventually(lambda: status_of_put(house) == 503)
        assert refused
        with redis_process(tmp_path, port, *options):
            reader.join(60)
            assert reader.is_whole and not reader.error and reader.text() == said("redis", TOKENS)
            eventually(lambda: status_of_put(house) == 200)


def server_pid(port: int) -> int:
    """The process that listens on a port of this machine."""
    with Redis(port=port) as client:
        return int(client.info("server")["process_id"])


def status_of_put(house: House) -> int:
    body = json.dumps({"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
    connection = http.client.HTTPConnection("127.0.0.1", house.port, timeout=30)
    try:
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()
        time.sleep(0.02)


def test_a_house_started_before_its_server_waits_for_it(tmp_path: Any) -> None:
    """Redis down at the start: processes live, the door says 503 and when to try again; then all serve."""
    port = free_port()
    with House(f"redis://127.0.0.1:{port}/0", tmp_path) as house:
        house.start("scheduler")
        house.start("workers")
        house.start_api()
        status, headers, body = house.post("/v1/jobs", {"model": "sim", "messages": [{"role": "user", "content": "x"}]})
        assert status == 503 and int(headers["retry-after"]) >= 1
        assert json.loads(body)["error"]["code"] == "store_unavailable"
        ready, reason = house.get("/readyz")
        assert ready == 503 and b"Redis" in reason
        for method, path in (("GET", ""), ("POST", "/cancel")):  # of which only one can have changed something
            status, _, body = house.request(method, f"/v1/jobs/job_00{30 * '0'}{path}")
            assert status == 503 and (b"nothing was changed" in body) is (method == "GET"), body
        with redis_process(tmp_path, port, "--appendonly", "yes"):
            house.wait_ready()
            eventually(lambda: status_of_put(house) == 200)


@pytest.mark.parametrize(("on_disconnect", "state"), [("cancel", "cancelled"), ("continue", "completed")])
def test_a_reader_that_takes_nothing_is_cut_off_and_told_of_once(
    empty_house: House, on_disconnect: str, state: str
) -> None:
    """Its job ends as it asked for, its connection is gone, and the log has one line about it: of two hundred who stall
    together, each line more holds up every other stream."""
    house = empty_house
    house.environ |= {"PENSTOCK_API_SEND_TIMEOUT_S": "0.3", "PENSTOCK_SIM_STEP_MS": "1"}
    house.start_all("workers")
    body = {"model": "sim", "prompt": "x", "max_tokens": 3000, "stream": True}
    asked = json.dumps({**body, "queue": {"on_disconnect": on_disconnect}}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", house.port))
        reader.sendall(f"{head}Content-Length: {len(asked)}\r\n\r\n".encode() + asked)
        eventually(lambda: "took nothing for too long" in house.log("api"))
        reader.settimeout(30)
        taken = b"".join(iter(partial(reader.recv, 1 << 16), b""))  # what the kernel had; then it is over
        assert b"data: " in taken and b"[DONE]" not in taken
    eventually(lambda: json.loads(house.get("/v1/jobs")[1])["data"][0]["status"] == state, seconds=60)
    by = json.loads(house.get("/v1/jobs")[1])["data"][0]["cancelled_by"]
    assert by == ("slow_reader" if state == "cancelled" else None)
    log = house.log("api")
    assert log.count("took nothing for too long") == 1
    assert "client left" not in log and "without completing" not in log
