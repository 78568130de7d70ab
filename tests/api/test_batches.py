"""/v1/batches with the official client, against real processes: the whole flow, and every way a batch can end."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from batching import answers_are_right, begin, client, content, ended, jsonl, line, nothing_left_over, reaches
from house import House, eventually, module_house
from openai import BadRequestError, OpenAI, UnprocessableEntityError
from redis import Redis

from streaming.batches.file_store import FileStore
from streaming.batches.store import Batches
from streaming.ids import joined, line_job_id
from streaming.keys import partition_key
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings

pytestmark = pytest.mark.slow


house = module_house("workers", "offline", PENSTOCK_SIM_FAULTS="true", PENSTOCK_SIM_SLOTS="16")
"""One of each role; requests may ask for faults."""


@pytest.fixture
def openai(house: House) -> OpenAI:
    return client(house)


def test_the_whole_flow(house: House, openai: OpenAI) -> None:
    """Upload, create, watch, read; order, names, counts and tokens are right, and nothing is left over. The batch needs
    its input file no more once it is created."""
    lines = [line(number) for number in range(60)]
    batch = begin(
        openai, lines, metadata={"for": "a test"}, output_expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (batch.object, batch.endpoint, batch.completion_window) == ("batch", "/v1/chat/completions", "24h")
    assert batch.expires_at is not None and batch.expires_at - batch.created_at == 86_400
    openai.files.delete(batch.input_file_id)
    done = ended(openai, batch)
    assert (done.status, done.errors, done.error_file_id, done.model) == ("completed", None, None, "sim")
    assert done.request_counts and done.request_counts.to_dict() == {"total": 60, "completed": 60, "failed": 0}
    assert done.usage and done.usage.output_tokens == 60 * 6
    assert done.metadata == {"for": "a test"}
    assert done.created_at <= (done.in_progress_at or 0) <= (done.finalizing_at or 0) <= (done.completed_at or 0)
    answers_are_right(content(openai, done.output_file_id), lines)
    file = openai.files.retrieve(done.output_file_id or "")
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert file.expires_at is not None and file.expires_at - file.created_at == 3600
    nothing_left_over(house.folder)
    assert openai.batches.list(limit=1).data[0] == done
    assert house.get("/v1/jobs")[1] == b'{"object":"list","data":[],"has_more":false,"next_cursor":null}'


def response_line(number: int, **body: Any) -> dict[str, Any]:
    fields = {"model": "sim", "input": f"line {number}", "max_output_tokens": 5} | body
    return {"custom_id": f"c{number}", "method": "POST", "url": "/v1/responses", "body": fields}


def test_each_line_for_responses_has_its_response(openai: OpenAI) -> None:
    """As the endpoint gives it: equal lines share an answer, unless they show something else."""
    lines = [
        *(response_line(number) for number in range(3)),
        response_line(3, input="equal", temperature=0),
        response_line(4, input="equal", temperature=0),
        response_line(5, input="equal", temperature=0, metadata={"of": "five"}),
        response_line(6, max_output_tokens=1_000_000),
        response_line(7, previous_response_id="resp_1"),
        response_line(8, background=True),
        response_line(9, tools=[{"type": "web_search"}], tool_choice="required"),
        response_line(10, tools=[{"type": "function", "name": "f", "parameters": {}}]),
        response_line(11, conversation={"id": openai.conversations.create().id}),
    ]
    done = ended(openai, begin(openai, lines, endpoint="/v1/responses"))
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (7, 5)
    found = {row["custom_id"]: row["response"]["body"] for row in content(openai, done.output_file_id)}
    for row in lines[:6]:
        body = found[row["custom_id"]]
        assert (body["object"], body["status"], body["metadata"]) == (
            "response", "incomplete", row["body"].get("metadata", {})
        )  # fmt: skip
        same = openai.responses.create(**row["body"])
        assert body["output"][0]["content"] == same.to_dict()["output"][0]["content"]  # type: ignore[index]
        assert body["usage"] == same.to_dict()["usage"]
    assert found["c3"] == found["c4"] != found["c5"]
    errors = {row["custom_id"]: row["response"] for row in content(openai, done.error_file_id)}
    assert {name: row["status_code"] for name, row in errors.items()} == dict.fromkeys(
        ["c6", "c7", "c8", "c9", "c11"], 400
    )
    params = {name: row["body"]["error"]["param"] for name, row in errors.items()}
    assert [params[name] for name in ("c7", "c8", "c9")] == ["previous_response_id", "background", "tool_choice"]
    assert params["c11"] == "conversation" and "same time" in errors["c11"]["body"]["error"]["message"]
    assert found["c10"]["output"][0]["type"] == "function_call"


def test_tokens_of_reasoning_are_counted(openai: OpenAI) -> None:
    """The sum of the lines, which say it each."""
    lines = [
        line(number, max_tokens=30, reasoning_effort=effort) for number, effort in enumerate(("low", "none", "high"))
    ]
    done = ended(openai, begin(openai, lines))
    answers = [each["response"]["body"]["usage"] for each in content(openai, done.output_file_id)]
    reasoned = [each.get("completion_tokens_details", {}).get("reasoning_tokens", 0) for each in answers]
    assert reasoned[0] > 0 and reasoned[1] == 0 and reasoned[2] > reasoned[0]
    assert done.usage and done.usage.output_tokens_details.reasoning_tokens == sum(reasoned)
    assert done.usage.output_tokens == sum(each["completion_tokens"] for each in answers)


def test_a_bad_file_fails_with_its_lines(openai: OpenAI) -> None:
    """Nothing is run; each bad line has its number, code and words."""
    done = ended(openai, begin(openai, [line(0), line(1) | {"method": "GET"}, line(0), "no object"]))
    assert done.status == "failed" and done.failed_at and done.output_file_id is None
    assert done.errors and done.errors.data
    assert [(each.line, each.code, each.param) for each in done.errors.data] == [
        (2, "invalid_method", "method"),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "invalid_request", None),
    ]
    assert all(each.message for each in done.errors.data)


def test_wrong_and_failing_lines_are_in_the_error_file(openai: OpenAI) -> None:
    """In order, each with its status; the others are answered. A failing engine is tried again, a wrong request not."""
    lines = [line(0), line(1, temperature=7), line(2, "[[fail@2]]"), line(3, max_tokens=9000), line(4)]
    done = ended(openai, begin(openai, lines))
    assert done.status == "completed"
    assert done.request_counts and done.request_counts.to_dict() == {"total": 5, "completed": 2, "failed": 3}
    assert done.to_dict()["lines_retried"] == 2
    answers_are_right(content(openai, done.output_file_id), [lines[0], lines[4]])
    failed = content(openai, done.error_file_id)
    assert [(each["line"], each["custom_id"], each["response"]["status_code"]) for each in failed] == [
        (2, "r-1", 400), (3, "r-2", 500), (4, "r-3", 400),
    ]  # fmt: skip
    assert [each["response"]["body"]["error"]["code"] for each in failed] == [
        "invalid_request_error", "engine_error", "context_length_exceeded",
    ]  # fmt: skip


def test_it_can_be_read_while_it_runs_paused_and_resumed(house: House, openai: OpenAI) -> None:
    """While paused no line is begun; what there is can be read, in order; then all of it is right."""
    lines = [line(number, max_tokens=150) for number in range(200)]
    batch = begin(openai, lines, window="none")
    assert batch.expires_at is None
    reaches(openai, batch, 20)
    status, _, body = house.post(f"/v1/batches/{batch.id}/pause", {})
    assert status == 200 and json.loads(body)["paused"]

    def resting() -> Any:
        now = openai.batches.retrieve(batch.id).to_dict()
        so_far = [json.loads(each) for each in house.get(f"/v1/batches/{batch.id}/output")[1].split(b"\n")[:-1]]
        at_rest = now["lines_in_queue"] == 0 and now["request_counts"]["completed"] == len(so_far)
        return (now, so_far) if at_rest else None

    found: Any = eventually(resting)
    now, so_far = found
    assert now["status"] == "in_progress" and now["paused"] and 20 <= len(so_far) < 200
    by_name = {each["custom_id"]: each for each in lines}
    answers_are_right(so_far, [by_name[each["custom_id"]] for each in so_far])
    numbers = [each["line"] for each in so_far]
    assert numbers == sorted(numbers)
    assert house.post(f"/v1/batches/{batch.id}/resume", {})[0] == 200
    done = ended(openai, batch)
    assert done.status == "completed"
    answers_are_right(content(openai, done.output_file_id), lines)
    assert house.get(f"/v1/batches/{batch.id}/output")[1] == openai.files.content(done.output_file_id or "").content
    for command in ("pause", "resume", "cancel"):
        assert house.post(f"/v1/batches/{batch.id}/{command}", {})[0] == 409


def test_cancelling_keeps_what_is_finished(house: House, openai: OpenAI) -> None:
    """Every line is in one of the two files, once; engines are free again."""
    lines = [line(number, max_tokens=200) for number in range(100)]
    batch = begin(openai, lines)
    reaches(openai, batch, 10)
    assert openai.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    assert openai.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    done = ended(openai, batch)
    assert done.status == "cancelled" and done.cancelling_at and done.cancelled_at
    outputs, failed = content(openai, done.output_file_id), content(openai, done.error_file_id)
    assert sorted(each["line"] for each in outputs + failed) == list(range(1, 101))
    assert 10 <= len(outputs) < 100
    answers_are_right(outputs, [lines[each["line"] - 1] for each in outputs])
    assert {each["error"]["code"] for each in failed} == {"batch_cancelled"}
    jobs = [json.loads(house.get(f"/v1/jobs/{line_job_id(batch.id, number, 0, 1)}")[1]) for number in range(100)]
    assert {each["cancelled_by"] for each in jobs if each.get("status") == "cancelled"} == {"batch"}


def test_the_same_key_is_the_same_batch(house: House, openai: OpenAI) -> None:
    """Also when its file is gone by then; another body is refused."""
    file = openai.files.create(file=jsonl([line(0)]), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    header = {"Idempotency-Key": "once"}
    first = openai.batches.create(**body, extra_headers=header)  # type: ignore[call-overload]
    assert ended(openai, first).status == "completed"
    openai.files.delete(file.id)
    again = openai.batches.create(**body, extra_headers=header)  # type: ignore[call-overload]
    assert again.id == first.id and again.status == "completed"
    with pytest.raises(UnprocessableEntityError):
        openai.batches.create(**body, metadata={"a": "b"}, extra_headers=header)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"endpoint": "/v1/rerank"}, "endpoint must be"),
        ({"completion_window": "25h"}, "completion_window must be"),
        ({"input_file_id": "file-" + "0" * 32}, "input_file_id names no file"),
    ],
)
def test_wrong_requests_are_refused(openai: OpenAI, changes: dict[str, Any], words: str) -> None:
    """400 that names the field; nothing is made."""
    file = openai.files.create(file=b"{}\n", purpose="batch")
    before = len(openai.batches.list(limit=100).data)
    body = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"} | changes
    with pytest.raises(BadRequestError, match=words):
        openai.batches.create(**body)  # type: ignore[arg-type]
    assert len(openai.batches.list(limit=100).data) == before


def test_lists_in_pages(openai: OpenAI) -> None:
    """The client's own paging sees each once, newest first."""
    made = [begin(openai, [line(number)]).id for number in range(5)]
    assert [batch.id for batch in openai.batches.list(limit=2)][:5] == made[::-1]
    with pytest.raises(BadRequestError):
        openai.batches.list(after="batch_" + "0" * 32)


def test_an_expired_batch_gives_what_it_has(empty_house: House) -> None:
    """Its window is over: finished lines are in the output, the others in the error file with the reason."""
    # Half a minute of work, and turns so short that a window shortened by hand is soon seen.
    slow = {"SIM_SLOTS": "4", "SIM_STEP_MS": "10", "BATCH_WINDOW": "16", "OFFLINE_TURN_S": "0.5"}
    empty_house.environ |= {f"PENSTOCK_{name}": value for name, value in slow.items()}
    empty_house.start_all("workers", "offline")
    openai, lines = client(empty_house), [line(number, max_tokens=40) for number in range(300)]
    batch = begin(openai, lines, window="15m")
    reaches(openai, batch, 8)
    _shorten(empty_house, batch.id, 60_000)
    eventually(lambda: openai.batches.retrieve(batch.id).to_dict()["lane"] == "standard")  # it is late
    _shorten(empty_house, batch.id, 500)
    done = ended(openai, batch)
    assert done.status == "expired" and done.expired_at
    outputs, failed = content(openai, done.output_file_id), content(openai, done.error_file_id)
    assert sorted(each["line"] for each in outputs + failed) == list(range(1, 301))
    answers_are_right(outputs, [lines[each["line"] - 1] for each in outputs])
    assert outputs and {each["error"]["code"] for each in failed} == {"batch_expired"}


def _shorten(house: House, batch_id: str, left_ms: int) -> None:
    """Let a window be over soon: nobody can wait a quarter of an hour."""
    with Redis.from_url(house.redis_url) as redis:
        seconds, micros = redis.time()  # type: ignore[misc]
        redis.hset(partition_key(0, "batch", batch_id), "expires", seconds * 1000 + micros // 1000 + left_ms)


def test_a_create_tried_again_with_another_file_computes_that_one(house: House, openai: OpenAI) -> None:
    """The first try ended between its file and its record: under the same key, another file is another request."""
    first, second = (
        openai.files.create(file=("lines.jsonl", jsonl([line(number, f"file {name}")])), purpose="batch")
        for number, name in enumerate(("one", "two"))
    )
    wire = RedisClient.open(RedisSettings(url=house.redis_url))
    batch_id = Batches(wire).new_id("local", joined("header", "tried"))
    file_store = FileStore(house.folder / ".penstock" / "files")
    file_store.begin_work(batch_id, first.id)  # all that a killed process left
    body = {"input_file_id": second.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    status, _, answer = house.post("/v1/batches", body, {"Idempotency-Key": "tried"})
    assert status == 200 and json.loads(answer)["id"] == batch_id
    status, _, _ = house.post("/v1/batches", body | {"input_file_id": first.id}, {"Idempotency-Key": "tried"})
    assert status == 422  # that one is not computed
    done = ended(openai, openai.batches.retrieve(batch_id))
    answers_are_right(content(openai, done.output_file_id), [line(1, "file two")])


def test_a_refused_create_leaves_no_link_to_its_file(house: House, openai: OpenAI) -> None:
    """Under the key of a batch that runs or has ended, with the same file and another body or with another file: the
    folder of the batch holds its own input alone, and what was deleted takes no room on the disk."""
    files = [
        openai.files.create(file=("lines.jsonl", jsonl([line(number, max_tokens=300)])), purpose="batch")
        for number in range(3)
    ]
    file_store = FileStore(house.folder / ".penstock" / "files")
    header = {"Idempotency-Key": "links"}

    def create(file: int, **more: Any) -> int:
        asked = {"input_file_id": files[file].id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        return int(house.post("/v1/batches", asked | more, header)[0])

    assert create(0) == 200
    batch = openai.batches.list(limit=1).data[0]
    assert [create(1), create(2), create(0, metadata={"a": "b"})] == [422] * 3
    assert {path.name for path in file_store.work(batch.id).glob("input*")} <= {"input", f"input.{files[0].id}"}
    done = ended(openai, batch)
    answers_are_right(content(openai, done.output_file_id), [line(0, max_tokens=300)])
    eventually(lambda: not file_store.work(batch.id).exists())
    for status, file, more in ((422, 1, {}), (422, 0, {"metadata": {"a": "b"}}), (200, 0, {})):
        assert create(file, **more) == status and not file_store.work(batch.id).exists()
    assert [file_store.path(file.id).stat().st_nlink for file in files] == [1, 1, 1]


def test_the_other_offers_go_when_a_batch_takes_its_input(tmp_path: Path) -> None:
    """And a refused offer of the same file is left until then."""
    file_store = FileStore(tmp_path)
    file_store.prepare()
    for name in ("one", "two"):
        file_store.path(name).write_text(name)
        file_store.begin_work("b", name)
    file_store.take_back("b", "one", used="one")
    assert file_store.input_of("b", "one").read_text() == "one"
    assert [path.name for path in file_store.work("b").iterdir()] == ["input"]
    for name in ("one", "two"):
        file_store.begin_work("b", name)
        file_store.take_back("b", name, used="one")
    assert [path.name for path in file_store.work("b").iterdir()] == ["input"]
    assert file_store.input_of("b", "one").read_text() == "one"


def test_a_file_system_without_hard_links_keeps_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, under the same name, and with nothing beside it."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links")

    monkeypatch.setattr(os, "link", refuse)
    shelf = FileStore(tmp_path)
    shelf.prepare()
    shelf.path("one").write_text("one")
    shelf.begin_work("b", "one")
    assert [path.name for path in shelf.work("b").iterdir()] == ["input.one"]
    assert shelf.input_of("b", "one").read_text() == "one"


def test_a_line_whose_job_was_cancelled_is_computed(house: House, openai: OpenAI) -> None:
    """By a turn that was overtaken, or by its id: as long as nobody cancels the batch, each line gets an answer."""
    lines = [line(number, max_tokens=400) for number in range(3)]
    batch = begin(openai, lines)
    job_id = line_job_id(batch.id, 1, 0, 1)
    eventually(lambda: house.post(f"/v1/jobs/{job_id}/cancel", {})[0] == 200)
    done = ended(openai, batch)
    assert done.request_counts and done.request_counts.to_dict() == {"total": 3, "completed": 3, "failed": 0}
    answers_are_right(content(openai, done.output_file_id), lines)
    assert json.loads(house.get(f"/v1/jobs/{job_id}")[1])["cancelled_by"] == "owner"


def test_no_window_is_the_usual_one_and_ignored_fields_are_named(openai: OpenAI) -> None:
    """Null is the same as leaving the field out."""
    file = openai.files.create(file=jsonl([line(0)]), purpose="batch")
    more = {"completion_window": None, "queue": {"priority": "interactive"}, "unread": 1}
    made = openai.batches.with_raw_response.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", extra_body=more
    )
    assert made.headers["x-ignored-fields"] == "queue, unread"
    assert made.parse().completion_window == "24h" and made.parse().expires_at


def test_a_schedule_is_created_shown_steered_and_cancelled(openai: OpenAI) -> None:
    """As a batch that begins others; the next time and the last batch are shown."""
    lines = [line(number) for number in range(3)]
    times = {"cron": "0 8 * * 1-5", "timezone": "Europe/Berlin"}
    plan = begin(openai, lines, extra_body={"schedule": times}, metadata={"a": "b"})
    shown = openai.batches.retrieve(plan.id).to_dict()
    for each in (plan.to_dict(), shown, openai.batches.list(limit=1).data[0].to_dict()):
        assert (each["status"], each["schedule"], each["last_batch_id"]) == ("scheduled", times, None)
        assert each["next_run_at"] > each["created_at"] and each["expires_at"] is None
    for verb in ("pause", "resume"):
        openai.post(f"/batches/{plan.id}/{verb}", cast_to=object)
    openai.batches.cancel(plan.id)
    done = ended(openai, plan).to_dict()
    assert (done["status"], done["next_run_at"], done["errors"]) == ("cancelled", None, None)


def test_a_line_has_no_time_of_its_own(openai: OpenAI) -> None:
    done = ended(openai, begin(openai, [line(0), line(1, queue={"delay_ms": 5})]))
    assert done.request_counts and (done.request_counts.completed, done.request_counts.failed) == (1, 1)
    (refused,) = content(openai, done.error_file_id)
    assert refused["response"]["body"]["error"]["param"] == "queue.not_before"


NO_SCHEDULES: list[dict[str, Any]] = [
    *({}, {"cron": "@daily"}, {"cron": "0 0 30 2 *"}),
    *({"cron": "* * * * *", "timezone": "x"}, {"cron": "* * * * *", "a": 1}),
]


@pytest.mark.parametrize("schedule", NO_SCHEDULES)
def test_what_is_no_schedule_is_refused(openai: OpenAI, schedule: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError) as refused:
        begin(openai, [line(0)], extra_body={"schedule": schedule})
    assert str(refused.value.param).startswith("schedule")
