"""Dead letters, from the job that kills its workers to its replay; and who may look."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from house import ADMIN_TOKEN, House, eventually
from redis import Redis

from cli.__main__ import main
from streaming.keys import partition_key

pytestmark = pytest.mark.slow

STRAY = {"lane": "penstock:{0}:outbox:webhooks", "entry": "1-1", "reason": "not an event of Penstock"}
"""A dead letter that is no job's: what a hand in the store has left."""


def job_of(house: House, text: str) -> dict[str, Any]:
    body = {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 9}
    return dict(json.loads(house.post("/v1/jobs", body)[2]))


def state_of(house: House, job_id: str) -> dict[str, Any]:
    return dict(json.loads(house.get(f"/v1/jobs/{job_id}")[1]))


def test_a_poison_request_is_given_up_with_its_tokens_its_ids_and_its_usage(
    empty_house: House, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three workers die of it, the last one alone with it; everything else completes. Its stream shows the tokens so
    far and then the error; its events can be resumed at any of them, long after its workers' logs have gone; its record
    names the three workers, in the API, in the console and in its replay, which is a new job."""
    house = empty_house
    house.environ |= {"PENSTOCK_SIM_FAULTS": "true", "PENSTOCK_SIM_STEP_MS": "5", "PENSTOCK_SIM_AUTHORS": "true"}
    house.start("scheduler")
    house.start_api()
    streamed = {"model": "sim", "messages": [{"role": "user", "content": "[[crash@4]]"}], "max_tokens": 9, "n": 2}
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(house.post, "/v1/chat/completions", streamed | {"stream": True})
        mates = [job_of(house, f"mate {number}") for number in range(6)]
        for number in (1, 2, 3):
            worker = house.start("workers", "--id", f"worker-{number}")
            worker.wait(60)
        status, headers, body = asked.result()
    last = house.start("workers")
    for mate in mates:
        assert eventually(lambda mate=mate: state_of(house, mate["id"])["status"] == "completed")
    last.terminate()
    assert last.wait(30) == 0
    chunks = [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: {")]
    text: list[str] = ["", ""]
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            text[choice["index"]] += choice["delta"].get("content", "")
    assert status == 200 and all(text) and chunks[-1]["error"]["code"] == "poison"

    with Redis.from_url(house.redis_url) as redis:  # what a minute does later
        eventually(lambda: redis.hexists(partition_key(0, "job", headers["x-job-id"]), "record"))
        for log in redis.scan_iter("*:log:*"):
            assert redis.ttl(log) > 0
            redis.delete(log)
    (letter,) = json.loads(house.get("/admin/dlq")[1])["data"]
    assert (letter["job_id"], letter["lane"]) == (headers["x-job-id"], "sim:interactive")
    job = state_of(house, headers["x-job-id"])
    assert (job["status"], job["error"]["code"], job["attempts"]) == ("failed", "poison", 3)
    tokens = [attempt["tokens"] for attempt in job["attempt_log"]]
    assert [attempt["worker"] for attempt in job["attempt_log"]] == ["worker-1", "worker-2", "worker-3"]
    assert {attempt["outcome"] for attempt in job["attempt_log"]} == {"lost"}
    assert job["usage"]["completion_tokens"] == sum(tokens) > 0 and job["usage"]["prompt_tokens"] > 0
    assert job["created_at"] <= job["started_at"] <= job["first_token_at"] <= job["attempt_log"][0]["ended_at"]

    events = house.events(job["id"])
    assert [name for _, name, _ in events].count("started") == 3 and events[-1][:2] == (job["last_event_id"], "failed")
    deltas = [data for _, name, data in events if name == "delta"]
    assert ["".join(each["text"] for each in deltas if each["index"] == index) for index in (0, 1)] == text
    for place, (event_id, _, _) in enumerate(events, 1):
        assert house.events(job["id"], event_id) == events[place:]

    monkeypatch.chdir(house.folder)
    monkeypatch.setenv("PENSTOCK_API_KEY", ADMIN_TOKEN)
    (letter,) = json.loads(house.get("/admin/dlq")[1])["data"]
    for words in (["jobs", "show", job["id"], "--input"], ["dlq", "show", job["id"]], ["dlq", "show", letter["id"]]):
        assert main([*words, "--url", house.url]) == 0
        shown = capsys.readouterr().out
        assert all(
            re.search(rf"worker-{number}  .* {tokens[number - 1]} +its worker died\n", shown) for number in (1, 2, 3)
        )
        assert '"content": "[[crash@4]]"' in shown
    assert letter["reason"] == "poison" and "crash" not in json.dumps(
        json.loads(house.get(f"/admin/dlq/{letter['id']}")[1])
    )
    status, headers, body = house.post(f"/admin/dlq/{letter['id']}/replay", {})
    again = json.loads(body)
    assert status == 202 and again["id"] == headers["x-job-id"] != job["id"]
    assert again["attempt_log"] == job["attempt_log"] and again["attempts"] == 0
    assert json.loads(house.get("/admin/dlq")[1])["data"] == []
    assert state_of(house, job["id"])["status"] == "failed"


def test_dead_letters_can_be_dropped_and_absent_ones_are_404(
    house: House, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A letter that is no job can only be dropped, here by `penstock dlq`."""
    with Redis.from_url(house.redis_url) as client:
        client.xadd("penstock:{0}:dead", STRAY)
    (letter,) = eventually(lambda: json.loads(house.get("/admin/dlq")[1])["data"])
    assert letter["job_id"] is None and "not an event" in letter["reason"] and letter["lane"] == STRAY["lane"]
    assert house.post(f"/admin/dlq/{letter['id']}/replay", {})[0] == 400
    monkeypatch.chdir(house.folder)
    monkeypatch.setenv("PENSTOCK_API_KEY", ADMIN_TOKEN)

    def penstock(*words: str) -> tuple[int, str]:
        return main(["dlq", *words, "--url", house.url]), capsys.readouterr().out

    assert "not an event" in penstock("ls")[1] and penstock("replay", letter["id"])[0] == 1
    assert penstock("drop", letter["id"]) == (0, f"{letter['id']} dropped\n")
    assert penstock("show", letter["id"])[0] == 1
    for method, path in (("GET", letter["id"]), ("DELETE", letter["id"]), ("GET", "nonsense"), ("GET", "9-1-1")):
        status, _, body = house.request(method, f"/admin/dlq/{path}")
        assert status == 404 and json.loads(body)["error"]["code"] == "dead_letter_not_found"
