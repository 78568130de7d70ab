"""The access table and the guard: every route has a row, and no request passes without what its row asks for."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest.mock import Mock

import pytest
from house import House, serving
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from api.app import ROUTES, guarded
from api.auth import access_errors
from api.auth.access import Access, AccessTable
from api.auth.access_errors import MAX_LOGGED, Refusals
from api.auth.keys import Keyring
from api.middleware import Observed
from api.openai import errors
from api.routes import RULES
from api.services import Services
from api.settings import ApiSettings, KeySettings
from telemetry.process import start_tracing

pytestmark = pytest.mark.slow

TOKEN = "the-admin-token"
KEYED, KEYLESS = "with keys", "without keys"
SERVED = [(path, method) for path, rows in RULES.items() for method in rows]
OPEN = {"/health", "/healthz", "/readyz", "/version", "/openapi.json", "/", "/console", "/console/session"}
OPEN |= {"/console/{page:path}", "/console/assets/{build}/{name}"}


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def keyring(door: str) -> Keyring:
    if door == KEYLESS:
        return Keyring({}, sha256(TOKEN))
    return Keyring(
        {
            "plain": KeySettings(sha256=sha256("sk-plain"), tenant="a"),
            "root": KeySettings(sha256=sha256("sk-root"), tenant="ops", admin=True),
        }
    )


class Told(NamedTuple):
    status: int
    headers: dict[str, str]
    code: str
    caller: str | None
    """Whom the endpoint was told of."""
    message: str
    """The error's."""


async def ask(
    ring: Keyring,
    method: str,
    path: str,
    headers: Mapping[str, str] | None = None,
    settings: ApiSettings | None = None,
    version: str = "1.1",
) -> Told:
    """One request at the guard; behind it stands an endpoint that answers 204 to anything."""
    sent: list[Message] = []
    reached: dict[str, str | None] = {}

    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        caller = scope["state"].get("caller")
        reached["caller"] = caller.name if caller else None
        await Response(status_code=204)(scope, receive, send)

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    async def send(message: Message) -> None:
        sent.append(message)

    services = SimpleNamespace(
        settings=settings or ApiSettings(), keyring=ring, metrics=Mock(), tracing=start_tracing("api", ""),
        records=Mock(), name="api-1",
    )  # fmt: skip
    raw = {"host": "127.0.0.1:8000", **{name.lower(): value for name, value in (headers or {}).items()}}
    scope: Scope = {
        "type": "http", "method": method, "path": path, "http_version": version, "state": {}, "client": ("10.0.0.9", 1),
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in raw.items() if value],
    }  # fmt: skip
    await Observed(guarded(endpoint, cast(Services, services)), cast(Services, services))(scope, receive, send)
    head = sent[0]
    told = {name.decode(): value.decode() for name, value in head["headers"]}
    body = b"".join(message.get("body", b"") for message in sent[1:])
    assert (head["status"] == 204) == bool(reached), "the endpoint was reached and its answer is another"
    error = json.loads(body)["error"] if body else {"code": "", "message": ""}
    return Told(head["status"], told, error["code"], reached.get("caller"), error["message"])


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


# --- every route -----------------------------------------------------------------------------------------------------


def test_every_route_has_a_row_and_every_row_a_route() -> None:
    """A route that is served without a row would be answered 404."""
    served = {(route.path, method) for route in ROUTES for method in (route.methods or set()) - {"HEAD"}}
    assert served == set(SERVED)


def test_every_change_by_an_admin_has_a_name_in_the_audit_log() -> None:
    for path, rows in RULES.items():
        for method, rule in rows.items():
            assert bool(rule.action) == (rule.access is Access.ADMIN and method != "GET"), (method, path)


async def test_a_route_without_a_row_cannot_be_reached() -> None:
    """Not by any method, whatever the application behind would answer."""
    for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "BREW"):
        for door, key in ((KEYED, "sk-root"), (KEYLESS, TOKEN)):
            told = await ask(keyring(door), method, "/v1/not/in/the/table", bearer(key))
            assert (told.status, told.code) == (404, "not_found")


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"])
async def test_a_method_without_a_row_cannot_be_reached(method: str) -> None:
    """On every path there is: forgetting DELETE beside POST opened other job APIs."""
    for path, rows in RULES.items():
        if method in rows or (method == "HEAD" and "GET" in rows):
            continue
        told = await ask(keyring(KEYED), method, filled(path), bearer("sk-root"))
        assert (told.status, told.code) == (405, "method_not_allowed")
        assert set(rows) <= set(told.headers["allow"].split(", "))


def filled(path: str) -> str:
    """The path with something in the place of each parameter."""
    for name in (
        "job_id",
        "response_id",
        "file_id",
        "batch_id",
        "conversation_id",
        "item_id",
        "letter_id",
        "message_id",
        "model:path",
        "tenant:path",
        "page:path",
        "build",
        "name",
    ):
        path = path.replace("{" + name + "}", "org/x" if name.endswith(":path") else "x_1")
    assert "{" not in path
    return path


ROLES = {
    KEYED: {"nobody": "", "stranger": "sk-wrong", "plain": "sk-plain", "root": "sk-root", "token": TOKEN},
    KEYLESS: {"nobody": "", "stranger": "anything", "token": TOKEN},
}


def expected(door: str, role: str, path: str) -> int:
    """Said here once more, by other means than the table."""
    admin = path.startswith("/admin") or (path == "/metrics" and door == KEYED)
    if path in OPEN or (path == "/metrics" and door == KEYLESS):
        return 204
    if door == KEYLESS:
        return 204 if not admin or role == "token" else 401
    if role not in ("plain", "root"):
        return 401
    return 204 if not admin or role == "root" else 403


@pytest.mark.parametrize(("door", "role"), [(door, role) for door, roles in ROLES.items() for role in roles])
async def test_each_role_reaches_its_routes_and_no_other(door: str, role: str) -> None:
    """Route x role, generated from the table of routes."""
    ring = keyring(door)
    for route in ROUTES:
        for method in route.methods or ():
            told = await ask(ring, method, filled(route.path), bearer(ROLES[door][role]))
            assert told.status == expected(door, role, route.path), (method, route.path)
            if told.status == 204 and door == KEYED and route.path.startswith(("/v1/", "/admin/")):
                assert told.caller == role


async def test_with_keys_a_page_that_asks_first_is_told_the_setting() -> None:
    """403 to the preflight of an origin that is not listed; any other OPTIONS is a method that is not there."""
    ring, asks = keyring(KEYED), {"Origin": "https://other.example", "Access-Control-Request-Method": "POST"}
    listed = ApiSettings(cors_origins=("https://app.example",))
    for settings in (ApiSettings(), listed):
        told = await ask(ring, "OPTIONS", "/v1/jobs", asks, settings)
        assert (told.status, told.code) == (403, "foreign_origin")
        assert "'https://other.example'" in told.message and "[api] cors_origins and restart" in told.message
        for less in ({}, {"Origin": asks["Origin"]}, {"Access-Control-Request-Method": "POST"}):
            assert (await ask(ring, "OPTIONS", "/v1/jobs", less, settings)).status == 405
        assert (await ask(ring, "OPTIONS", "/admin/pools", asks, settings)).status == 405


async def test_with_keys_proxies_may_forward() -> None:
    for name in ("Forwarded", "X-Forwarded-For", "Via"):
        told = await ask(keyring(KEYED), "GET", "/v1/models", bearer("sk-plain") | {name: "x"})
        assert told.status == 204


def test_senders_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """However many origins and hosts they make up, and no line is theirs."""
    refusals = Refusals()
    for number in range(10 * MAX_LOGGED):
        origin = f"https://{number}.example\n{{}}"
        for _ in range(2):
            refusals.log_once(access_errors.foreign_origin(origin, can_be_listed=False), f"/v1/{'x' * 9999}\n")
    refusals.log_once(errors.job_not_found(), "/v1/jobs/x")
    assert len(caplog.messages) == MAX_LOGGED + 1 and "no more" in caplog.messages[-1]
    assert all(len(each) < 1000 and "\n" not in each for each in caplog.messages)


async def test_without_a_token_nobody_is_an_admin() -> None:
    """Neither with an empty token nor with any other; the answer says how to get one."""
    for authorization in ("", "Bearer ", "Bearer x", f"Bearer {TOKEN}"):
        told = await ask(Keyring({}), "GET", "/admin/pools", {"Authorization": authorization})
        assert (told.status, told.code) == (403, "admin_not_configured")


@pytest.mark.parametrize("metrics", ["open", "admin"])
@pytest.mark.parametrize("door", [KEYED, KEYLESS])
async def test_metrics_are_open_or_an_admins(door: str, metrics: Any) -> None:
    settings, admin = ApiSettings(metrics=metrics), {KEYED: "sk-root", KEYLESS: TOKEN}[door]
    assert (await ask(keyring(door), "GET", "/metrics", settings=settings)).status == (
        204 if metrics == "open" else 401
    )
    assert (await ask(keyring(door), "GET", "/metrics", bearer(admin), settings)).status == 204


@pytest.mark.parametrize(
    ("path", "template"),
    [("/admin/pools/a/b", "/admin/pools/{model:path}"), ("/v1/models/../../admin/dlq", "/v1/models/{model:path}"),
     ("/v1/jobs/x\n", "/v1/jobs/{job_id}"), ("/admin/dlq/%2e", "/admin/dlq/{letter_id}")],
)  # fmt: skip
def test_paths_are_matched_as_the_router_matches_them(path: str, template: str) -> None:
    found = AccessTable(RULES).find("GET", path)
    assert found is not None and found.rule is RULES[template]["GET"]


@pytest.mark.parametrize(
    "path",
    ["", "//admin/pools", "/admin", "/admin/", "/admin/dlq/", "/ADMIN/pools", "/admin/dlq/a/b", "/v1/jobs/",
     "/v1/jobs/a/b", "/metrics/", "/{", "/v1/jobs/{job_id}/nothing"],
)  # fmt: skip
def test_what_only_looks_like_a_route_is_none(path: str) -> None:
    assert AccessTable(RULES).find("GET", path) is None


# --- the real server -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """An API process with keys; nobody works."""
    folder = tmp_path_factory.mktemp("keyed")
    rows = {"plain": "tenant = 'a'", "root": "tenant = 'ops'\nadmin = true"}
    (folder / "penstock.toml").write_text(
        "".join(f"[keys.{name}]\nsha256 = '{sha256(f'sk-{name}')}'\n{row}\n" for name, row in rows.items())
    )
    with serving(folder) as house:
        yield house


TARGETS = [
    b"/admin/pools", b"//admin/pools", b"/./admin/pools", b"/v1/../admin/pools", b"/%61dmin/pools", b"/admin%2fpools",
    b"/admin/pools?", b"/admin/pools#x", b"/admin/pools;x", b"/admin/pools/", b"/ADMIN/POOLS",
    b"/healthz/../admin/pools", b"/version%00/admin/pools", b"/openapi.json/..%2fadmin/pools", b"http://127.0.0.1/admin/pools",
    b"/v1/jobs",    b"http://healthz/v1/jobs", b"/v1/jobs/", b"/metrics", b"//metrics", b"/v1/models/..%2f..%2fhealthz",
]  # fmt: skip
SENT = [
    b"Host: 127.0.0.1/healthz?", b"Host: healthz", b"Host: a/version#", b"Host: ", b"Host: x\r\nHost: y", b"",
    b"Host: x\r\nX-Original-URL: /healthz", b"Host: x\r\nX-Rewrite-URL: /healthz", b"Host: x\r\nX-Forwarded-Path: /",
    b"Host: x\r\nX-Forwarded-For: 127.0.0.1", b"Host: x\r\nForwarded: for=127.0.0.1;host=localhost",
    b"Host: x\r\nX-HTTP-Method-Override: OPTIONS", b"Host: x\r\nX-Forwarded-Prefix: /healthz",
]  # fmt: skip


def status(port: int, request: bytes) -> int:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(request)
        answer = connection.recv(65536)
    return int(answer.split(b" ")[1])


def test_no_form_of_host_or_path_opens_what_needs_a_key(keyed: House) -> None:
    """Decisions go by the path that the router sees. The same requests with a key show that they do get there."""
    for at, target in enumerate(TARGETS):
        for header in SENT:
            head = (
                b"GET " + target + b" HTTP/1.1\r\n" + (header + b"\r\n" if header else b"") + b"Connection: close\r\n"
            )
            assert status(keyed.port, head + b"\r\n") in (400, 401, 404), (target, header)
            if at == 0:
                assert status(keyed.port, head + b"Authorization: Bearer sk-root\r\n\r\n") == 200


def test_a_refused_stream_is_refused_before_its_body(keyed: House) -> None:
    """The short way of completions is no way around the guard."""
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/responses/input_tokens"):
        for headers in ({}, {"Authorization": "Bearer sk-wrong"}):
            code, _, body = keyed.request("POST", path, b"{", {"Content-Type": "application/json", **headers})
            assert (code, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")
    assert keyed.request("POST", "/v1/completions", b"{", {"Authorization": "Bearer sk-plain"})[0] == 400


def test_host_names_may_be_listed(keyed: House, tmp_path: Path) -> None:
    """With keys any name is served, or those that are listed and loopback; probes are asked by a pod's address."""
    from house import free_port  # noqa: PLC0415 - only here

    def asked(path: str, host: str, port: int) -> int:
        return keyed.request("GET", path, None, {"Host": host, "Authorization": "Bearer sk-root"}, port)[0]

    assert asked("/v1/models", "anything.example", keyed.port) == 200
    port = free_port()
    keyed.start_api(port, PENSTOCK_API_HOSTS="api.example, Other.Example")
    for host in ("api.example", "API.example:443", "other.example", f"127.0.0.1:{port}", "localhost"):
        assert asked("/v1/models", host, port) == 200, host
    for host in ("evil.example", "api.example.evil.example", "10.0.0.7:8000", "api.example:80:80"):
        assert asked("/v1/models", host, port) == asked("/metrics", host, port) == 421, host
    assert asked("/healthz", "10.0.0.7:8000", port) == 200
