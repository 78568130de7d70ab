"""Bodies that cost much, bodies that end early, requests for many choices, and addresses that are nearly right."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from batching import begin, client, content, ended
from brokering import intake_of
from house import House, eventually, module_house
from hypothesis import given
from hypothesis import strategies as st
from matrices import Fields
from pydantic import ValidationError

from api.openai import json_body
from api.openai.batch_lines import BatchRequest
from api.openai.errors import ApiError
from api.openai.fields import StrictBody
from api.openai.json_body import MAX_JSON_WEIGHT, Weighed, check_weight, nested_beyond, read_object, weighed
from api.openai.schemas import (
    ChatJobRequest,
    ChatRequest,
    CompletionJobRequest,
    CompletionRequest,
    Kind,
    check_choices,
    parse,
)
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


def is_too_large(line: socket.socket) -> bool:
    """Whether the next answer says so."""
    answer = http.client.HTTPResponse(line)
    answer.begin()
    return (answer.status, json.loads(answer.read())["error"]["code"]) == (413, "payload_too_large")


def test_a_body_is_refused_by_the_length_it_announces(house: House) -> None:
    """Nothing of it is read; the client that asks first is told at once."""
    with socket.create_connection(("127.0.0.1", house.port), 30) as line:
        line.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Expect: 100-continue\r\nContent-Length: 104857600\r\n\r\n"
        )
        assert is_too_large(line)


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
        assert is_too_large(line)


# --- clients that leave ---------------------------------------------------------------------------------------------


lone_house = module_house("workers")
"""One whose API process has no other clients than a test's own."""


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

    files, memory = open_files(), list[int]()
    for _ in range(8):
        for _ in range(200):
            abort()
        eventually(lambda: open_files() <= files)
        assert house.post("/v1/chat/completions", CHAT)[0] == 200
        memory.append(memory_kib())
    settled = memory[2:]  # the allocator and the threads that write to disk keep some of it at first
    growths = sorted(later - one for one, later in pairwise(settled))
    peak = growths.pop()  # on a loaded machine more bodies come at once, once: the allocator keeps their memory
    assert peak < 200 * len(sent) / 1024, f"more than all bodies of a round: {memory}"
    assert sum(growths) / len(growths) < 2 * 1024, f"the memory goes on growing: {memory}"
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


# --- how many choices one request may ask for -----------------------------------------------------------------------


SMALL: dict[str, Any] = {"model": "sim", "prompt": ["a"] * 128, "n": 8, "max_tokens": 4}
"""600 bytes that ask for 1,024 choices."""
MESSAGES = [{"role": "user", "content": "hello"}]


offline_house = module_house("workers", "offline")
"""One with the offline work, and as it is without any setting."""


def refusal(answer: tuple[int, dict[str, str], bytes]) -> dict[str, Any]:
    status, _, body = answer
    assert status == 400, body
    error: dict[str, Any] = json.loads(body)["error"]
    return error


def test_a_small_body_cannot_ask_for_a_thousand_texts(offline_house: House) -> None:
    """It is refused before anything is queued, with the field, the numbers and the way out; 64 are taken."""
    assert len(json.dumps(SMALL)) < 700
    jobs = {"endpoint": "/v1/completions", **SMALL}
    for path, body in (("/v1/completions", SMALL), ("/v1/completions", SMALL | {"stream": True}), ("/v1/jobs", jobs)):
        error = refusal(offline_house.post(path, body))
        assert error["param"] == "prompt" and error["code"] == "invalid_request_error"
        assert all(word in error["message"] for word in ("1,024", "64", "api.max_choices_per_request", "lower n"))
    for prompt, n in ((["a"] * 65, 1), (["a"] * 9, 8), ([[1]] * 33, 2)):
        refusal(offline_house.post("/v1/completions", SMALL | {"prompt": prompt, "n": n}))
    for prompt, n in ((["a"] * 64, 1), (["a"] * 8, 8), ([[1]] * 32, 2)):
        status, _, data = offline_house.post("/v1/completions", SMALL | {"prompt": prompt, "n": n})
        assert status == 200 and len(json.loads(data)["choices"]) == 64


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("chat", {"messages": MESSAGES, "n": 5}, "n"), ("completion", {"prompt": [1, 2, 3, 4, 5, 6], "n": 5}, "n"),
        ("completion", {"prompt": ["a"] * 5}, "prompt"), ("completion", {"prompt": [[1]] * 3, "n": 2}, "prompt"),
        ("job", {"endpoint": "/v1/completions", "prompt": ["a"] * 5}, "prompt"),
    ],
)  # fmt: skip
def test_the_field_at_fault_is_named(kind: Kind, fields: dict[str, Any], param: str) -> None:
    """n where there is one prompt; a list of token ids is one prompt."""
    request = parse(kind, json.dumps({"model": "m", **fields}).encode())
    with pytest.raises(ApiError) as caught:
        check_choices(request, 4)
    assert (caught.value.status, caught.value.param) == (400, param)
    check_choices(request, (request.prompts if isinstance(request, CompletionRequest) else 1) * (request.n or 1))


def test_a_line_of_a_batch_is_held_to_it(offline_house: House) -> None:
    """The line is answered with the error, the others are computed."""
    openai = client(offline_house)
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": SMALL | more}
        for name, more in (("large", {}), ("fine", {"prompt": ["a", "b"], "n": 2}))
    ]
    done = ended(openai, begin(openai, lines, endpoint="/v1/completions"))
    assert done.request_counts and (done.request_counts.completed, done.request_counts.failed) == (1, 1)
    (good,), (bad,) = content(openai, done.output_file_id), content(openai, done.error_file_id)
    assert good["custom_id"] == "fine" and len(good["response"]["body"]["choices"]) == 4
    assert all(choice["text"] for choice in good["response"]["body"]["choices"])
    assert bad["custom_id"] == "large" and bad["response"]["status_code"] == 400
    assert "api.max_choices_per_request" in bad["response"]["body"]["error"]["message"]


async def test_a_message_of_a_broker_is_held_to_it(wire: RedisClient) -> None:
    """It is rejected, and says why."""
    intake = await intake_of(wire)
    with pytest.raises(Rejected, match="1,024 choices"):
        await intake.accept(json.dumps({"endpoint": "/v1/completions", **SMALL}).encode(), "large")
    assert await intake.accept(
        json.dumps({"endpoint": "/v1/completions", **SMALL, "n": 1, "prompt": "a"}).encode(), "b"
    )
