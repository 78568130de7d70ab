"""A server without keys: programs of this machine are served, pages of other origins are not. CORS; the audit log."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from house import ADMIN_TOKEN, House, eventually, free_port, module_house

from api.auth.hosts import EXPOSED
from api.openapi import HEADERS
from api.routes import ROUTES
from api.settings import ApiSettings
from penstock.config import ConfigError, build

pytestmark = pytest.mark.slow

CHAT = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
EVIL = "https://evil.example"
APP = "https://app.example"
JSON = {"Content-Type": "application/json"}


def error_of(answer: tuple[int, dict[str, str], bytes]) -> tuple[int, str]:
    return answer[0], str(json.loads(answer[2])["error"]["code"])


def raw(port: int, head: str, body: bytes = b"") -> int:
    """The status of a request whose every byte is given."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(head.replace("\n", "\r\n").encode("latin-1") + b"\r\n" + body)
        return int(connection.recv(65536).split(b" ")[1])


def every_route() -> Iterator[tuple[str, str]]:
    for route in ROUTES:
        yield route.method, route.described_path.replace("{model}", "sim").replace("{", "").replace("}", "")


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/jobs", "/v1/batches", "/admin/pools/sim"]
)
def test_json_needs_its_content_type(house: House, path: str) -> None:
    """A page can send any other type, and none, to another origin without asking."""
    body, method = json.dumps(CHAT).encode(), "PUT" if path.startswith("/admin") else "POST"
    head = f"{method} {path} HTTP/1.1\nHost: localhost\nAuthorization: Bearer {ADMIN_TOKEN}\n"
    head += f"Content-Length: {len(body)}\n"
    assert raw(house.port, head, body) == 415
    for kind in ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "json"):
        assert raw(house.port, head + f"Content-Type: {kind}\n", body) == 415
    assert raw(house.port, head + "Content-Type: Application/vnd.x+JSON; charset=utf-8\n", body) != 415


# --- CORS ------------------------------------------------------------------------------------------------------------


shared = module_house("workers", PENSTOCK_API_CORS_ORIGINS=f"{APP}, http://localhost:5173")
"""A server without keys that lets pages of two origins in."""


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (("Host: 127.0.0.1", "Accept: a", "Accept: b"), 200),
        (("Host: 127.0.0.1", "Authorization: Bearer a"), 200),
        (("Host: 127.0.0.1", "host: 127.0.0.1"), 400),
        (("Host: 127.0.0.1", "Host: evil.example"), 400),
        (("Host: 127.0.0.1", "Authorization: Bearer a", "authorization: Bearer a"), 400),
        (("Host: 127.0.0.1", "Authorization: Bearer a", "Authorization: Bearer b"), 400),
        (("Host: 127.0.0.1", "X-Api-Key: a", "x-api-key: b"), 400),
        (("Host: 127.0.0.1", "Origin: http://127.0.0.1", "Origin: https://evil.example"), 400),
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/healthz"])
def test_who_asks_and_whom_is_said_once(house: House, path: str, fields: tuple[str, ...], status: int) -> None:
    """Of two headers of a name, a proxy in front may have judged by the one, and this server by the other."""
    assert raw(house.port, "\n".join((f"GET {path} HTTP/1.1", *fields, ""))) == status


def test_cors_is_off(house: House) -> None:
    """No header of it, not even for a page that may send."""
    status, headers, _ = house.post("/v1/chat/completions", CHAT, {"Origin": "http://localhost:5173"})
    assert status == 200 and not [name for name in headers if name.startswith("access-control") or name == "vary"]
    asks = {"Origin": "http://localhost:5173", "Access-Control-Request-Method": "POST"}
    assert error_of(house.request("OPTIONS", "/v1/jobs", None, asks)) == (403, "foreign_origin")
    assert house.request("OPTIONS", "/v1/jobs")[0] == 405


@pytest.mark.parametrize("origin", [APP, "http://localhost:5173"])
def test_listed_origins_may_ask_send_and_read(shared: House, origin: str) -> None:
    """Preflight, a stream, an answer in one piece, events, an error: each with its headers."""
    page = {"Origin": origin, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}
    sent = "authorization,content-type,x-stainless-os"
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": sent}
    status, headers, _ = shared.request("OPTIONS", "/v1/chat/completions", None, page | asks)
    assert status == 204 and headers["access-control-allow-origin"] == origin
    assert (headers["access-control-allow-methods"], headers["access-control-allow-headers"]) == ("POST", sent)
    assert "access-control-allow-credentials" not in headers
    streamed = shared.post("/v1/chat/completions", CHAT | {"stream": True}, page)
    whole = shared.post("/v1/chat/completions", CHAT, page)
    wrong = shared.post("/v1/chat/completions", {"model": "nobody"}, page)
    untyped = shared.request("POST", "/v1/chat/completions", b"{}", page | {"Content-Type": "text/plain"})
    events = shared.request("GET", f"/v1/jobs/{whole[1]['x-job-id']}/events", None, page)
    assert [answer[0] for answer in (streamed, whole, wrong, untyped, events)] == [200, 200, 400, 415, 200]
    assert streamed[2].endswith(b"data: [DONE]\n\n")
    for _, headers, _ in (streamed, whole, wrong, untyped, events):
        assert headers["access-control-allow-origin"] == origin and headers["vary"] == "Origin"
        exposed = {name.strip().lower() for name in headers["access-control-expose-headers"].split(",")}
        assert {"x-job-id", "x-request-id", "request-id", "anthropic-ratelimit-tokens-reset", "retry-after"} <= exposed


def test_everybody_else_is_refused_as_before(shared: House) -> None:
    """Origins that only look like a listed one, its form without CORS, and /admin for any page."""
    alike = (APP + ":8443", APP + ".evil.example", APP.upper(), "http://app.example", APP + "/")
    for origin in (EVIL, "null", "*", *alike):
        answer = shared.post("/v1/chat/completions", CHAT, {"Origin": origin})
        assert error_of(answer) == (403, "foreign_origin"), origin
        assert "access-control-allow-origin" not in answer[1] and answer[1]["vary"] == "Origin"
        asks = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        assert shared.request("OPTIONS", "/v1/jobs", None, asks)[0] == 403
    assert shared.request("GET", "/v1/jobs", None, {"Sec-Fetch-Site": "cross-site"})[0] == 403
    for method, path in every_route():
        if not path.startswith("/v1/"):
            answer = shared.request(method, path, None, {"Origin": APP, "Authorization": f"Bearer {ADMIN_TOKEN}"})
            assert answer[0] == 403 and "access-control-allow-origin" not in answer[1], path
    for asked in ("x" * 3000, "a b", "a;b", "a,,b"):
        sent = {"Origin": APP, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": asked}
        assert shared.request("OPTIONS", "/v1/jobs", None, sent)[0] == 405, asked


def test_headers_that_pages_need_are_exposed() -> None:
    """Every header the document describes, but for the one that only asks for a key."""
    assert {name.lower() for name in HEADERS} - {name.lower() for name in EXPOSED} == {"www-authenticate"}


def test_all_origins_need_a_key(empty_house: House, tmp_path: Path) -> None:
    """`*` without keys is refused at the start; with keys a page may use the key it was given."""
    process = empty_house.start("api", PENSTOCK_API_CORS_ORIGINS="*", PENSTOCK_API_PORT=str(empty_house.port))
    assert process.wait(20) == 2 and "api.cors_origins" in empty_house.log("api")
    row = f"[keys.a]\nsha256 = '{hashlib.sha256(b'sk-a').hexdigest()}'\ntenant = 'a'\n"
    (tmp_path / "penstock.toml").write_text(row)
    empty_house.start_api(PENSTOCK_API_CORS_ORIGINS="*")
    status, headers, _ = empty_house.request(
        "GET", "/v1/models", None, {"Origin": EVIL, "Authorization": "Bearer sk-a"}
    )
    assert status == 200 and headers["access-control-allow-origin"] == EVIL
    status, headers, _ = empty_house.request("GET", "/v1/models", None, {"Origin": EVIL})
    assert status == 401 and headers["access-control-allow-origin"] == EVIL


@pytest.mark.parametrize(
    ("field", "value"),
    [("cors_origins", value) for value in ("app.example", "https://app.example/", "https://*.example", "null",
                                           "https://a b", "https://u@app.example", "HTTPS://app.example",
                                           "https://app.example?x", "https://")]
    + [("hosts", value) for value in ("https://a.example", "a.example:80", "a/b", "*", "a b")],
)  # fmt: skip
def test_origins_and_hosts_are_checked_at_the_start(field: str, value: str) -> None:
    """Nothing that no browser would ever send is taken: it would let nobody in, and nobody would know why."""
    with pytest.raises(ConfigError, match=rf"^api\.{field}: .*e\.g\.|^api\.{field}: .*write it as"):
        build(ApiSettings, {field: [value]}, "api")
    listed = "https://a.example:8443, http://[::1]:3000, tauri://localhost"
    build(ApiSettings, {"cors_origins": listed, "hosts": "a, ::1"}, "api")


# --- the audit log ---------------------------------------------------------------------------------------------------


def audited(house: House) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in house.log("api").splitlines() if '"penstock.audit"' in line]
    return [line for line in lines if line["logger"] == "penstock.audit"]


def test_what_admins_do_and_are_refused_is_logged(empty_house: House, tmp_path: Path) -> None:
    """Who, what, when, from where and how it ended, one line each, also at log level error; no key and no hash."""
    from redis import Redis  # noqa: PLC0415 - the test writes a dead letter itself

    house, hashes = empty_house, {}
    text = "[telemetry]\nlog_level = 'error'\n"
    for name, row in {"plain": "tenant = 'a'", "root": "tenant = 'ops'\nadmin = true"}.items():
        hashes[name] = hashlib.sha256(f"sk-canary-{name}".encode()).hexdigest()
        text += f"[keys.{name}]\nsha256 = '{hashes[name]}'\n{row}\n"
    (tmp_path / "penstock.toml").write_text(text)
    house.start_all("workers")

    def ask(method: str, path: str, key: str, body: Any = None) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer sk-canary-{key}", "X-Request-Id": f"{method}.{key}"}
        count = len(audited(house))
        status, _, data = house.request(method, path, body, headers)
        (line,) = eventually(lambda: audited(house)[count:])  # one for each, and no more
        assert (line["status"], line["request_id"], line["method"]) == (status, f"{method}.{key}", method)
        assert line["client"].startswith("127.0.0.1:") and line["time"] and line["level"] in ("info", "warning")
        return line | {"answer": json.loads(data)}

    with Redis.from_url(house.redis_url) as client:
        client.xadd("penstock:{0}:dead", {"lane": "x", "entry": "1-1", "reason": "not an event of Penstock"})
    root = {"Authorization": "Bearer sk-canary-root"}
    (letter,) = eventually(lambda: json.loads(house.request("GET", "/admin/dlq", None, root)[2])["data"])
    (known,) = audited(house)
    assert known["action"] == "keys.known" and known["admin_by"] == "keys"
    listed = [(key["name"], key["tenant"], key["admin"]) for key in known["known"]]
    assert listed == [("plain", "a", False), ("root", "ops", True)]

    replay, missing = f"/admin/dlq/{letter['id']}/replay", "msg_00" + "0" * 30
    for method, path, key, body, said in (
        ("PUT", "/admin/pools/sim", "root", {"want": 1, "for_s": 60}, ("pool.override", "sim", "root", "done")),
        ("DELETE", "/admin/pools/sim", "root", None, ("pool.resume", "sim", "root", "done")),
        ("PUT", "/admin/pools/sim", "root", {"want": 99}, ("pool.override", "sim", "root", "failed")),
        ("PUT", "/admin/pools/sim", "plain", {"want": 1}, ("pool.override", "", "plain", "refused")),
        ("PUT", "/admin/pools/sim", "wrong", {"want": 1}, ("pool.override", "", None, "refused")),
        ("GET", "/admin/dlq", "plain", None, ("admin.read", "", "plain", "refused")),
        ("POST", replay, "root", None, ("dead_letter.replay", letter["id"], "root", "failed")),
        ("DELETE", f"/admin/dlq/{letter['id']}", "root", None, ("dead_letter.drop", letter["id"], "root", "done")),
        ("POST", f"/admin/webhooks/{missing}/replay", "root", None, ("webhook.replay", missing, "root", "failed")),
    ):
        line = ask(method, path, key, body)
        assert (line["action"], line["target"], line["who"], line["outcome"]) == said
        if said == ("pool.override", "sim", "root", "done"):
            assert (line["want"], line["for_s"], line["answer"]["override"]["by"]) == (1, 60, "root")
    written = house.log("api")
    assert "sk-canary" not in written and not [each for each in hashes.values() if each in written]


# --- the metrics port ------------------------------------------------------------------------------------------------


def test_metrics_have_a_port_of_their_own(house: House) -> None:
    """For a Prometheus without a key: the same series, lanes and batches among them, and nothing else."""
    port, door = free_port(), free_port()
    house.start_api(door, PENSTOCK_TELEMETRY_METRICS_PORT=str(port), PENSTOCK_API_METRICS="admin")
    assert house.get("/metrics", door)[0] == 401
    assert house.request("GET", "/metrics", None, {"Authorization": f"Bearer {ADMIN_TOKEN}"}, door)[0] == 200
    status, page = house.get("/metrics", port)
    assert status == 200
    for series in (
        b'penstock_lane_waiting{model="sim",priority="batch"}',
        b"penstock_batches_unfinished",
        b"penstock_requests_total",
    ):
        assert series in page
