"""Limits of keys and tenants through real processes: what a client is told, that changes act, and that batches wait."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from batching import TOKENS, client, content, ended, jsonl, line, said
from house import ADMIN_TOKEN, Answer, House, eventually, key_rows, unstarted
from openai import OpenAI, RateLimitError
from openai.types import Batch

from bench.ports import free_port
from cli.__main__ import main

pytestmark = pytest.mark.slow

SETTINGS = (
    key_rows(
        slow="limits = { requests_per_minute = 3, tokens_per_minute = 100000 }",
        poor="limits = { cost_per_day = 0.001 }",
        many="",
        bulk="limits = { requests_per_minute = 40 }",
        spent="limits = { tokens_per_day = 20 }",
        busy="limits = { queued = 1 }",
        free="",
        lines="",
    )
    + '[models.sim]\nengine = "sim"\nprice_input = 1.0\nprice_output = 10.0\n'
    + "[offline]\nconcurrency = 1\nturn_s = 600\n"
    + "[tenants.many]\nlimits = { requests_per_minute = 60 }\n"
    + "[tenants.lines]\nlimits = { requests_per_minute = 240 }\n"
)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    rows = SETTINGS + f'[keys.ops]\nsha256 = "{hashlib.sha256(ADMIN_TOKEN.encode()).hexdigest()}"\n'
    (folder / "penstock.toml").write_text(rows + 'tenant = "ops"\nadmin = true\n')
    with unstarted(folder) as house:
        house.environ |= {"PENSTOCK_REDIS_PARTITIONS": "4", "PENSTOCK_SIM_STEP_MS": "20"}
        house.start_all("workers", "offline")
        yield house


def chat(house: House, key: str, port: int | None = None, **more: Any) -> Answer:
    body = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **more}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    return house.request("POST", "/v1/chat/completions", json.dumps(body).encode(), headers, port=port)


@pytest.mark.parametrize("stream", [True, False])
def test_the_official_client_reads_what_is_left_and_is_told_when_to_come_back(house: House, *, stream: bool) -> None:
    limits = {"requests_per_minute": 3, "tokens_per_minute": 100_000}
    body = json.dumps({"tenant": "web", "limits": limits}).encode()
    key = json.loads(house.request("POST", "/admin/keys", body)[2])["key"]
    ask = client(house, key).with_options(max_retries=0).chat.completions.with_raw_response.create
    asked: dict[str, Any] = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    left = []
    for _ in range(3):
        answer = ask(**asked, stream=stream)
        left.append(answer.headers["x-ratelimit-remaining-requests"])
        assert answer.headers["x-ratelimit-limit-requests"] == "3"
        assert 99_000 < int(answer.headers["x-ratelimit-remaining-tokens"]) < 100_000
        assert answer.headers["x-ratelimit-reset-tokens"].endswith("s")
        if stream:
            assert [chunk for chunk in answer.parse() if chunk.choices]
    assert left == ["2", "1", "0"]
    with pytest.raises(RateLimitError) as refused:
        ask(**asked, stream=stream)
    assert refused.value.code == "rate_limit_exceeded" and refused.value.param == "requests_per_minute"
    headers = refused.value.response.headers
    assert 0 < int(headers["retry-after"]) <= 20 and headers["x-ratelimit-remaining-requests"] == "0"


def test_money_is_a_limit_and_tells_when_it_begins_anew(house: House) -> None:
    assert chat(house, "poor", max_tokens=50)[0] == 200  # reserves a little more than half of it
    status, headers, body = chat(house, "poor", max_tokens=99)
    error = json.loads(body)["error"]
    assert (status, error["code"], error["param"]) == (429, "budget_exceeded", "cost_per_day")
    assert headers["x-should-retry"] == "false" and 0 < int(headers["retry-after"]) <= 86_400
    status, _, body = chat(house, "poor", max_tokens=200)
    assert (status, json.loads(body)["error"]["code"]) == (400, "request_exceeds_limit")


def test_usage_has_the_cost_by_the_models_prices(house: House) -> None:
    assert chat(house, "slow", max_tokens=7)[0] == 200
    headers = {"Authorization": "Bearer slow"}
    report = json.loads(house.request("GET", "/v1/usage?by=key", headers=headers)[2])
    (row,) = report["data"]
    assert (row["key"], row["completion_tokens"]) == ("slow", 7)
    assert row["cost"] == report["total"]["cost"] == (row["prompt_tokens"] + 10 * 7) / 1e6
    table = house.request("GET", "/v1/usage?by=key&format=csv", headers=headers)[2].decode().split()
    assert table[0].endswith(",total_tokens,cost") and table[1].startswith("slow,1,")


def test_two_hundred_callers_at_two_processes_never_get_more_than_the_limit(house: House) -> None:
    other = free_port()
    house.start_api(other)
    eventually(lambda: house.get("/v1/models", other)[0] == 401)
    began = time.monotonic()
    with ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(lambda at: chat(house, "many", (None, other)[at % 2])[0], range(200)))
    assert set(answers) == {200, 429}
    assert 60 <= answers.count(200) <= 60 + math.ceil(time.monotonic() - began)  # one comes back each second


def test_a_changed_limit_acts_at_every_process(house: House, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", ADMIN_TOKEN)

    def command(*words: str) -> dict[str, Any]:
        assert main(["keys", *words, "--json", "--url", house.url]) == 0
        return dict(json.loads(capsys.readouterr().out))

    other = free_port()
    house.start_api(other)
    made = command("create", "web2", "--limit", "requests_per_minute=1", "--limit", "queued=5")
    assert made["limits"] == {"requests_per_minute": 1, "queued": 5}
    eventually(lambda: chat(house, made["key"], other)[0] == 200)
    assert chat(house, made["key"], other)[0] == 429
    assert command("update", made["id"], "--limit", "requests_per_minute=6000")["limits"] == {
        "requests_per_minute": 6000
    }
    eventually(lambda: chat(house, made["key"], other)[0] == 200)
    assert command("update", made["id"], "--limit", "none")["limits"] == {}
    eventually(lambda: "x-ratelimit-limit-requests" not in chat(house, made["key"], other)[1])
    for wrong in ({"requests": 1}, {"concurrent": 0}, {"queued": 1.5}, {"cost_per_day": -1}):
        body = json.dumps({"limits": wrong}).encode()
        status, _, said = house.request("POST", f"/admin/keys/{made['id']}", body)
        assert status == 400 and json.loads(said)["error"]["param"] == "limits"


def test_a_batch_waits_for_its_limits_and_fails_no_line(house: House) -> None:
    """Twenty lines take half of a minute's worth at once; the others come as it comes back."""
    openai = client(house, "bulk")
    done = ended(openai, begun(openai, [line(number) for number in range(23)]))
    assert done.status == "completed" and done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (23, 0)
    answers = {row["custom_id"]: row for row in content(openai, done.output_file_id)}
    assert answers["r-22"]["response"]["body"]["choices"][0]["message"]["content"] == said("line 22", TOKENS)
    assert chat(house, "bulk")[0] == 200


def lane_reason(openai: OpenAI, batch: Batch) -> Any:
    return (openai.batches.retrieve(batch.id).model_extra or {})["lane_reason"]


def begun(openai: OpenAI, lines: list[dict[str, Any]]) -> Batch:
    file = openai.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    return openai.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")


def test_a_tenants_limits_hold_the_lines_of_its_batches_wherever_they_go(house: House) -> None:
    """Half of a minute's worth may be lines: in four partitions without a common count, none of these would wait."""
    openai = client(house, "lines")
    batch = begun(openai, [line(number) for number in range(128)])
    eventually(lambda: "requests_per_minute of tenant:lines" in (lane_reason(openai, batch) or ""))
    done = ended(openai, batch)
    assert done.request_counts is not None and done.request_counts.completed == 128


@pytest.mark.parametrize(("key", "limit"), [("spent", "tokens_per_day"), ("busy", "queued")])
def test_a_batch_that_waits_for_a_limit_holds_up_no_other_one(house: House, key: str, limit: str) -> None:
    """The only process at work on batches gives its turn away, which would last ten minutes: until a budget begins
    anew, and where nobody knows when another job of the key ends."""
    poor = client(house, key)
    if key == "busy":
        asked = {"model": "sim", "messages": [{"role": "user", "content": "long"}], "max_tokens": 4000}
        assert house.post("/v1/jobs", asked, {"Authorization": "Bearer busy"})[0] == 202
    held = begun(poor, [line(number, max_tokens=15) for number in range(5)])
    eventually(lambda: limit in (lane_reason(poor, held) or ""))
    assert ended(client(house, "free"), begun(client(house, "free"), [line(0)])).status == "completed"
    assert limit in (lane_reason(poor, held) or "")
    poor.batches.cancel(held.id)
    assert ended(poor, held).status == "cancelled"


def test_a_line_that_never_fits_fails_alone(house: House) -> None:
    openai = client(house, "poor")
    done = ended(openai, begun(openai, [line(0, max_tokens=300), line(1, max_tokens=1)]))
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 1)
    (row,) = content(openai, done.error_file_id)
    assert row["custom_id"] == "r-0" and "request_exceeds_limit" in json.dumps(row)
