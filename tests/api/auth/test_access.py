"""The access table and the guard: every route has a row, and no request passes without what its row asks for."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest.mock import Mock

import pytest
from api_in_process import key_of, keyless
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from api.app import Observed
from api.auth import audit
from api.auth.guard import MAX_LOGGED, RequestGuard
from api.auth.hosts import Senders
from api.auth.keys import Keyring
from api.openai import errors
from api.openai.errors import ApiError
from api.routes import ROUTES, TABLE, Access, Route
from api.services import Services
from api.settings import ApiSettings
from streaming.fleet.audit import AuditLog
from telemetry.process import start_tracing

pytestmark = pytest.mark.slow

TOKEN = "the-admin-token"
EVIL = "https://evil.example"
KEYED, KEYLESS = "with keys", "without keys"
SERVED = [(route.path, route.method) for route in ROUTES]
TRACING = start_tracing("api", "")
OPEN = {"/health", "/healthz", "/readyz", "/version", "/openapi.json", "/", "/console", "/console/session"}
OPEN |= {"/console/{page:path}", "/console/assets/{build}/{name}"}


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def keyring(door: str) -> Keyring:
    if door == KEYLESS:
        return keyless(sha256(TOKEN))
    return Keyring({"plain": key_of("sk-plain", "a"), "root": key_of("sk-root", "ops", admin=True)})


class Told(NamedTuple):
    status: int
    code: str
    caller: str | None
    """Whom the endpoint was told of."""
    message: str
    """The error's."""


async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers 204 to anything, and notes whom it was told of; or fails, if it is asked to."""
    if b"x-fails" in scope["state"]["headers"]:
        raise LookupError("nobody thought of this")
    scope["reached"] = scope["state"].get("caller")
    await Response(status_code=204)(scope, receive, send)


@cache
def guarded(ring: Keyring, settings: ApiSettings) -> Observed:
    services = cast(Services, SimpleNamespace(
        large_bytes=0,
        settings=settings, keyring=ring, metrics=Mock(), tracing=TRACING, records=Mock(), name="api-1",
        audit=audit.Audit(cast(AuditLog, Mock())),
    ))  # fmt: skip
    return Observed(RequestGuard(endpoint, services), services)


async def ask(
    ring: Keyring,
    method: str,
    path: str,
    headers: Mapping[str, str | None] | None = None,
    settings: ApiSettings | None = None,
    version: str = "1.1",
) -> Told:
    """One request at the guard."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    async def send(message: Message) -> None:
        sent.append(message)

    raw = {"host": "127.0.0.1:8000", **{name.lower(): value for name, value in (headers or {}).items()}}
    scope: Scope = {
        "type": "http", "method": method, "path": path, "http_version": version, "state": {},
        "client": ("127.0.0.1", 1),
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in raw.items() if value is not None],
    }  # fmt: skip
    await guarded(ring, settings or ApiSettings())(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent[1:])
    assert (sent[0]["status"] == 204) == ("reached" in scope), "the endpoint was reached and its answer is another"
    error = json.loads(body)["error"] if body else {"code": "", "message": ""}
    caller = scope.get("reached")
    return Told(sent[0]["status"], error["code"], caller and caller.name, error["message"])


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


# --- every route -----------------------------------------------------------------------------------------------------


def test_every_change_by_an_admin_has_a_name_in_the_audit_log() -> None:
    for route in ROUTES:
        assert bool(route.action) == (route.access is Access.ADMIN and route.method != "GET"), route.path


def filled(path: str) -> str:
    """The path with something in the place of each parameter."""
    return re.sub(r"\{\w+(:path)?\}", lambda name: "org/x" if name[1] else "x_1", path)


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
    for path, method in SERVED:
        told = await ask(ring, method, filled(path), bearer(ROLES[door][role]))
        assert told.status == expected(door, role, path), (method, path)
        if told.status == 204 and door == KEYED and path.startswith(("/v1/", "/admin/")):
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


def test_senders_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """However many origins and hosts they make up, and no line is theirs."""
    guard = RequestGuard(endpoint, cast(Services, SimpleNamespace(settings=ApiSettings(), keyring=keyless())))
    for number in range(10 * MAX_LOGGED):
        origin = f"https://{number}.example\n{{}}"
        for _ in range(2):
            guard.log_once(errors.foreign_origin(origin), f"/v1/{'x' * 9999}\n", "127.0.0.1")
    guard.log_once(errors.job_not_found(), "/v1/jobs/x", "127.0.0.1")
    assert len(caplog.messages) == MAX_LOGGED + 1 and "no more" in caplog.messages[-1]
    assert all(len(each) < 1000 and "\n" not in each for each in caplog.messages)


async def test_without_a_token_nobody_is_an_admin() -> None:
    """Neither with an empty token nor with any other; the answer says how to get one."""
    for authorization in ("", "Bearer ", "Bearer x", f"Bearer {TOKEN}"):
        told = await ask(keyless(), "GET", "/admin/pools", {"Authorization": authorization})
        assert (told.status, told.code) == (403, "admin_not_configured")


@pytest.mark.parametrize("metrics", ["open", "admin"])
@pytest.mark.parametrize("door", [KEYED, KEYLESS])
async def test_metrics_are_open_or_an_admins(door: str, metrics: Any) -> None:
    settings, admin = ApiSettings(metrics=metrics), {KEYED: "sk-root", KEYLESS: TOKEN}[door]
    assert (await ask(keyring(door), "GET", "/metrics", settings=settings)).status == (
        204 if metrics == "open" else 401
    )
    assert (await ask(keyring(door), "GET", "/metrics", bearer(admin), settings)).status == 204


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_no_row_takes_the_path_of_a_later_one(route: Route) -> None:
    """By its path with something in place of each parameter."""
    found = TABLE.find(route.method, re.sub(r"{.*?}", "x", route.path))
    assert found is not None and found.route is route


@pytest.mark.parametrize(
    ("path", "template"),
    [("/admin/pools/a/b", "/admin/pools/{model:path}"), ("/v1/models/../../admin/dlq", "/v1/models/{model:path}"),
     ("/v1/jobs/x\n", "/v1/jobs/{job_id}"), ("/admin/dlq/%2e", "/admin/dlq/{letter_id}")],
)  # fmt: skip
def test_paths_are_matched_as_the_router_matches_them(path: str, template: str) -> None:
    found = TABLE.find("GET", path)
    assert found is not None and (found.route.method, found.route.path) == ("GET", template)


@pytest.mark.parametrize(
    "path",
    ["", "//admin/pools", "/admin", "/admin/", "/admin/dlq/", "/ADMIN/pools", "/admin/dlq/a/b", "/v1/jobs/",
     "/v1/jobs/a/b", "/metrics/", "/{", "/v1/jobs/{job_id}/nothing"],
)  # fmt: skip
def test_what_only_looks_like_a_route_is_none(path: str) -> None:
    assert TABLE.find("GET", path) is None


# --- hosts, origins and proxies, which every route refuses ------------------------------------------------------------


async def refused_everywhere(headers: dict[str, str], status: int, code: str, but: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """A server without keys answers so on every route, whatever key is sent along."""
    for path, method in SERVED:
        told = await ask(keyring(KEYLESS), method, filled(path), bearer(TOKEN) | headers)
        assert (told.status, told.code) == ((204, "") if path in but else (status, code)), (method, path)


@pytest.mark.parametrize(
    ("host", "served"),
    [
        ("localhost", True), ("LOCALHOST:1", True), ("localhost.", True), ("app.localhost:8000", True),
        ("127.0.0.1", True), ("127.8.9.10:65535", True), ("[::1]", True), ("[::1]:8000", True), ("127.0.0.1:", True),
        ("evil.example", False), ("localhost.evil.example", False), ("evil.example:127", False), ("[::]", False),
        ("0.0.0.0:8000", False), ("evil@localhost", False), ("localhost:80:80", False), ("localhost:8000/x", False),
        ("", False), (" ", False), ("[::1", False), ("127.0.0.1, evil.example", False), ("\xe9vil.localhost", False),
    ],
)  # fmt: skip
async def test_only_loopback_names_are_served_without_keys(host: str, served: bool) -> None:
    """A page whose name came to mean 127.0.0.1 is of the same origin to its browser; on every route it gets 421."""
    page = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
    if served:
        assert (await ask(keyring(KEYLESS), "GET", "/v1/models", {"Host": host})).status == 204
    else:
        await refused_everywhere(page, 421, "misdirected_request")


async def test_a_request_without_a_host_is_served_as_http_1_0_only() -> None:
    for host, version, status in ((None, "1.0", 204), (None, "1.1", 421), ("evil.example", "1.0", 421)):
        assert (await ask(keyring(KEYLESS), "GET", "/v1/models", {"Host": host}, version=version)).status == status


async def test_host_names_may_be_listed() -> None:
    """With keys any name is served, or those that are listed and loopback; probes are asked by a pod's address. Without
    keys, exactly those that are listed, on each port."""
    listed = ApiSettings(hosts=("api.example", "Other.Example"))
    assert (await ask(keyring(KEYED), "GET", "/v1/models", bearer("sk-root") | {"Host": "any.example"})).status == 204
    for door, key in ((KEYED, "sk-root"), (KEYLESS, TOKEN)):
        for host, status in (
            ("api.example", 204), ("API.example:443", 204), ("other.example", 204), ("127.0.0.1:1", 204),
            ("localhost", 204), ("evil.example", 421), ("api.example.evil.example", 421), ("a.api.example", 421),
            ("10.0.0.7:8000", 421), ("api.example:80:80", 421), ("api.example.", 421), ("", 421),
        ):  # fmt: skip
            for path in ("/v1/models", "/metrics"):
                told = await ask(keyring(door), "GET", path, bearer(key) | {"Host": host}, listed)
                assert told.status == status, (door, host)
        probe = await ask(keyring(door), "GET", "/healthz", {"Host": "10.0.0.7:8000"}, listed)
        assert probe.status == (204 if door == KEYED else 421)
    for origin, status in (("http://api.example:9", 204), ("http://api.example", 403), (EVIL, 403), ("null", 403)):
        page = {"Host": "api.example:9", "Origin": origin}
        assert (await ask(keyring(KEYLESS), "POST", "/v1/jobs", page, listed)).status == status, origin


@pytest.mark.parametrize(
    "headers",
    [{"Origin": origin} for origin in (
        EVIL, "null", "", "http://localhost@evil.example", "http://localhost.evil.example", "http://0.0.0.0:8000", "file://",
        "http://[::1", "http://localhost/x", "http://evil.example http://localhost",
    )] + [{"Sec-Fetch-Site": site} for site in ("cross-site", "same-site", "something-new")]
    + [{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": dest}
       for dest in ("iframe", "embed", "object")]
    + [{"Sec-Fetch-Site": "same-site", "Origin": "http://localhost:3000"}],
)  # fmt: skip
async def test_other_origins_are_refused_on_every_route(headers: dict[str, str]) -> None:
    """Reads too, whatever else is sent along."""
    await refused_everywhere(headers, 403, "foreign_origin")


@pytest.mark.parametrize(
    "header", ["Forwarded", "X-Forwarded-For", "Via", "X-Forwarded-Proto", "X-Real-IP", "CF-Connecting-IP"]
)
async def test_what_a_proxy_forwards_needs_keys(header: str) -> None:
    """It comes from this machine, with a Host that the proxy chose: whoever reaches the proxy could use the server."""
    await refused_everywhere({header: "198.51.100.7"}, 403, "proxy_without_keys", {"/healthz", "/readyz"})
    assert (await ask(keyring(KEYED), "GET", "/v1/models", bearer("sk-plain") | {header: "x"})).status == 204


@pytest.mark.parametrize(
    "headers",
    [{}, {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Mode": "cors"}, {"Origin": "http://127.0.0.1:9"},
     {"Origin": "http://localhost:3000", "Sec-Fetch-Site": "same-origin"}, {"Origin": "https://[::1]:8443"}],
)  # fmt: skip
async def test_programs_and_pages_of_this_machine_are_served(headers: dict[str, str]) -> None:
    """Also through a development server of this machine, which passes the headers of its page on."""
    assert (await ask(keyring(KEYLESS), "POST", "/v1/chat/completions", headers)).status == 204


@pytest.mark.parametrize("scheme", ["tauri", "capacitor", "ionic", "app", "file", "chrome-extension", "ftp", "ws"])
def test_a_page_of_an_app_is_no_page_of_this_machines(scheme: str) -> None:
    """Apps show pages, of strangers too, under the name localhost and a scheme of their own."""
    sent = {b"host": b"localhost:8000", b"origin": f"{scheme}://localhost".encode()}
    with pytest.raises(ApiError) as refused:
        Senders(ApiSettings(), keyless=True).check("POST", "/v1/jobs", sent)
    assert refused.value.status == 403


# --- what is written down of a refusal, and of what an admin does -----------------------------------------------------


def audited(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record) for record in caplog.records if record.name == audit.AUDIT]


@pytest.mark.parametrize(("fails", "outcome", "status"), [(False, "done", 204), (True, "failed", 500)])
async def test_what_an_admin_tried_is_written_down_however_it_ended(
    caplog: pytest.LogCaptureFixture, fails: bool, outcome: str, status: int
) -> None:
    """One line, also where the endpoint failed before it said anything: it may have done half of it. An address holds
    whatever its sender likes; the start of it is enough to find it again."""
    for path, target in (("/admin/pools/sim", "sim"), (f"/admin/dlq/{'x' * 5000}", "x" * 256)):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger=audit.AUDIT):
            try:
                await ask(keyring(KEYED), "DELETE", path, bearer("sk-root") | ({"X-Fails": "1"} if fails else {}))
            except LookupError:
                assert fails
        (line,) = audited(caplog)
        assert (line["target"], line["who"], line["outcome"], line["status"]) == (target, "root", outcome, status)


async def test_refusals_of_a_server_without_keys_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A page's try at /admin, a wrong token and a rebound name; what the token's holder does has the local name."""
    ring, right, page = keyring(KEYLESS), bearer(TOKEN), {"Origin": EVIL}
    with caplog.at_level(logging.INFO, logger=audit.AUDIT):
        for headers in (right | page, bearer("guess"), right | {"Host": "evil.example"}, right):
            await ask(ring, "DELETE", "/admin/pools/sim", headers)
        await ask(ring, "DELETE", "/admin/nothing", right | page)
    told = [(line["action"], line["outcome"], line["who"], line.get("code")) for line in audited(caplog)]
    assert told == [
        ("pool.resume", "refused", None, "foreign_origin"),
        ("pool.resume", "refused", None, "admin_token_required"),
        ("pool.resume", "refused", None, "misdirected_request"),
        ("pool.resume", "done", "local", None),
        ("admin.unknown", "refused", None, "foreign_origin"),
    ]


async def test_the_log_says_why_a_page_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Once for each origin and host, with path and fix: a browser tells a page of a CORS or network error only."""
    ring = keyless()
    for _ in range(3):
        assert (await ask(ring, "GET", "/v1/models", {"Origin": "https://once.example"})).status == 403
        assert (await ask(ring, "GET", "/v1/models", {"Host": "once-host.example"})).status == 421
    origin, host = [record.getMessage() for record in caplog.records if record.name == "api.auth.guard"]
    assert "foreign_origin" in origin and "'/v1/models'" in origin and "https://once.example" in origin
    assert "cors_origins" in origin and "once-host.example" in host and "[keys" in host


async def test_what_is_refused_is_counted() -> None:
    """By its code and its route: whoever watches the metrics sees somebody trying keys, addresses and origins."""
    ring, settings = Keyring({"plain": key_of("sk-plain", "a")}), ApiSettings()
    for method, path, headers in (
        ("GET", "/v1/jobs/job_1", {}), ("GET", "/v1/jobs", bearer("guess")), ("GET", "/admin/dlq", bearer("sk-plain")),
        ("GET", "/nowhere", {}), ("PATCH", "/v1/jobs", {}), ("GET", "/v1/jobs", bearer("sk-plain")),
    ):  # fmt: skip
        await ask(ring, method, path, headers, settings)
    metrics = cast(Mock, guarded(ring, settings)._services.metrics)
    codes = ["invalid_api_key", "invalid_api_key", "permission_denied", "not_found", "method_not_allowed"]
    assert [call.args[0] for call in metrics.count_error.call_args_list] == codes
    routes = [call.args[1:] for call in metrics.requests.labels.call_args_list]
    assert routes == [
        ("/v1/jobs/{job_id}", "401"), ("/v1/jobs", "401"), ("/admin/dlq", "403"), ("other", "404"), ("other", "405"),
        ("/v1/jobs", "204"),
    ]  # fmt: skip
