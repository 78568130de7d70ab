"""Route x role and route x tenant, over HTTP: every operation of the route table under every key there may be.

A new route is in both matrices as soon as it is in the table; one that no rule knows fails until somebody says who may
use it.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import pytest
from batching import client, jsonl, line
from house import House, eventually, module_house
from matrices import OPERATIONS, Operation
from redis import Redis

from api.openapi import document
from api.settings import ENDPOINTS

pytestmark = pytest.mark.slow

KEYS = {"red": "sk-red-5f0c1d", "weak": "sk-weak-77aa0b", "root": "sk-root-9e1f2a", "blue": "sk-blue-c3d4e5"}
"""`red` and `weak` are one tenant's, `blue` another's; `root` may administer."""
SETTINGS = "".join(
    f'[keys.{name}]\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n{rest}\n'
    for (name, key), rest in zip(
        KEYS.items(),
        ('tenant = "red"', 'tenant = "red"\npriority = "batch"', 'tenant = "ops"\nadmin = true', 'tenant = "blue"'),
        strict=True,
    )
)
OPEN: Mapping[str, int] = {
    **dict.fromkeys(["/", "/health", "/healthz", "/readyz", "/version", "/openapi.json"], 200),
    **dict.fromkeys(["/console", "/console/{page:path}"], 200),  # a page without data: its scripts need a session
    "/console/assets/{build}/{name}": 404,  # of no file
    "/console/session": 400,  # it logs in who has a link or a key in the body
}
"""Answered without a key, and with which status."""
EITHER = {"/metrics"}
"""For whoever watches: open, or an admin's."""
NOBODY: Mapping[str, str | None] = {
    "none": None,
    "empty": "",
    "bare": KEYS["red"],
    "basic": f"Basic {KEYS['red']}",
    "prefix": f"Bearer {KEYS['red'][:-1]}",
    "longer": f"Bearer {KEYS['red']}x",
    "hash": "Bearer " + hashlib.sha256(KEYS["red"].encode()).hexdigest(),
    "two": f"Bearer {KEYS['red']} {KEYS['root']}",
    "other case": f"Bearer {KEYS['red'].upper()}",
}
"""Authorization headers that are nobody's."""
UNKNOWN = {
    "job_id": "job_00" + "0" * 30,
    "response_id": "resp_job_00" + "0" * 30,
    "file_id": "file-00" + "0" * 30,
    "batch_id": "batch_00" + "0" * 30,
    "message_batch_id": "msgbatch_00" + "0" * 30,
    "conversation_id": "conv_00" + "0" * 30,
    "item_id": "msg_" + "0" * 33,
    "letter_id": "0-1-1",
    "message_id": "msg_00" + "0" * 30,
    "key_id": "key_" + "0" * 16,
    "model": "no-such-model",
    "tenant": "no-such-tenant",
    "build": "0" * 16,
    "name": "no-such-file.js",
    "page": "no-such-page",
}
"""For each name in a path: what it may look like and is nobody's."""
OWNED = ("job_id", "response_id", "file_id", "batch_id", "conversation_id")
"""Names in a path that are a tenant's own."""
CANARY = "canary-of-blue"
CHAT = {"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
BODIES: Mapping[str, Any] = {
    "POST /v1/chat/completions": CHAT,
    "POST /v1/jobs": CHAT,
    "POST /v1/completions": {"model": "sim", "prompt": "x", "max_tokens": 2},
    "POST /v1/responses": {"model": "sim", "input": "x", "max_output_tokens": 2},
    "POST /v1/responses/input_tokens": {"model": "sim", "input": "x"},
    "POST /v1/conversations/{conversation_id}": {"metadata": {}},
    "POST /v1/conversations/{conversation_id}/items": {"items": [{"role": "user", "content": "x"}]},
    "POST /v1/embeddings": {"model": "sim", "input": "x"},
    "POST /v1/rerank": {"model": "sim", "query": "x", "documents": ["x"]},
    "POST /v1/moderations": {"input": "x"},
    "POST /tokenize": {"model": "sim", "prompt": "x"},
    "POST /detokenize": {"model": "sim", "tokens": [1]},
}
"""Bodies that are accepted; a route that is not here is sent an empty object."""
VARYING = {"date", "x-request-id", "openai-processing-ms"}

Answer = tuple[int, dict[str, str], bytes]


def ask(house: House, operation: Operation, path: str, authorization: str | None, body: Any = None) -> Answer:
    """The operation at a path; the headers that may vary are left out."""
    headers = {} if authorization is None else {"Authorization": authorization}
    data = None
    if operation.method in ("POST", "PUT", "PATCH"):
        data = json.dumps(BODIES.get(operation.name, {}) if body is None else body).encode()
    status, said, answer = house.request(operation.method, path, data, headers)
    return status, {name: value for name, value in said.items() if name not in VARYING}, answer


def bearer(name: str) -> str:
    return f"Bearer {KEYS[name]}"


def by(name: str) -> dict[str, str]:
    """The header of who has this key."""
    return {"Authorization": bearer(name)}


def access_of(operation: Operation) -> str:
    """Who may: anyone, any key, an admin. Fails for a route that no rule knows."""
    path = operation.path
    if path in OPEN:
        return "anyone"
    if path in EITHER:
        return "either"
    if path in ("/tokenize", "/detokenize", "/tokenizer_info"):
        return "key"
    assert path.startswith(("/v1/", "/admin/")), f"{path}: say in this file who may use it"
    return "admin" if path.startswith("/admin/") else "key"


house = module_house("workers", "offline", settings=SETTINGS, PENSTOCK_API_REFUSALS_PER_MINUTE="0")
"""One of each role that serves, behind four keys of three tenants."""


def family_of(path: str) -> str:
    """The beginning of a path, as `/v1/jobs`."""
    return "/".join(path.split("/")[:3])


each_family = pytest.mark.parametrize("family", sorted({family_of(operation.path) for operation in OPERATIONS}))
"""Of paths: each has a test, and not each of a hundred operations."""


def of_family(family: str) -> list[Operation]:
    return [operation for operation in OPERATIONS if family_of(operation.path) == family]


# --- route x role ----------------------------------------------------------------------------------------------------


@each_family
def test_nobody_comes_in(house: House, family: str) -> None:
    """Without a key, and with whatever is none: the same 401, first of all, and nothing is kept."""
    statuses = {"key": {401}, "admin": {401}, "either": {200, 401}}
    with Redis.from_url(house.redis_url) as store:
        before = store.keys("penstock:*:job:*")
        for operation in of_family(family):
            allowed = statuses.get(access_of(operation)) or {OPEN[operation.path]}
            for authorization in NOBODY.values():
                status, headers, body = ask(house, operation, operation.at(**UNKNOWN), authorization)
                assert status in allowed, operation.name
                if status == 401:
                    assert headers["www-authenticate"] == "Bearer"
                    assert operation.method == "HEAD" or json.loads(body)["error"]["code"] == "invalid_api_key"
                    assert not any(key.encode() in body for key in KEYS.values())
        assert store.keys("penstock:*:job:*") == before


@each_family
def test_a_key_reaches_as_far_as_it_may(house: House, family: str) -> None:
    """Every key: 403 where an admin's is needed and it is none; else through, to a 2xx or to what does not exist."""
    for operation in of_family(family):
        for name in KEYS:
            reaches_as_far_as_it_may(house, operation, name)


def reaches_as_far_as_it_may(house: House, operation: Operation, name: str) -> None:
    status, _, body = ask(house, operation, operation.at(**UNKNOWN), bearer(name))
    if access_of(operation) == "admin" and name != "root":
        assert status == 403
        assert operation.method == "HEAD" or json.loads(body)["error"]["code"] == "permission_denied"
    elif access_of(operation) == "either" and name != "root":
        assert status in (200, 403)
    elif operation.path in OPEN:
        assert status == OPEN[operation.path], body
    elif operation.params:
        assert status == 404, body
    else:
        assert status in (200, 201, 202) or (
            operation.method == "POST" and status in (400, 415) and not BODIES.get(operation.name)
        ), body


def test_a_created_key_reaches_what_it_was_created_for(house: House) -> None:
    """For each word that a key may be for: 403 everywhere else, and as a tenant's key at what it names."""
    for word in sorted(ENDPOINTS):
        made = json.loads(house.post("/admin/keys", {"tenant": "red", "endpoints": [word]}, by("root"))[2])
        for operation in OPERATIONS:
            if (access := access_of(operation)) in ("anyone", "either"):
                continue
            status, _, body = ask(house, operation, operation.at(**UNKNOWN), f"Bearer {made['key']}")
            named = operation.path.removeprefix("/v1").split("/")[1] == word
            assert (status == 403) == (access == "admin" or not named), (word, operation.name, body)
        assert house.request("DELETE", f"/admin/keys/{made['id']}", headers=by("root"))[0] == 200


@pytest.mark.parametrize("name", KEYS)
def test_a_key_gets_no_lane_above_its_own(house: House, name: str) -> None:
    """Whatever its body asks for, in every field that names a lane."""
    for fields in ({"queue": {"priority": "interactive"}}, {"service_tier": "priority"}, {}):
        create = Operation("POST", "/v1/jobs")
        status, _, body = ask(house, create, "/v1/jobs", bearer(name), CHAT | fields)
        lane = "batch" if name == "weak" else "interactive" if fields else "standard"
        assert (status, json.loads(body)["priority"]) == (202, lane)


@each_family
def test_methods_that_are_not_listed_do_nothing(house: House, family: str) -> None:
    """Not for nobody and not for an admin, nor is any page of another origin let in."""
    methods = {"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "QUERY", "post"}
    for path in sorted({operation.path for operation in of_family(family)}):
        listed = {operation.method for operation in OPERATIONS if operation.path == path}
        at = Operation("GET", path).at(**UNKNOWN)
        for method, key in product(sorted(methods - listed), ({}, by("root"))):
            headers = {"Origin": "https://evil.example", "Access-Control-Request-Method": method, **key}
            status, said, answer = house.request(method, at, b"{}" if method == "POST" else None, headers)
            assert 400 <= status < 500, (method, path, status)
            assert not [name for name in said if name.startswith("access-control")]
            if status == 405:
                assert {each.strip() for each in said["allow"].split(",")} == listed
                assert json.loads(answer)["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    "header",
    ["X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override", "X-Original-URL", "X-Rewrite-URL",
     "X-Forwarded-Host", "X-Forwarded-User", "X-Remote-User", "Api-Key", "Cookie", "Proxy-Authorization",
     "X-Tenant", "X-Admin"],
)  # fmt: skip
def test_no_other_header_lets_anybody_in(house: House, header: str) -> None:
    """Neither a key in another header, nor a header that some proxies and frameworks obey."""
    for value in (KEYS["root"], bearer("root"), "DELETE", "/healthz", "root", f"key={KEYS['root']}"):
        assert house.request("GET", "/v1/jobs", headers={header: value})[0] == 401
        assert house.request("GET", "/admin/dlq", headers={header: value, "Authorization": bearer("red")})[0] == 403
        path = f"/v1/jobs?api_key={KEYS['root']}&key={KEYS['root']}&access_token={KEYS['root']}"
        assert house.request("GET", path, headers={header: value})[0] == 401


def test_a_key_alone_lets_in_as_a_bearer_does(house: House) -> None:
    """By the header of Anthropic's clients; what Authorization says goes first."""
    assert house.request("GET", "/v1/jobs", headers={"X-Api-Key": KEYS["red"]})[0] == 200
    assert house.request("GET", "/admin/dlq", headers={"X-Api-Key": KEYS["red"]})[0] == 403
    both = {"X-Api-Key": KEYS["root"], "Authorization": bearer("red")}
    assert house.request("GET", "/admin/dlq", headers=both)[0] == 403
    for value in (bearer("root"), "root", f"key={KEYS['root']}"):
        assert house.request("GET", "/v1/jobs", headers={"X-Api-Key": value})[0] == 401


# --- what is in the path and in the Host -----------------------------------------------------------------------------

SECRET_PATHS = ("/v1/jobs", "/admin/dlq", "/v1/models")
DISGUISES = [
    "/{path}", "//{path}", "{path}/", "{path}//", "{path};/healthz", "{path}%00", "{path}%2e", "{path}%20",
    "{path}#/healthz", "{path}?/healthz", "/healthz/..{path}", "/healthz/%2e%2e{path}", "/healthz/..%2f..{path}",
    "/./{path}", "/%2e{path}", "/v1/../{path}", "/healthz%2f..{path}", "/healthz;{path}", "/healthz\\..{path}",
    "{path}%0d%0aX-A:b", "/healthz%23{path}",
    "http://127.0.0.1{path}", "http://healthz{path}", "https://x@127.0.0.1{path}", "http://evil.example:80{path}",
]  # fmt: skip
HOSTS = ["healthz", "x/healthz?", "x/healthz#", "127.0.0.1/healthz?a=", "evil.example", "a@b", "[::1", "[::1]:x",
         "x:99999", "..", "%2fhealthz", "openapi.json"]  # fmt: skip


def raw(house: House, lines: str) -> tuple[int, bytes]:
    """The status (0: none) and the rest of what a request is answered with, sent as it is."""
    with socket.create_connection(("127.0.0.1", house.port), timeout=30) as connection:
        connection.sendall(lines.encode("latin-1") + b"Connection: close\r\n\r\n")
        data = b""
        while chunk := connection.recv(65_536):
            data += chunk
    head, _, body = data.partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head.startswith(b"HTTP/1.1 ") else 0), body


def shows_nothing(status: int, body: bytes) -> bool:
    """A refusal, or the health of the process and nothing of what was asked for."""
    return not 200 <= status < 300 or json.loads(body) == {"status": "ok"}


@pytest.mark.parametrize("disguise", DISGUISES)
def test_no_form_of_a_path_gets_around_the_key(house: House, disguise: str) -> None:
    """What is decided and what is served go by the same path."""
    for path in SECRET_PATHS:
        target = disguise.replace("{path}", path)
        assert shows_nothing(*raw(house, f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1:{house.port}\r\n")), target


@pytest.mark.parametrize("host", HOSTS)
def test_no_host_gets_around_the_key(house: House, host: str) -> None:
    """The Host header is no part of what is decided."""
    for path in SECRET_PATHS:
        assert shows_nothing(*raw(house, f"GET {path} HTTP/1.1\r\nHost: {host}\r\n")), path
        assert shows_nothing(*raw(house, f"GET {path} HTTP/1.1\r\nHost: x\r\nHost: {host}\r\n")), path


@pytest.mark.parametrize(
    "lines",
    [
        "GET /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\nAuthorization: {root}\r\n",
        "GET /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer\r\n {key}\r\n",
        "GET /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization : {root}\r\n",
        "GET /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization:Bearer \0{key}\r\n",
        "GET /v1/jobs HTTP/1.1\r\nHost: x\r\nX: a\rAuthorization: {root}\r\n",
        "GET /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n",
        "POST /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n",
        "GET /v1/jobs HTTP/9.9\r\nHost: x\r\n",
    ],
)
def test_headers_that_two_readers_read_differently_let_nobody_in(house: House, lines: str) -> None:
    """Doubled, folded or broken headers: the first counts, or the request is refused."""
    text = lines.replace("{root}", bearer("root")).replace("{key}", KEYS["root"])
    status, _ = raw(house, text)
    assert status in (0, 400, 401, 405, 505), status


@pytest.mark.parametrize(
    "hostile", ["a\r\nX-Injected: 1", "a\nX-Injected: 1", "a%0d%0aX-Injected:%201", "é", "\x00", "a" * 5000]
)
def test_nothing_a_client_says_becomes_a_header(house: House, hostile: str) -> None:
    """Not its request id, nor names of its fields, of its file or of its model."""
    quoted = "".join(f"%{byte:02x}" for byte in hostile.encode())
    body = CHAT | {hostile: 1, "metadata": {"a": hostile[:500]}}
    answers = [
        house.request("GET", f"/v1/models/{quoted}"[:8000], headers=by("red")),
        house.post("/v1/jobs", body, by("red")),
    ]
    name = json.dumps(hostile)[1:-1].replace("\\", "")
    parts = (
        '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--b\r\nContent-Disposition: form-data; name="file"; filename="{name[:900]}"\r\n\r\n{{}}\r\n--b--\r\n'
    ).encode()
    kind = {"Content-Type": "multipart/form-data; boundary=b", **by("red")}
    uploaded = house.post("/v1/files", parts, kind)
    answers.append(uploaded)
    if uploaded[0] == 200:
        answers.append(house.request("GET", f"/v1/files/{json.loads(uploaded[2])['id']}/content", headers=kind))
    if hostile.isascii() and "\n" not in hostile and "\0" not in hostile:
        answers.append(house.request("GET", "/v1/jobs", headers={"X-Request-Id": hostile, **by("red")}))
    for status, headers, _ in answers:
        assert status < 500 and "x-injected" not in headers
        assert hostile not in headers.values()


def test_no_field_says_whose_a_job_is(house: House) -> None:
    """Nor what its key may do: such names in a body are ignored, and said to be."""
    wanted = {"tenant": "blue", "admin": True, "id": UNKNOWN["job_id"], "reply_to": "x", "created": 1, "keep_s": 9}
    wanted |= {"state": "completed"}
    status, headers, body = ask(house, Operation("POST", "/v1/jobs"), "/v1/jobs", bearer("red"), CHAT | wanted)
    job = json.loads(body)["id"]
    assert status == 202 and job != UNKNOWN["job_id"]
    assert set(headers["x-ignored-fields"].split(", ")) == set(wanted)
    assert house.request("GET", f"/v1/jobs/{job}", headers=by("blue"))[0] == 404
    assert house.request("GET", f"/v1/jobs/{job}", headers=by("red"))[0] == 200


# --- route x tenant --------------------------------------------------------------------------------------------------


Belongings = dict[str, list[str]]
"""What one tenant has, by the name it has in a path."""


def all_of(belongings: Belongings) -> list[str]:
    return [each for ids in belongings.values() for each in ids]


def as_blue(house: House, method: str, path: str, body: Any = None) -> Any:
    status, _, data = house.request(method, path, body, by("blue"))
    assert status < 300, data
    return json.loads(data) if not path.endswith("/content") else data


def upload(house: House, key: str, data: bytes) -> str:
    return client(house, KEYS[key]).files.create(file=("in.jsonl", data), purpose="batch").id


@pytest.fixture(scope="module")
def blue(house: House) -> Belongings:
    """A job that has ended and one that has not, files, a batch that has ended and one that is paused."""
    said = CHAT | {"messages": [{"role": "user", "content": CANARY}], "metadata": {"of": CANARY}}
    ended = as_blue(house, "POST", "/v1/jobs", said)["id"]
    assert as_blue(house, "GET", f"/v1/jobs/{ended}?wait=60")["status"] == "completed"
    file = upload(house, "blue", jsonl([line(0) | {"custom_id": CANARY}]))
    batch = as_blue(house, "POST", "/v1/batches", {"input_file_id": file, "endpoint": "/v1/chat/completions"})["id"]
    done = eventually(
        lambda: (found := as_blue(house, "GET", f"/v1/batches/{batch}"))["status"] == "completed" and found
    )
    many = upload(house, "blue", jsonl([line(number) for number in range(20_000)]))
    paused = as_blue(house, "POST", "/v1/batches", {"input_file_id": many, "endpoint": "/v1/chat/completions"})["id"]
    assert as_blue(house, "POST", f"/v1/batches/{paused}/pause")["paused"]
    running = as_blue(house, "POST", "/v1/jobs", said | {"max_tokens": 8000})["id"]
    response = as_blue(house, "POST", "/v1/responses", {"model": "sim", "input": CANARY, "max_output_tokens": 2})["id"]
    items = [{"role": "user", "content": CANARY}]
    conversation = as_blue(house, "POST", "/v1/conversations", {"items": items, "metadata": {"of": CANARY}})["id"]
    return {
        "job_id": [ended, running],
        "response_id": [response],
        "file_id": [file, many, done["output_file_id"]],
        "batch_id": [batch, paused],
        "conversation_id": [conversation],
    }


ID_ROUTES = [operation for operation in OPERATIONS if any(name in OWNED for name in operation.params)]
OWN_ROUTES = [operation for operation in ID_ROUTES if not operation.path.startswith("/admin/")]
ADMIN_ROUTES = [operation for operation in ID_ROUTES if operation.path.startswith("/admin/")]


def test_every_name_in_a_path_is_somebodys() -> None:
    """A name that is not known here might be a tenant's, and its routes would not be tried."""
    assert {name for operation in OPERATIONS for name in operation.params} == set(UNKNOWN)
    assert len(OWN_ROUTES) >= 18


@pytest.mark.parametrize("kind", OWNED)
def test_what_is_anothers_is_as_if_it_were_not(house: House, blue: Belongings, kind: str) -> None:
    """Every id of the other, and cut ones of the kind that belongs there: status, headers and body of one that never
    was; an admin's key too."""
    routes = [operation for operation in OWN_ROUTES if kind in operation.params]
    for operation, key in product(routes, ("red", "root")):
        name, *_ = operation.params
        never = ask(house, operation, operation.at(**UNKNOWN), bearer(key))
        assert never[0] == 404
        if operation.method != "HEAD":
            assert json.loads(never[2])["error"]["code"] == name.removesuffix("_id") + "_not_found"
        cut = [each for theirs in blue[name] for each in (theirs[:-1], theirs + "0", theirs.upper())]
        for each in (*all_of(blue), *cut):
            assert ask(house, operation, operation.at(**UNKNOWN | {name: each}), bearer(key)) == never, each


@pytest.mark.parametrize("operation", ADMIN_ROUTES, ids=lambda operation: operation.name)
def test_an_admin_sees_anothers_job_without_its_words(house: House, blue: Belongings, operation: Operation) -> None:
    """Its state and its labels, not its request and not its answer; tenants' keys are told the same of every id."""
    (name,) = operation.params
    for theirs in blue[name]:
        if operation.method != "POST":  # an admin may cancel it, and others of this file need it
            status, _, body = ask(house, operation, operation.at(**{name: theirs}), bearer("root"))
            shown = json.loads(body or b"{}")
            shown.pop("metadata", None)
            assert status == 200 and CANARY not in json.dumps(shown)
        for key in ("red", "weak", "blue"):
            never = ask(house, operation, operation.at(**UNKNOWN), bearer(key))
            assert never[0] == 403
            assert ask(house, operation, operation.at(**{name: theirs}), bearer(key)) == never


@pytest.mark.parametrize("query", ["", "?limit=100", "?order=asc", "?purpose=batch_output", "?status=completed"])
def test_lists_show_ones_own(house: House, blue: Belongings, query: str) -> None:
    """No id and no word of the other's in any list, and everything of one's own in one's own."""
    lists = [operation for operation in OPERATIONS if operation.method == "GET" and not operation.params]
    for operation in lists:
        for key in ("red", "weak"):
            _, _, body = ask(house, operation, operation.path + query, bearer(key))
            assert not any(each.encode() in body for each in (CANARY, *all_of(blue))), operation.name
    shown = b"".join(
        house.request("GET", f"/v1/{kind}", headers=by("blue"))[2] for kind in ("jobs", "files", "batches")
    )
    unlisted = blue["conversation_id"]
    assert all(each.removeprefix("resp_").encode() in shown for each in all_of(blue) if each not in unlisted)


def test_anothers_id_in_a_query_or_body_is_as_if_it_were_not(house: House, blue: Belongings) -> None:
    """Every query parameter of every list, and the file of a batch: the words of an id that never was."""
    for path, operations in document("0")["paths"].items():
        names = [ref["$ref"].rpartition("/")[2] for ref in operations.get("get", {}).get("parameters", ())]
        for name in ("after", "cursor", "purpose", "status"):
            if name not in names or "{" in path:
                continue
            for kind in OWNED:
                form = "1-{}" if name == "cursor" else "{}"
                never = ask(house, Operation("GET", path), f"{path}?{name}={form.format(UNKNOWN[kind])}", bearer("red"))
                for theirs in blue[kind]:
                    at = f"{path}?{name}={form.format(theirs)}"
                    assert ask(house, Operation("GET", path), at, bearer("red")) == never, at
    create = Operation("POST", "/v1/batches")
    bodies = [{"input_file_id": each, "endpoint": "/v1/completions"} for each in (UNKNOWN["file_id"], *blue["file_id"])]
    never, *answers = (ask(house, create, create.path, bearer("red"), body) for body in bodies)
    assert never[0] == 400 and all(each == never for each in answers)


def test_an_idempotency_key_is_the_tenants_own(house: House) -> None:
    """The same key and body of two tenants are two jobs, two batches."""
    files = {key: upload(house, key, jsonl([line(0)])) for key in ("red", "blue")}
    for path, body in (("/v1/jobs", CHAT), ("/v1/batches", {"endpoint": "/v1/chat/completions"})):
        made = set()
        for key, file in files.items():
            headers = by(key) | {"Idempotency-Key": "the-same", "X-Request-Id": "the-same"}
            said = body if path == "/v1/jobs" else body | {"input_file_id": file}
            made.add(json.loads(house.post(path, said, headers)[2])["id"])
        assert len(made) == 2


def test_a_dead_letter_is_an_admins_alone(house: House) -> None:
    """Whether there is such a letter is not said to others."""
    with Redis.from_url(house.redis_url) as client:
        client.xadd("penstock:{0}:dead", {"lane": "x", "entry": "1-1", "reason": "not an event of Penstock"})

    def letters() -> Any:
        return json.loads(house.request("GET", "/admin/dlq", headers=by("root"))[2])["data"]

    (letter,) = eventually(letters)
    for operation in OPERATIONS:
        if "letter_id" in operation.params:
            for key in ("red", "weak", "blue"):
                there = ask(house, operation, operation.at(letter_id=letter["id"]), bearer(key))
                assert there == ask(house, operation, operation.at(**UNKNOWN), bearer(key))
                assert there[0] == 403
    assert [each["id"] for each in letters()] == [letter["id"]]


def test_nothing_of_the_others_was_touched(house: House, blue: Belongings) -> None:
    """After all of the above: every file is there, the batch is still paused, no job was cancelled."""
    for operation in OWN_ROUTES:
        name, *_ = operation.params
        for theirs in blue[name]:
            ask(house, operation, operation.at(**UNKNOWN | {name: theirs}), bearer("red"))
    assert all(as_blue(house, "GET", f"/v1/jobs/{job}")["status"] != "cancelled" for job in blue["job_id"])
    assert all(as_blue(house, "GET", f"/v1/responses/{each}")["output"] for each in blue["response_id"])
    assert all(as_blue(house, "GET", f"/v1/files/{file}/content") for file in blue["file_id"])
    for conversation in blue["conversation_id"]:
        assert as_blue(house, "GET", f"/v1/conversations/{conversation}")["metadata"] == {"of": CANARY}
        assert len(as_blue(house, "GET", f"/v1/conversations/{conversation}/items")["data"]) == 1
    paused = as_blue(house, "GET", f"/v1/batches/{blue['batch_id'][1]}")
    assert paused["paused"] and paused["status"] in ("validating", "in_progress")


# --- every parameter -------------------------------------------------------------------------------------------------

HOSTILE = ["", "0", "-1", "1e9", "nan", "inf", "1" * 5000, "%C2%B2", "%D9%A1", "%00", "%FF", "'\"<>{}", "x" * 3000,
           "1_0", "+1", "..%2f..%2fetc%2fpasswd", "penstock:*"]  # fmt: skip


def parameters() -> Iterator[tuple[str, str, str, str]]:
    described = document("0")
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            for ref in operation.get("parameters", ()):
                param = described["components"]["parameters"][ref["$ref"].rpartition("/")[2]]
                yield method.upper(), path, param["in"], param["name"]


PARAMETERS = list(parameters())


@each_family
def test_no_parameter_is_a_fault_of_ours(house: House, family: str) -> None:
    """Whatever stands in a path, a query or a header: never a 5xx, and what is no number is no limit."""
    described = [each for each in PARAMETERS if family_of(each[1]) == family]
    for (method, path, where, name), value in product(described, HOSTILE):
        operation = Operation(method, path)
        at = operation.at(**UNKNOWN | ({name: value or "%20"} if where == "path" else {})).replace("'\"<>{}", "%27%3C")
        at += f"?{name}={value}".replace("'\"<>{}", "%27%22%3C") if where == "query" else ""
        headers = by("root") | ({name: value} if where == "header" else {})
        body = BODIES.get(operation.name, {}) if method in ("POST", "PUT") else None
        status, _, answer = house.request(method, at, body, headers)
        assert status < 500, (value[:40], answer)
        if name == "limit" and value not in ("", "+1", "1_0"):
            assert status in (400, 404), (value[:40], answer)


# --- keys ------------------------------------------------------------------------------------------------------------


def test_no_key_is_written_down(house: House) -> None:
    """Not in the store's file, the logs, the metrics or any file of the house."""
    for name in KEYS:
        house.request("GET", "/v1/jobs", headers=by(name))
        house.post("/v1/jobs", {"model": 5}, by(name))
    pages = [house.request("GET", "/metrics", headers=by("root"))[2]]
    with Redis.from_url(house.redis_url) as store:
        assert store.config_get("appendonly") == {"appendonly": "yes"}
    pages += [path.read_bytes() for path in house.folder.rglob("*") if path.is_file()]
    assert len(pages) > 5
    for key in KEYS.values():
        assert not any(key.encode() in page for page in pages)
        digest = hashlib.sha256(key.encode()).hexdigest()
        assert [page for page in pages if digest.encode() in page] == [SETTINGS.encode()]
