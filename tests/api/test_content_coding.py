"""Bodies that clients compressed are refused, and so is text in other encodings, on every route that reads a body."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from house import ADMIN_TOKEN, House

pytestmark = pytest.mark.slow

CHAT = {"model": "sim", "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
JSON = "application/json"


UPLOAD = (
    b'--cut\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--cut\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n'
    b'\r\n{"custom_id": "1"}\n\r\n--cut--\r\n'
)
FORM = "multipart/form-data; boundary=cut"

ROUTES: dict[tuple[str, str], tuple[Any, int]] = {
    ("POST", "/v1/chat/completions"): (CHAT, 200),
    ("POST", "/v1/completions"): ({"model": "sim", "prompt": "x", "max_tokens": 2}, 200),
    ("POST", "/v1/responses"): ({"model": "sim", "input": "x", "max_output_tokens": 16}, 200),
    ("POST", "/v1/responses/input_tokens"): ({"model": "sim", "input": "x"}, 200),
    ("POST", "/v1/conversations"): ({}, 200),
    ("POST", "/v1/jobs"): (CHAT, 202),
    ("POST", "/v1/batches"): (
        {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
        400,
    ),
    ("POST", "/v1/embeddings"): ({"model": "sim", "input": "x"}, 200),
    ("POST", "/v1/rerank"): ({"model": "sim", "query": "x", "documents": ["y"]}, 200),
    ("POST", "/tokenize"): ({"model": "sim", "prompt": "x"}, 200),
    ("POST", "/detokenize"): ({"model": "sim", "tokens": [1]}, 200),
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
def test_each_route_refuses_encoded_bodies(house: House, method: str, path: str) -> None:
    """By name; also a label that does not fit, and a compressed body without one."""
    fields, status = ROUTES[method, path]
    plain = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    assert sent(house, plain, "Identity", path, method)[0] == status
    for coding, body in (("gzip", gzip.compress(plain)), ("br", plain), ("gzip, br", plain)):
        refused = sent(house, body, coding, path, method)
        assert (refused[0], refused[2]["error"]["code"]) == (415, "unsupported_content_encoding")
        assert refused[1]["accept-encoding"] == "identity"
    unlabelled = sent(house, gzip.compress(plain), "", path, method)
    assert unlabelled[0] == 400 and (path == "/v1/files" or "gzip" in unlabelled[2]["error"]["message"])


def test_a_retry_may_have_a_byte_order_mark(house: House) -> None:
    """Or none: the fingerprint of an idempotency key is that of the text."""
    body, jobs = json.dumps(CHAT).encode(), set()
    for data in (body, b"\xef\xbb\xbf" + body):
        status, _, answer = house.request("POST", "/v1/jobs", data, {"Content-Type": JSON, "Idempotency-Key": "once"})
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


# --- text ------------------------------------------------------------------------------------------------------------


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
