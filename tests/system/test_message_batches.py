"""Batches of Anthropic's Messages API, by the official client, with real processes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic, BadRequestError, ConflictError, NotFoundError
from batching import said
from house import House, eventually, key_rows, module_house, restartable, serving
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

pytestmark = pytest.mark.slow
ROWS = {"green": "batch_tokens = 40", "small": "quotas = { file_bytes = 6000 }"}
SETTINGS = key_rows(red="", blue="", **ROWS) + '[aliases]\n"claude-*" = "sim"\n'
house = module_house("workers", "offline", settings=SETTINGS)


@pytest.fixture
def red(house: House) -> Iterator[Anthropic]:
    with Anthropic(base_url=house.url, api_key="red", max_retries=0) as client:
        yield client


@pytest.fixture
def blue(house: House) -> Iterator[Anthropic]:
    with Anthropic(base_url=house.url, api_key="blue", max_retries=0) as client:
        yield client


def request(name: str, text: str = "hello", **more: Any) -> Any:
    params = {"model": "claude-4", "max_tokens": 4, "messages": [{"role": "user", "content": text}]} | more
    return {"custom_id": name, "params": params}


def ended(client: Anthropic, batch_id: str) -> Any:
    """The batch once it has ended."""
    eventually(lambda: client.messages.batches.retrieve(batch_id).processing_status == "ended")
    return client.messages.batches.retrieve(batch_id)


def counts(batch: Any) -> dict[str, int]:
    return {name: count for name, count in batch.request_counts.model_dump().items() if count}


def test_each_request_has_its_result(house: House, red: Anthropic) -> None:
    """A message as the endpoint gives it, or the error that it gives; the client's own names and models."""
    thinking = {"type": "adaptive"}
    asked = [request("one"), request("two\n", "x\ny"), request("bad", max_tokens=0), request("same", thinking=thinking)]
    made = red.messages.batches.create(requests=asked)
    assert made.processing_status in ("in_progress", "ended") and made.type == "message_batch"
    assert sum(made.request_counts.model_dump().values()) == 4
    batch = ended(red, made.id)
    assert counts(batch) == {"succeeded": 3, "errored": 1}
    assert batch.ended_at is not None and batch.ended_at >= batch.created_at < batch.expires_at
    found = {each.custom_id: each.result for each in red.messages.batches.results(made.id)}
    assert set(found) == {"one", "two\n", "bad", "same"}
    one, bad = found["one"], found["bad"]
    assert one.type == "succeeded" and one.message.content[0].text == said("hello", 4)
    assert (one.message.model, one.message.stop_reason, one.message.usage.output_tokens) == ("sim", "max_tokens", 4)
    assert bad.type == "errored" and bad.error.error.type == "invalid_request_error"
    assert "max_tokens" in bad.error.error.message
    assert not [file for file in files(house) if file["purpose"] == "batch"], "its input is no file of the client's"


def files(house: House) -> list[dict[str, Any]]:
    return json.loads(house.request("GET", "/v1/files", headers={"Authorization": "Bearer red"})[2])["data"]


def test_batches_are_listed_and_deleted(red: Anthropic, blue: Anthropic) -> None:
    """Newest first, page by page, for their tenant alone."""
    made = [red.messages.batches.create(requests=[request("a")]).id for _ in range(3)]
    assert [each.id for each in red.messages.batches.list(limit=2)][:3] == made[::-1]
    assert [each.id for each in red.messages.batches.list(limit=1, before_id=made[0])] == [made[1], made[2]]
    page = red.messages.batches.list(limit=1000, before_id=made[0])
    assert ([each.id for each in page.data], page.has_more) == ([made[2], made[1]], False)
    assert made[0] not in [each.id for each in blue.messages.batches.list()]
    for call in (blue.messages.batches.retrieve, blue.messages.batches.cancel, blue.messages.batches.delete):
        with pytest.raises(NotFoundError) as caught:
            call(made[0])
        assert caught.value.body["type"] == "error"  # type: ignore[index]
    ended(red, made[0])
    assert red.messages.batches.delete(made[0]).type == "message_batch_deleted"
    with pytest.raises(NotFoundError):
        red.messages.batches.results(made[0])
    assert made[0] not in [each.id for each in red.messages.batches.list()]


def test_a_batch_is_cancelled(house: House, red: Anthropic) -> None:
    """What had no answer is `canceled`; before the end there are no results, and nothing is deleted."""
    made = red.messages.batches.create(requests=[request(f"r{number}", max_tokens=500) for number in range(200)])
    status, _, body = house.request("GET", f"/v1/messages/batches/{made.id}/results", headers={"X-Api-Key": "red"})
    assert (status, json.loads(body)["type"]) == (400, "error")
    with pytest.raises(ConflictError):
        red.messages.batches.delete(made.id)
    assert red.messages.batches.cancel(made.id).cancel_initiated_at is not None
    batch = ended(red, made.id)
    results = [each.result.type for each in red.messages.batches.results(made.id)]
    assert len(results) == 200 and set(results) <= {"succeeded", "canceled"} and "canceled" in results
    assert counts(batch) == {name: results.count(name) for name in set(results)}


def test_a_batch_is_made_once(house: House) -> None:
    """By its idempotency key; and one that was made from a file of messages is the same."""
    body, red = {"requests": [request("a")]}, {"Authorization": "Bearer red", "Idempotency-Key": "once"}
    first, again = (json.loads(house.post("/v1/messages/batches", body, red)[2]) for _ in range(2))
    assert first["id"] == again["id"] and first["id"].startswith("msgbatch_")
    status, _, said = house.post("/v1/messages/batches", {"requests": [request("b")]}, red)
    assert (status, json.loads(said)["error"]["type"]) == (422, "invalid_request_error")
    told = house.request("GET", f"/v1/messages/batches/{first['id']}", headers=red)[1]
    assert told["request-id"] == told["x-request-id"]
    shown = json.loads(house.request("GET", f"/v1/batches/{first['id'][3:]}", headers=red)[2])
    assert shown["endpoint"] == "/v1/messages"


@pytest.mark.parametrize(
    "requests", [[], [request("a"), request("a")], [request("")], [request("x" * 65)], [{"custom_id": "a"}]]
)
def test_what_cannot_be_a_batch_is_refused(red: Anthropic, requests: Any) -> None:
    with pytest.raises(BadRequestError) as caught:
        red.messages.batches.create(requests=requests)
    assert "requests" in caught.value.body["error"]["param"]  # type: ignore[index]


def test_a_request_that_no_line_can_hold_is_refused_at_once(house: House) -> None:
    """Later it would end the whole batch."""
    deep = b'{"a":' * 300 + b"1" + b"}" * 300
    for params in (deep, b'{"a":"%b"}' % (b"x" * (2 * 1024 * 1024 - 60))):
        body = b'{"requests":[{"custom_id":"a","params":%b}]}' % params
        status, _, answer = house.post("/v1/messages/batches", body, {"X-Api-Key": "red"})
        assert (status, json.loads(answer)["error"]["param"]) == (400, "requests[0]")


def test_tokens_beyond_a_limit_are_the_result_of_each_request(house: House) -> None:
    asked = [request("a"), request("b", "b"), request("a2"), request("bad", max_tokens=0)]
    asked += [request(f"r{number}", max_tokens=90) for number in range(3)]
    with Anthropic(base_url=house.url, api_key="green", max_retries=0) as green:
        made = green.messages.batches.create(requests=asked)
        assert counts(ended(green, made.id)) == {"errored": 7}
        found = {each.custom_id: each.result for each in green.messages.batches.results(made.id)}
        assert [each.error.error.type for each in found.values()].count("rate_limit_error") == 6
        assert found["bad"].error.error.type == "invalid_request_error"


def test_inputs_count_in_a_quota(house: House) -> None:
    """Once, while the batch runs; a refused one leaves nothing, and a repeated one needs no room."""
    small, work = {"X-Api-Key": "small"}, house.folder / ".penstock/files/batches"
    big = {"requests": [request("a", "x" * 7000)]}
    for key in ({}, {"Idempotency-Key": "big"}):
        before = {path for path in work.rglob("*") if path.is_file()}
        assert house.post("/v1/messages/batches", big, small | key)[0] == 429
        assert not {path for path in work.rglob("*") if path.is_file()} - before
    slow = {"requests": [request(f"r{number}", max_tokens=400) for number in range(25)]}
    made = [house.post("/v1/messages/batches", slow, small | {"Idempotency-Key": "slow"}) for _ in range(2)]
    assert [status for status, _, _ in made] == [200, 200]
    names = {json.loads(body)["id"] for _, _, body in made}
    assert len(names) == 1
    folder = work / names.pop()[3:]
    assert len(list(folder.glob("input*"))) == 1


def test_a_batch_is_cancelled_before_it_is_read(tmp_path: Path) -> None:
    """Each request has a result."""
    with serving(tmp_path) as house, Anthropic(base_url=house.url, api_key="none", max_retries=0) as client:
        made = client.messages.batches.create(requests=[request("a", model="sim"), request("bad", max_tokens=0)])
        assert client.messages.batches.cancel(made.id).processing_status == "canceling"
        house.start("offline")
        assert counts(ended(client, made.id)) == {"canceled": 1, "errored": 1}
        found = {each.custom_id: each.result.type for each in client.messages.batches.results(made.id)}
        assert found == {"a": "canceled", "bad": "errored"}


def test_a_batch_has_thousands_of_requests(house: House) -> None:
    """As many as its bytes allow; line breaks between its values are none of its input."""
    body = json.dumps({"requests": [request(f"r{number}") for number in range(15_000)]}, indent=1).encode()
    assert len(body) > 2 * 1024 * 1024
    assert house.post("/v1/messages/batches", body, {"X-Api-Key": "red", "Content-Type": "application/json"})[0] == 413
    body = json.dumps({"requests": [request(f"r{number}") for number in range(5_000)]}, indent=1).encode()
    status, _, answer = house.post("/v1/messages/batches", body, {"X-Api-Key": "red"})
    batch = json.loads(answer)
    assert status == 200 and sum(batch["request_counts"].values()) == 5_000, answer[:300]
    house.post(f"/v1/messages/batches/{batch['id']}/cancel", {}, {"X-Api-Key": "red"})


def result_kinds(client: Anthropic, batch_id: str) -> dict[str, str]:
    return {each.custom_id: each.result.type for each in client.messages.batches.results(batch_id)}


def test_a_batch_outlives_a_store_that_is_full_or_away(tmp_path: Path) -> None:
    """In its middle. Meanwhile another one is refused as overloaded, and nothing of it stays."""
    with restartable(tmp_path) as (house, restart), Redis.from_url(house.redis_url) as store:
        house.environ["PENSTOCK_SIM_STEP_MS"] = "5"
        house.start_all("workers", "offline")
        with Anthropic(base_url=house.url, api_key="none", max_retries=0) as client:
            asked = [request(f"r{number}", model="sim", max_tokens=200) for number in range(60)]
            made = client.messages.batches.create(requests=asked)
            eventually(lambda: client.messages.batches.retrieve(made.id).request_counts.succeeded >= 5)
            store.config_set("maxmemory", int(store.info("memory")["used_memory"]))
            refused = {"requests": asked[:1]}
            eventually(lambda: house.post("/v1/messages/batches", refused)[0] == 503)
            store.config_set("maxmemory", 0)
            with contextlib.suppress(RedisConnectionError):
                store.shutdown(nosave=True)
            eventually(lambda: house.post("/v1/messages/batches", refused)[0] == 503)
            status, _, body = house.post("/v1/messages/batches", refused)
            assert (status, json.loads(body)["error"]["type"]) == (503, "overloaded_error")
            restart()
            eventually(lambda: client.messages.batches.retrieve(made.id).processing_status == "ended", Exception)
            assert result_kinds(client, made.id) == {f"r{number}": "succeeded" for number in range(60)}
            assert [each.id for each in client.messages.batches.list()] == [made.id]


def test_content_rules_look_at_each_request(tmp_path: Path) -> None:
    """And at each answer: only what breaks a rule is refused or redacted."""
    word = said("hello", 4).split()[1]
    rules = {"in": ("block", "input", "secret"), "out": ("redact", "output", word)}
    (tmp_path / "penstock.toml").write_text("".join(
        f'[content.{name}]\ndeny = ["{text}"]\naction = "{action}"\non = ["{where}"]\ndefault = true\n'
        for name, (action, where, text) in rules.items()
    ))  # fmt: skip
    with serving(tmp_path, "workers", "offline") as house:
        client = house.closes(Anthropic(base_url=house.url, api_key="none", max_retries=0))
        asked = [request("a", model="sim"), request("b", "a secret", model="sim")]
        made = client.messages.batches.create(requests=asked)
        assert counts(ended(client, made.id)) == {"succeeded": 1, "errored": 1}
        found = {each.custom_id: each.result for each in client.messages.batches.results(made.id)}
        assert word not in found["a"].message.content[0].text.split()
        assert (found["b"].error.error.type, found["b"].error.error.code) == (
            "invalid_request_error",
            "content_filter",
        )


def test_a_request_that_kills_workers_is_a_dead_letter_and_can_be_replayed(tmp_path: Path) -> None:
    """Its result is an error; its replay is a message of its own."""
    with serving(tmp_path, "offline") as house:
        client = house.closes(Anthropic(base_url=house.url, api_key="none", max_retries=0))
        asked = [request("a", "[[crash@4]]", model="sim", max_tokens=9), request("b", model="sim")]
        made = client.messages.batches.create(requests=asked)
        for number in (1, 2, 3):
            house.start("workers", "--id", f"worker-{number}", PENSTOCK_SIM_FAULTS="true").wait(60)
        house.start("workers", "--id", "worker-4")
        assert counts(ended(client, made.id)) == {"succeeded": 1, "errored": 1}
        found = {each.custom_id: each.result for each in client.messages.batches.results(made.id)}
        assert (found["a"].error.error.type, found["a"].error.error.code) == ("api_error", "poison")
        (letter,) = json.loads(house.get("/admin/dlq")[1])["data"]
        again = json.loads(house.post(f"/admin/dlq/{letter['id']}/replay", {})[2])["id"]
        eventually(lambda: house.get(f"/v1/messages/msg_{again}")[0] == 200)
        message = json.loads(house.get(f"/v1/messages/msg_{again}")[1])
        assert message["content"][0]["text"] == said("[[crash@4]]", 9)
