"""Every program of examples/ as a reader would run it, against real processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from batching import said
from house import House, eventually, free_port, module_house, redis_process
from redis import Redis

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SECRET = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="
OF_OTHERS = {"engine"}
"""Folders of examples that have their own tests."""


house = module_house("workers", "offline")
"""One of each role, with the settings that they have without any."""


def environ_of(house: House, **more: str) -> dict[str, str]:
    return {**os.environ, "PENSTOCK_URL": house.url, "PYTHONPATH": str(ROOT), **more}


def run(house: House, name: str, **environ: str) -> str:
    """A program to its end. Returns what it printed."""
    command = [sys.executable, EXAMPLES / name]
    done = subprocess.run(
        command, env=environ_of(house, **environ), cwd=house.folder, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def running(house: House, name: str, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program that is ended with the block; its stdout is a pipe."""
    command = [sys.executable, EXAMPLES / name]
    with (house.folder / f"{name}.stderr").open("wb") as errors, subprocess.Popen(
        command, env=environ_of(house, **environ), cwd=house.folder, stdout=subprocess.PIPE, stderr=errors
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def settings(house: House, text: str) -> None:
    (house.folder / "penstock.toml").write_text(text)


def start(house: House, *roles: str) -> subprocess.Popen[bytes]:
    """The roles, and an API process, which is returned."""
    for role in ("workers", *roles):
        house.start(role)
    door = house.start_api()
    house.wait_ready()
    return door


def test_every_example_is_tested_and_listed() -> None:
    """Here by its name, and in the README of the folder."""
    names = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".yaml")}
    tested = set(re.findall(r'"(\w+\.(?:py|yaml))"', Path(__file__).read_text(encoding="utf-8")))
    listed = set(re.findall(r"^\| \[([\w.]+)\]", (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    of_others = {name for name in names if name.startswith(tuple(OF_OTHERS))}
    assert names - of_others == listed - of_others == tested


def test_a_chat(house: House) -> None:
    assert run(house, "chat.py") == said("What is the capital of France?", 64) + "\n"


@pytest.mark.parametrize("program", ["resume.py", "response.py"])
def test_a_stream_that_survives_the_api_process(empty_house: House, program: str) -> None:
    """Killed in the middle of the text, and started again."""
    house = empty_house
    house.environ["PENSTOCK_SIM_STEP_MS"] = "5"
    door = start(house)
    with running(house, program) as process:
        assert process.stdout is not None
        first = process.stdout.read(20)
        door.kill()
        door.wait()
        house.start_api()
        text = (first + process.stdout.read()).decode()
        assert process.wait(60) == 0, (house.folder / f"{program}.stderr").read_text()
        assert text == said("Tell me about rivers.", 200) + "\n"
    assert program != "resume.py" or "[" in (house.folder / "resume.py.stderr").read_text()


def test_jobs(house: House) -> None:
    """Run twice, it leads to the same jobs."""

    def number_of_jobs() -> int:
        return len(json.loads(house.get("/v1/jobs?limit=100")[1])["data"])

    before = number_of_jobs()
    lines = [f"{river}: {said(f'Where does the {river} end?', 32)}" for river in ("Rhine", "Danube", "Volga")]
    assert run(house, "job.py") == run(house, "job.py") == "\n".join(lines) + "\n"
    assert number_of_jobs() == before + 3


def test_a_batch(house: House) -> None:
    first, *lines = run(house, "batch.py").strip().split("\n")
    assert ": completed, " in first
    assert lines == [f"river-{number} {said(f'Name river {number}.', 8)!r}" for number in range(20)]


def test_a_receiver_of_webhooks(empty_house: House) -> None:
    """Of what it is sent it believes only what is signed."""
    house, port = empty_house, free_port()
    url, networks = f"http://127.0.0.1:{port}/", '["127.0.0.1/32"]'
    row = f'url = "{url}"\nsecret = "{SECRET}"\nevents = ["job.completed"]\nallow_http = true\nnetworks = {networks}\n'
    settings(house, f"[webhooks.example]\n{row}")
    start(house, "offline")
    with running(house, "webhook_receiver.py", PENSTOCK_WEBHOOK_SECRET=SECRET, PORT=str(port)) as receiver:
        forged = {"webhook-id": "m", "webhook-timestamp": "1", "webhook-signature": "v1,x"}
        eventually(lambda: house.request("POST", "/", {"data": {"id": "job_1"}}, forged, port)[0] == 401, OSError)
        body = {"model": "sim", "messages": [{"role": "user", "content": "hook"}], "max_tokens": 4}
        job = json.loads(house.post("/v1/jobs", body)[2])
        assert receiver.stdout is not None
        kind, name, result = receiver.stdout.readline().decode().split(" ", 2)
        assert (kind, name) == ("job.completed", job["id"])
        assert json.loads(result)["choices"][0]["message"]["content"] == said("hook", 4)


def test_a_broker(empty_house: House, tmp_path_factory: pytest.TempPathFactory) -> None:
    with redis_process(tmp_path_factory.mktemp("broker")) as url:
        settings(empty_house, f'[events]\ntake_url = "{url}"\npublish_url = "{url}"\nresults = true\n')
        start(empty_house, "offline")
        *told, result = run(empty_house, "broker.py", PENSTOCK_BROKER_URL=url).strip().split("\n")
    assert [line.split()[0] for line in told] == [f"penstock.job.{end}" for end in ("accepted", "started", "completed")]
    assert json.loads(result)["choices"][0]["message"]["content"] == said("Name a river.", 8)


def test_a_program_erases_one_job_and_all_of_a_tenant(empty_house: House) -> None:
    """A job that has not ended is left alone. Webhook messages about the others, which nobody takes, go with them."""
    house = empty_house
    hook = f'url = "http://127.0.0.1:1/"\nsecret = "{SECRET}"\nallow_http = true\nnetworks = ["127.0.0.1/32"]\n'
    settings(house, f"[webhooks.away]\n{hook}")
    start(house, "offline")

    def submit(**fields: Any) -> str:
        body = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, **fields}
        return str(json.loads(house.post("/v1/jobs", body)[2])["id"])

    def erase(*ids: str) -> str:
        words = [sys.executable, EXAMPLES / "erase.py", house.redis_url, "local", *ids]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    def conversation() -> str:
        item = {"role": "user", "content": "hello"}
        return str(json.loads(house.post("/v1/conversations", {"items": [item]})[2])["id"])

    ended, begun = [submit(), submit()], conversation()
    running = submit(max_tokens=7000)
    assert all(b'"completed"' in house.get(f"/v1/jobs/{job}?wait=30")[1] for job in ended)
    answered = json.loads(house.post("/v1/responses", {"model": "sim", "input": "hello", "background": True})[2])["id"]
    store = Redis.from_url(house.redis_url)
    eventually(lambda: len(list(store.scan_iter("*:hook:*"))) == 3)
    assert erase(ended[0]) == erase(answered.removeprefix("resp_")) == "2 erased\n"
    assert [house.get(f"/v1/jobs/{job}")[0] for job in ended] == [410, 200]
    assert house.get(f"/v1/conversations/{begun}")[0] == 200
    assert erase() == "3 erased\n"
    assert not list(store.scan_iter("*:hook:*"))
    assert house.get(f"/v1/conversations/{begun}")[0] == 404
    assert [house.get(f"/v1/jobs/{job}")[0] for job in (*ended, running)] == [410, 410, 200]
    listed = json.loads(house.get("/v1/jobs")[1])["data"]
    assert [job["id"] for job in listed] == [running]


def test_what_the_compose_file_includes_and_starts_exists() -> None:
    """Its form is held against the schema by `make check`; it is not run."""
    text = (EXAMPLES / "compose.yaml").read_text(encoding="utf-8")
    (included,) = re.findall(r"- (\.\./\S+)", text)
    (program,) = re.findall(r"python, /examples/(\S+)\]", text)
    assert (EXAMPLES / included).is_file() and (EXAMPLES / program).is_file()
