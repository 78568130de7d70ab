"""Bodies that clients compressed, and text in other encodings, on every route that reads a body."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from backports import zstd
from house import ADMIN_TOKEN, House
from starlette.requests import Request

from api.app import SLICE_BYTES, decoded

pytestmark = pytest.mark.slow

BODY_LIMIT = 2 * 1024 * 1024
CHAT = {"model": "sim", "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
JSON = "application/json"


def bare(data: bytes) -> bytes:
    return zlib.compress(data, wbits=-15)


CODINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "X-GZip": gzip.compress,
    "deflate": zlib.compress,
    "Deflate": bare,
    "zstd": zstd.compress,
    "ZSTD": lambda data: zstd.compress(data[:20]) + zstd.compress(data[20:]),
    "identity": lambda data: data,
    "": lambda data: data,
    "gzip,": lambda data: gzip.compress(data[:20]) + gzip.compress(data[20:]),
    "gzip ": lambda data: gzip.compress(data) + b"\0",
    "gzip  ": lambda data: gzip.compress(data).ljust(10_240, b"\0"),
    "gzip, identity": gzip.compress,
}

UPLOAD = (
    b'--cut\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--cut\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n'
    b'\r\n{"custom_id": "1"}\n\r\n--cut--\r\n'
)
FORM = "multipart/form-data; boundary=cut"

ROUTES: dict[tuple[str, str], tuple[Any, int]] = {
    ("POST", "/v1/chat/completions"): (CHAT, 200),
    ("POST", "/v1/responses"): ({"model": "sim", "input": "x", "max_output_tokens": 16}, 200),
    ("POST", "/v1/jobs"): (CHAT, 202),
    ("POST", "/v1/batches"): (
        {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
        400,
    ),
    ("PUT", "/admin/pools/sim"): ({"want": 1}, 200),
    ("POST", "/console/session"): ({"link": "x"}, 401),
    ("POST", "/v1/files"): (UPLOAD, 200),
}


def sent(house: House, body: bytes, coding: str, path: str = "/v1/chat/completions", method: str = "POST") -> Any:
    kind = FORM if path == "/v1/files" else JSON
    fields = {"Content-Type": kind, "Content-Encoding": coding, "Authorization": f"Bearer {ADMIN_TOKEN}"}
    status, headers, answer = house.request(method, path, body, fields)
    return status, headers, json.loads(answer)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_each_route_reads_encoded_bodies(house: House, method: str, path: str) -> None:
    """As it reads plain ones; a coding that is not known, and a label that does not fit, are refused by name."""
    fields, _ = ROUTES[method, path]
    plain = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    without = sent(house, plain, "identity", path, method)
    for coding in ("gzip", "zstd"):
        found = sent(house, CODINGS[coding](plain), coding, path, method)
        assert (found[0], found[2].get("error")) == (without[0], without[2].get("error")), found
    assert sent(house, zstd.compress(gzip.compress(plain)), "gzip, zstd", path, method)[0] == 415, "one at a time"
    unknown = sent(house, plain, "br", path, method)
    assert (unknown[0], unknown[2]["error"]["code"]) == (415, "unsupported_content_encoding")
    assert unknown[1]["accept-encoding"] == "gzip, deflate, zstd"
    wrong = sent(house, plain, "gzip", path, method)
    assert (wrong[0], wrong[2]["error"]["code"]) == (400, "invalid_content_encoding")
    assert "gzip" in wrong[2]["error"]["message"]
    unlabelled = sent(house, gzip.compress(plain), "", path, method)
    assert unlabelled[0] == 400 and (path == "/v1/files" or "gzip" in unlabelled[2]["error"]["message"])


@pytest.mark.parametrize("coding", CODINGS)
def test_each_coding_is_undone(house: House, coding: str) -> None:
    assert sent(house, CODINGS[coding](json.dumps(CHAT).encode()), coding)[0] == 200


WRONG: dict[str, tuple[str, bytes]] = {
    "cut off": ("gzip", gzip.compress(b"{}")[:-1]),
    "cut off, zstd": ("zstd", zstd.compress(b"{}" * 100)[:-1]),
    "nothing": ("gzip", b""),
    "behind it": ("gzip", gzip.compress(b"{}") + b"more"),
    "more behind zeros": ("gzip", gzip.compress(b"{}") + b"\0\0more"),
    "many zeros behind it": ("gzip", gzip.compress(b"{}") + b"\0" * 1_000_000),
    "zeros behind it, zstd": ("zstd", zstd.compress(b"{}") + b"\0"),
    "zeros behind it, deflate": ("deflate", zlib.compress(b"{}") + b"\0"),
    "behind it, zstd": ("zstd", zstd.compress(b"{}") + b"more"),
    "behind it, deflate": ("deflate", zlib.compress(b"{}") + b"{}"),
    "tiny members": ("gzip", gzip.compress(b"[]") * 50_000),
    "empty frames": ("zstd", zstd.compress(b"") * 50_000),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_label_that_does_not_fit_is_refused(house: House, what: str) -> None:
    coding, body = WRONG[what]
    status, _, answer = sent(house, body, coding)
    assert (status, answer["error"]["code"]) == (400, "invalid_content_encoding"), answer


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd"])
def test_a_body_is_decoded_within_the_limit(house: House, coding: str) -> None:
    """The limit is one of decoded bytes, and is named; what is far larger is not decoded to its end."""
    fits = json.dumps(CHAT | {"messages": [{"role": "user", "content": "x" * 2_000}]}).encode()
    assert sent(house, CODINGS[coding](fits), coding)[0] == 200
    for size in (BODY_LIMIT - len(b'{"user": "') + 1, 8_000_000):
        body = CODINGS[coding](b'{"user": "' + b"x" * size)
        status, _, answer = sent(house, body, coding)
        assert (status, answer["error"]["code"]) == (413, "payload_too_large")
        assert f"{BODY_LIMIT}" in answer["error"]["message"]


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
async def test_decoding_lets_others_work(coding: str) -> None:
    """A slice is small, and other tasks run between two; also of what can hardly be compressed, received at once."""
    for data in (b"x" * 20 * SLICE_BYTES, random.Random(1).randbytes(10 * SLICE_BYTES).hex().encode()):
        body = CODINGS[coding](data)
        await check_slices(body, coding, data)


async def check_slices(body: bytes, coding: str, data: bytes) -> None:
    turns = 0

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    headers = {b"content-encoding": coding.encode()}
    scope = {"type": "http", "method": "POST", "headers": list(headers.items()), "state": {"headers": headers}}
    beside = asyncio.create_task(other())
    parts = [part async for part in Request(scope, decoded(scope, receive)).stream()]
    beside.cancel()
    assert b"".join(parts) == data and max(map(len, parts)) <= SLICE_BYTES and turns >= 20


def test_a_retry_may_have_another_coding(house: House) -> None:
    """And a byte order mark or none: the fingerprint of an idempotency key is that of the decoded body."""
    body, jobs = json.dumps(CHAT).encode(), set()
    for coding, data in (("", body), ("gzip", gzip.compress(body)), ("zstd", zstd.compress(b"\xef\xbb\xbf" + body))):
        headers = {"Content-Type": JSON, "Content-Encoding": coding, "Idempotency-Key": "once"}
        status, _, answer = house.request("POST", "/v1/jobs", data, headers)
        assert status == 202, answer
        jobs.add(json.loads(answer)["id"])
    assert len(jobs) == 1


def test_an_encoded_part_of_an_upload_is_refused(house: House) -> None:
    for field in (b"Content-Encoding: gzip", b"Content-Transfer-Encoding: base64"):
        body = UPLOAD.replace(
            b'name="file"; filename="in.jsonl"\r\n', b'name="file"; filename="in.jsonl"\r\n' + field + b"\r\n"
        )
        status, _, answer = sent(house, body, "", "/v1/files")
        assert status == 415 and field.split()[0].decode().strip(":") in answer["error"]["message"]
    body = UPLOAD.replace(b"--cut\r\n", b"--cut\r\nContent-Transfer-Encoding: Binary\r\n")
    assert sent(house, body, "", "/v1/files")[0] == 200


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/jobs", "/v1/responses", "/v1/batches", "/admin/pools/sim"]
)
def test_a_byte_order_mark_is_ignored_and_other_encodings_are_named(house: House, path: str) -> None:
    method, (fields, status) = next((method, case) for (method, at), case in ROUTES.items() if at == path)
    text = json.dumps(fields | {"user": "é"}, ensure_ascii=False)
    plain = sent(house, text.encode(), "", path, method)
    marked = sent(house, text.encode("utf-8-sig"), "", path, method)
    assert (plain[0], marked[0]) == ((status,) * 2 if path != "/admin/pools/sim" else (400, 400))
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"):
        refused, _, answer = sent(house, text.encode(encoding), "", path, method)
        assert refused == 400 and encoding[:6].upper() in answer["error"]["message"]
    refused, _, answer = sent(house, text.encode("latin-1"), "", path, method)
    at = text.index("é") + 1
    assert refused == 400 and f"byte {at} is 0xe9" in answer["error"]["message"]
