"""Usage: sums equal the request records to the token, whatever ends a request, and each sees its own tenant's."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batching import begin, client, ended, line
from house import House, eventually, key_rows, unstarted
from openapi_document import SCHEMAS, conforms
from stream_reader import StreamReader

from cli.__main__ import main
from telemetry.records.reader import Skipped, read_records
from telemetry.records.schema import RequestRecord

pytestmark = pytest.mark.slow

LONG = 30_000
FINAL = ("completed", "failed", "cancelled", "expired")
KEYS = key_rows(ann="", bob="", ops="admin = true", second="").replace('tenant = "second"', 'tenant = "ann"')
SETTINGS = (
    KEYS
    + """
[redis]
partitions = 3
max_attempts = 2
[sim]
slots = 2
faults = true
context = 60000
step_ms = 5
[worker]
prefetch = 0
"""
)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with unstarted(tmp_path) as house:
        (tmp_path / "penstock.toml").write_text(SETTINGS)
        del house.environ["PENSTOCK_SIM_STEP_MS"]
        house.environ["PENSTOCK_RECORDS_DIR"] = str(tmp_path / "records")
        yield house


def asked(house: House, key: str, path: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
    status, headers, answer = house.request(method, path, body, {"Authorization": f"Bearer {key}"})
    return status, json.loads(answer) if headers["content-type"].startswith("application/json") else answer.decode()


def chat(text: str = "hello", tokens: int = 5, **more: Any) -> dict[str, Any]:
    return {"model": "sim", "max_tokens": tokens, "messages": [{"role": "user", "content": text}], **more}


def submit(house: House, key: str, text: str = "hello", tokens: int = 5, **queue: Any) -> str:
    status, job = asked(house, key, "/v1/jobs", chat(text, tokens, queue=queue))
    assert status == 202, job
    return str(job["id"])


def state(house: House, key: str, job_id: str) -> str:
    return str(asked(house, key, f"/v1/jobs/{job_id}", method="GET")[1]["status"])


def recorded(house: House) -> list[RequestRecord]:
    found = read_records(house.folder / "records", 0, 1e11, Skipped())
    return [each for each in found if isinstance(each, RequestRecord) and each.state in FINAL]


def rows(house: House, by: str) -> list[dict[str, Any]]:
    status, report = asked(house, "ops", f"/admin/usage?by={by}", method="GET")
    assert status == 200 and conforms(report, SCHEMAS["UsageReport"])
    return list(report["data"])


def agrees(house: House) -> bool:
    """Whether the sums by tenant and model are those of the records."""
    by_record: dict[Any, Counter[str]] = defaultdict(Counter)
    for each in recorded(house):
        counts = {"requests": 1, "prompt": each.prompt_tokens, "completion": each.completion_tokens}
        by_record[each.tenant, each.model].update(counts | {"cached": each.cached_tokens})
    counted = {
        (row["tenant"], row["model"]): {
            "requests": row["requests"],
            "prompt": row["prompt_tokens"],
            "completion": row["completion_tokens"],
            "cached": row["cached_tokens"],
        }
        for row in rows(house, "tenant,model")
    }
    return counted == {group: dict(counts) for group, counts in by_record.items()}


def test_sums_equal_the_records_whatever_ends_a_request(house: House) -> None:
    """Whole, streamed, several choices and prompts, tasks, lines of a batch; cancelled while waiting and running,
    expired, failed; continued after its worker's death, and given up after two deaths."""
    house.start("offline")
    house.start_api()
    worker = house.start("workers", "--id", "worker-1")
    house.wait_ready()
    for body in (chat(), chat(n=3), chat("streamed", 9, stream=True, n=2), chat("[[fail@3]] x")):
        asked(house, "ann", "/v1/chat/completions", body)
    several = {"model": "sim", "prompt": ["one", "two words", "and three words"], "n": 2, "max_tokens": 4}
    assert asked(house, "second", "/v1/completions", several)[0] == 200
    for path, body in (
        ("/v1/embeddings", {"input": ["a river", "a mill"]}),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
        ("/tokenize", {"prompt": "some words"}),
    ):
        assert asked(house, "bob", path, {"model": "sim", **body})[0] == 200
    batch = ended(client(house, "second"), begin(client(house, "second"), [line(number) for number in range(12)]))
    assert batch.status == "completed"
    ids = [submit(house, "ann", tokens=LONG), submit(house, "bob", tokens=LONG)]
    eventually(
        lambda: all(state(house, key, each) == "in_progress" for key, each in zip(("ann", "bob"), ids, strict=True))
    )
    waiting = submit(house, "bob")
    expired = submit(house, "bob", max_queue_ms=30)
    eventually(lambda: state(house, "bob", expired) == "expired")
    for key, each in (("bob", waiting), ("ann", ids[0]), ("bob", ids[1])):
        asked(house, key, f"/v1/jobs/{each}/cancel")
    ended_so_far = {*ids, waiting, expired}
    eventually(lambda: {each.id for each in recorded(house)} >= ended_so_far)
    eventually(lambda: agrees(house))  # a worker that is killed now has written all its records
    continued = submit(house, "ann", "continued", 600)
    reader = StreamReader(house.port, f"/v1/jobs/{continued}/events", Authorization="Bearer ann")
    eventually(lambda: b"event: delta" in reader.data)
    worker.kill()
    worker.wait()
    worker = house.start("workers", "--id", "worker-2")
    eventually(lambda: continued in {each.id for each in recorded(house)})
    given_up = submit(house, "ann", "[[crash@20]] x", 200)
    for number in (3, 4):
        worker.wait(60)
        worker = house.start("workers", "--id", f"worker-{number}")
    eventually(lambda: state(house, "ann", given_up) == "failed")
    eventually(lambda: {each.id for each in recorded(house)} >= {given_up})
    eventually(lambda: agrees(house))
    states = Counter(each.state for each in recorded(house))
    assert states["cancelled"] == 3 and states["expired"] == 1 and states["failed"] == 2
    found = {(row["tenant"], row["key"]): row for row in rows(house, "tenant,key")}
    assert found["ann", "second"]["requests"] == 13 and found["bob", "bob"]["requests"] == 6
    assert found["ann", "second"]["completion_tokens"] == 24 + batch.request_counts.total * 6  # type: ignore[union-attr]
    only = asked(house, "ann", "/v1/usage?by=tenant", method="GET")[1]
    assert [row["tenant"] for row in only["data"]] == ["ann"] and only["total"]["requests"] > 13


def test_a_caller_reads_its_own_tenant_in_the_form_it_asks_for(house: House) -> None:
    house.start_all("workers")
    asked(house, "bob", "/v1/chat/completions", chat())
    assert asked(house, "bob", "/v1/usage?tenant=ann", method="GET")[1]["total"]["requests"] == 1
    assert asked(house, "ann", "/v1/usage", method="GET")[1]["data"] == []
    assert asked(house, "bob", "/admin/usage", method="GET")[0] == 403
    text = asked(house, "bob", "/v1/usage?by=tenant,key,model&format=csv", method="GET")[1]
    (row,) = csv.DictReader(io.StringIO(text))
    assert (row["tenant"], row["key"], row["model"], row["completion_tokens"]) == ("bob", "bob", "sim", "5")
    for wrong, name in (
        ("from=2026-13-01", "from"), ("to=today", "to"), ("from=2026-11-02&to=2026-11-01", "from"),
        ("from=2026-01-01&to=2026-11-01", "from"), ("by=hour", "by"), ("by=", "by"), ("format=xml", "format"),
        ("from=0001-01-01", "from"), ("to=0001-01-01&from=9999-12-31", "from"),
    ):  # fmt: skip
        status, refused = asked(house, "bob", f"/v1/usage?{wrong}", method="GET")
        assert (status, refused["error"]["param"]) == (400, name), wrong
    assert asked(house, "bob", "/v1/usage?to=0001-01-05", method="GET")[0] == 200
    assert asked(house, "bob", "/v1/usage?from=9999-12-30", method="GET")[0] == 200
    assert asked(house, "ops", "/admin/usage?tenant=a%20b", method="GET")[0] == 400


def test_the_command_shows_a_table_lines_and_csv(
    house: House, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    house.start_all("workers")
    for key in ("ann", "bob", "bob"):
        asked(house, key, "/v1/chat/completions", chat())
    monkeypatch.setenv("PENSTOCK_API_KEY", "ops")

    def said(*words: str) -> str:
        assert main(["usage", *words, "--url", house.url]) == 0
        return capsys.readouterr().out

    lines = said("--all", "--by", "tenant,key").splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [["ann", "ann", "1"], ["bob", "bob", "2"], ["total", "-", "3"]]
    assert len({len(line) for line in lines}) == 1
    assert [json.loads(line)["requests"] for line in said("--tenant", "bob", "--json").splitlines()] == [2]
    (row,) = csv.DictReader(io.StringIO(said("--tenant", "bob", "--by", "model", "--csv")))
    assert (row["model"], row["completion_tokens"]) == ("sim", "10")
    assert said() == ""  # the tenant of ops has used nothing
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "▇" in said("--all")
