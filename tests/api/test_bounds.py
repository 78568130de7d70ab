"""Bodies that cost much, bodies that end early, and addresses that are nearly right, at real processes."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from brokering import intake_of
from house import House, eventually, serving
from hypothesis import given
from hypothesis import strategies as st
from matrices import Fields
from pydantic import ValidationError

from api.openai import json_body
from api.openai.batch_lines import BatchRequest
from api.openai.errors import ApiError
from api.openai.fields import StrictBody
from api.openai.json_body import MAX_JSON_WEIGHT, Weighed, check_weight, nested_beyond, read_object, weighed
from api.openai.schemas import ChatJobRequest, ChatRequest, CompletionJobRequest, CompletionRequest, parse
from api.openapi import document
from offline.broker import Rejected
from streaming.redis.client import RedisClient

pytestmark = pytest.mark.slow

BODY_LIMIT = 2 * 1024 * 1024
CHAT = {"model": "sim", "messages": [{"role": "user", "content": "x"}]}


# --- what a body costs ----------------------------------------------------------------------------------------------


def body_of(**fields: Any) -> bytes:
    return json.dumps(CHAT | fields, separators=(",", ":")).encode()


def ids(count: int) -> bytes:
    return json.dumps({"model": "sim", "prompt": [50_000] * count}, separators=(",", ":")).encode()


HEAVY = {
    "lists": body_of(x=[[]] * 600_000),
    "objects": body_of(x=[{}] * 600_000),
    "keys": body_of(x={f"{number:x}": 1 for number in range(200_000)}),
    "ids": ids(300_000),
    "strings": body_of(x=["x"] * 500_000),
    "parts": body_of(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}] * 20}] * 1000),
    "escapes": body_of(user="\n" * 600_000),
    "digits": body_of(x=[int("7" * 4_300)] * 120),
    "behind a long text": body_of(user="," * 500_000 + '"' * 100_000, x=[[]] * 20_000),
}
LIGHT = {
    "text": body_of(messages=[{"role": "user", "content": 'He said: "[1, 2, {3: 4}]", and left.\\n' * 45_000}]),
    "messages": body_of(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}]}] * 1024),
    "ids": ids(130_000),
    "digits of a text": body_of(messages=[{"role": "user", "content": "3141592653589793" * 100_000}]),
    "prompts": json.dumps({"model": "sim", "prompt": [[7] * 256] * 128}).encode(),
}


def test_one_body_that_stopped_all_streams_is_refused(house: House) -> None:
    """The body of the review: 2 MB of lists."""
    body = b'{"x":[' + b",".join([b"[]"] * (BODY_LIMIT // 3 - 10)) + b"]}"
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/jobs", "/v1/batches"):
        status, _, answer = house.post(path, body)
        error = json.loads(answer)["error"]
        assert (status, error["code"]) == (400, "body_too_complex") and str(MAX_JSON_WEIGHT) in error["message"]
    assert house.request("PUT", "/admin/pools/sim", body)[0] == 400


@pytest.mark.parametrize("what", HEAVY)
async def test_nothing_is_parsed_that_was_not_weighed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads a body, a line or a message need not think of it; what was weighed is not weighed again."""
    with pytest.raises(ApiError) as refused:
        await weighed(HEAVY[what])
    assert (refused.value.status, refused.value.code) == (400, "body_too_complex")
    for read in (check_weight, lambda body: parse("job", body), lambda body: parse("chat", body), read_object):
        with pytest.raises(ApiError) as refused:
            read(HEAVY[what])
        assert refused.value.code == "body_too_complex"
    monkeypatch.setattr(json_body, "_weigh", None)
    if what != "digits":  # which are more than a job can hold
        assert read_object(Weighed(HEAVY[what])).keys() >= {"model"}


@pytest.mark.parametrize("what", LIGHT)
async def test_what_people_send_is_light_enough(what: str) -> None:
    assert await weighed(LIGHT[what]) == LIGHT[what]
    parse("completion" if what in ("ids", "prompts") else "chat", LIGHT[what])


async def test_weighing_lets_others_work() -> None:
    """A body of 2 MB is looked at in slices; other tasks run between them."""
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    await weighed(body_of(user="x" * 2_000_000))
    beside.cancel()
    assert turns >= 2_000_000 // json_body.SLICE_BYTES


def weight(value: Any) -> int:
    """By the definition: 8 for each list and object, 4 for each key, 1 for each comma; escapes aside."""
    if not isinstance(value, dict | list):
        return 0
    inner = sum(weight(each) for each in (value.values() if isinstance(value, dict) else value))
    return 8 + inner + max(len(value) - 1, 0) + (4 * len(value) if isinstance(value, dict) else 0)


NASTY = st.text(alphabet='ab\\",:[]{}é\n\x01', max_size=30)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | NASTY,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(NASTY, inner, max_size=5),
    max_leaves=40,
)


@given(VALUES, st.integers(2, 40), st.booleans())
def test_the_weight_is_that_of_what_is_no_text(value: Any, size: int, ascii_only: bool) -> None:
    """However the slices fall, and whatever strings hold."""
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    found = weight(value) + body.count(b"\\") // 4
    limit, slices = json_body.MAX_JSON_WEIGHT, json_body.SLICE_BYTES
    try:
        json_body.SLICE_BYTES = size
        for most in (found, found - 1):
            json_body.MAX_JSON_WEIGHT = most
            try:
                check_weight(body)
                assert most == found
            except ApiError:
                assert most < found
    finally:
        json_body.MAX_JSON_WEIGHT, json_body.SLICE_BYTES = limit, slices


def depth(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)


@given(VALUES)
def test_how_deep_it_is_nested_is_known(value: Any) -> None:
    found = depth(value)
    assert not nested_beyond(value, found)
    assert not found or nested_beyond(value, found - 1)


# --- what an error report costs --------------------------------------------------------------------------------------

MAX_ERRORS = 40
MODELS = (ChatRequest, CompletionRequest, ChatJobRequest, CompletionJobRequest, BatchRequest)
MANY: tuple[Any, ...] = (
    [1] * 10_000, [{}] * 1000, [[]] * 1000, [None] * 1000, ["x", *[1] * 1000], [1, *["x"] * 1000], [[1], *["x"] * 1000],
    [["x"] * 1000] * 100, ["x" * 300] * 4, [{"type": "text", "text": "x"}, *[{}] * 1000],
    {f"k{number}": 1 for number in range(10_000)}, {"k" * 70 + str(number): 1 for number in range(10_000)},
    {"k" * 70 + str(number): 1 for number in range(16)},
    {"type": "text"} | {str(number): 1 for number in range(10_000)},
)  # fmt: skip


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_ten_thousand_mistakes_are_a_few_errors(model: type[StrictBody]) -> None:
    """In any field, however deep: to make each of them an error would take far longer than to read the body."""
    schemas = document("0")["components"]["schemas"]
    fields = Fields(model.__name__, schemas, Fields(model.__name__, schemas, {}).example(schemas[model.__name__]))
    refused = 0
    for place in fields.places():
        for value in MANY:
            try:
                model.model_validate(place.body(value))
            except ValidationError as error:
                refused += 1
                assert error.error_count() <= MAX_ERRORS, (place.name, str(value)[:80])
    assert refused > 100 or model is BatchRequest


async def test_a_heavy_message_of_a_broker_is_rejected(wire: RedisClient) -> None:
    """It says why, and the next one is taken."""
    intake = await intake_of(wire)
    with pytest.raises(Rejected, match="too many values"):
        await intake.accept(HEAVY["lists"], "heavy")
    assert await intake.accept(body_of(), "light")


def test_of_a_key_that_comes_twice_the_last_one_counts(house: House) -> None:
    """As JSON parsers of most languages have it; there is only one parser here, so nothing is read in two ways."""
    body = b'{"model":"nothing","model":"sim","max_tokens":9,"max_tokens":1,"messages":[{"role":"user","content":"x"}]}'
    status, _, answer = house.post("/v1/chat/completions", body)
    assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] == 1


def test_a_body_is_refused_by_the_length_it_announces(house: House) -> None:
    """Nothing of it is read; the client that asks first is told at once."""
    with socket.create_connection(("127.0.0.1", house.port), 30) as line:
        line.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Expect: 100-continue\r\nContent-Length: 104857600\r\n\r\n"
        )
        answer = http.client.HTTPResponse(line)
        answer.begin()
        assert answer.status == 413 and json.loads(answer.read())["error"]["code"] == "payload_too_large"


def test_a_body_that_announces_no_length_is_refused_once_it_is_too_long(house: House) -> None:
    """At its first byte too many: its end is not waited for."""
    start = b'{"model":"sim","max_tokens":1,"messages":[{"role":"user","content":"'
    with socket.create_connection(("127.0.0.1", house.port), 30) as line:
        line.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        for piece in (start, *([b"x" * 64 * 1024] * 31), b"x" * (BODY_LIMIT - 31 * 64 * 1024 - len(start)), b"x"):
            line.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        answer = http.client.HTTPResponse(line)
        answer.begin()
        assert answer.status == 413 and json.loads(answer.read())["error"]["code"] == "payload_too_large"


# --- clients that leave ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lone_house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One whose API process has no other clients than a test's own."""
    with serving(tmp_path_factory.mktemp("lone"), "workers") as house:
        yield house


ABORTED = {
    "/v1/chat/completions": "application/json",
    "/v1/batches": "application/json",
    "/v1/files": "multipart/form-data; boundary=cut",
    "/v1/jobs/job_0/cancel": "application/json",
}
FORM = (
    b'--cut\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--cut\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
)


@pytest.mark.parametrize("path", ABORTED)
def test_two_hundred_clients_that_leave_are_no_errors(lone_house: House, path: str) -> None:
    """In the middle of their bodies: no 500, no traceback, no ERROR line; memory and files are given back."""
    house, sent = lone_house, FORM + b"x" * 200_000
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {ABORTED[path]}\r\nContent-Length: 500000\r\n\r\n"
    pid = house._processes[-1].pid

    def abort() -> None:
        with socket.create_connection(("127.0.0.1", house.port), 30) as line:
            line.sendall(head.encode() + sent)

    def memory_kib() -> int:
        page = Path(f"/proc/{pid}/status").read_text()
        return next(int(line.split()[1]) for line in page.splitlines() if line.startswith("VmRSS:"))

    def open_files() -> int:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))

    files = open_files()
    for _ in range(8):  # the allocator and the threads that write to disk keep some of it at first
        before = memory_kib()
        for _ in range(200):
            abort()
        eventually(lambda: open_files() <= files)
        assert house.post("/v1/chat/completions", CHAT)[0] == 200
        if memory_kib() - before < 2 * 1024:
            break
    else:
        pytest.fail("the memory goes on growing")
    said = house.log("api")
    assert "ERROR" not in said and "Traceback" not in said and '"level":"error"' not in said.replace(" ", "").lower()
    metrics = house.get("/metrics")[1].decode()
    assert not [line for line in metrics.splitlines() if 'status="500"' in line]
    assert not list(house.folder.glob("**/incoming/*"))


# --- addresses that are nearly right --------------------------------------------------------------------------------


MEANT = {
    "/v1//chat/completions": "POST /v1/chat/completions", "/v1/v1/models": "GET /v1/models",
    "/chat/completions": "POST /v1/chat/completions", "/v1/models/": "GET /v1/models",
    "/V1/Chat/Completions": "POST /v1/chat/completions", "/openai/v1/responses": "POST /v1/responses",
    "/api/v1/jobs/job_1/events": "GET /v1/jobs/job_1/events", "/v1/./models": "GET /v1/models",
    "/v1/x/../models": "GET /v1/models", "/v1%2F%2Fmodels": "GET /v1/models", "/v1//jobs/job_1": "GET /v1/jobs/job_1",
    "/v1/openai/deployments/chat/completions": "POST /v1/chat/completions",
    "/v1/chat/completion": "POST /v1/chat/completions", "/v1/embedding": "POST /v1/embeddings",
    "/v1/tokenize": "POST /tokenize", "/jobs/job_1/": "GET /v1/jobs/job_1", "/jobs": "GET POST /v1/jobs",
    "/v1/chat/completions%20": "POST /v1/chat/completions", "/v1/healthz": "GET /healthz",
    "/admin/pools/": "GET /admin/pools", "/nothing/like/it": "", "/v1/secret-word": "",
    "/" + "v1/" * 5_000 + "models": "", "/v1": "", "/.env": "", "/v1/jobs//events": "", "/v1/batches//cancel": "",
    "/files/file-1": "GET DELETE /v1/files/file-1",
}  # fmt: skip
"""For each wrong path the right one, after the methods by which it can be asked."""


@pytest.mark.parametrize("path", MEANT)
def test_an_address_that_is_nearly_right_is_told_the_right_one(house: House, path: str) -> None:
    """By each method that the right one has, never with a redirect."""
    *methods, right = MEANT[path].split() or [""]
    for method in ("GET", "HEAD", "POST", "DELETE"):
        status, headers, answer = house.request(method, path, b"{}" if method == "POST" else None)
        assert status == 404 and "location" not in headers
        if method != "HEAD":
            error = json.loads(answer)["error"]
            assert error["code"] == "not_found"
            assert error["message"].partition("Did you mean ")[2] == (f"{right}?" if method in methods else ""), method


# --- the process's own limits ---------------------------------------------------------------------------------------
