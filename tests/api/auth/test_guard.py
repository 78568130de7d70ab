"""The guard by itself: what it counts, what it writes down, and which senders it lets through, without a server."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import Message, Receive, Scope, Send

from api.auth import audit
from api.auth.guard import RequestGuard
from api.auth.hosts import Origins
from api.auth.keys import Keyring
from api.openai.errors import ApiError
from api.services import Services
from api.settings import ApiSettings, KeySettings

KEY = "sk-guard-0123456789"
SHA256 = hashlib.sha256(KEY.encode()).hexdigest()
ADMIN = {"one": KeySettings(sha256=SHA256, tenant="ops", admin=True)}
PLAIN = {"one": KeySettings(sha256=SHA256, tenant="red")}
APP = "https://app.example"


class Door:
    """The guard in front of an endpoint that answers 200, or fails."""

    def __init__(self, keys: dict[str, KeySettings], *, token: str = "", fails: bool = False, **settings: Any) -> None:
        self.errors, self.fails = Counter[str](), fails
        services = SimpleNamespace(
            keyring=Keyring(keys, token),
            settings=ApiSettings(**settings),
            metrics=SimpleNamespace(count_error=lambda code: self.errors.update([code])),
        )
        self.guarded = RequestGuard(self._answer, cast(Services, services))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.fails:
            raise LookupError("nobody thought of this")
        scope["state"]["status"] = 200  # as api/app.py does
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask(self, method: str, path: str, **headers: str) -> int:
        """The status of the answer; headers are named with underscores."""
        given = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
        scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "http_version": "1.1"}
        scope |= {"client": ("127.0.0.1", 4711), "headers": list(given.items())}
        self.state = scope["state"] = {"headers": {b"host": b"localhost", **given}, "request_id": "r"}
        said: list[Message] = []

        async def send(message: Message) -> None:
            said.append(message)

        await self.guarded(scope, cast(Receive, None), send)
        return int(said[0]["status"])


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record) for record in caplog.records if record.name == audit.AUDIT]


async def test_a_refused_request_is_counted_under_its_route() -> None:
    """The middleware names metrics and spans by the route, also of a request that is refused."""
    for keys, host, status in (({}, "evil.example", 421), (PLAIN, "localhost", 401)):
        door = Door(keys)
        assert await door.ask("GET", "/v1/jobs/job_1", host=host) == status
        assert door.state["route"] == "/v1/jobs/{job_id}"
    assert await door.ask("GET", "/v1/not/listed") == 404
    assert "route" not in door.state


# --- the audit log ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fails", "outcome", "status"), [(False, "done", 200), (True, "failed", 500)])
async def test_what_an_admin_tried_is_written_down_however_it_ended(
    caplog: pytest.LogCaptureFixture, fails: bool, outcome: str, status: int
) -> None:
    """One line, also where the endpoint failed before it said anything: it may have done half of it."""
    door = Door(ADMIN, fails=fails)
    with caplog.at_level(logging.INFO, logger=audit.AUDIT):
        try:
            assert await door.ask("DELETE", "/admin/pools/sim", authorization=f"Bearer {KEY}") == 200
        except LookupError:
            assert fails
    (line,) = lines(caplog)
    assert (line["action"], line["target"], line["who"]) == ("pool.resume", "sim", "one")
    assert (line["outcome"], line["status"]) == (outcome, status)


async def test_refusals_of_a_server_without_keys_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A page's try at /admin, a wrong token and a rebound name; what the token's holder does has the local name."""
    right, page = {"authorization": f"Bearer {KEY}"}, {"origin": "https://evil.example"}
    door = Door({}, token=SHA256)
    with caplog.at_level(logging.INFO, logger=audit.AUDIT):
        for headers in (right | page, {"authorization": "Bearer guess"}, right | {"host": "evil.example"}, right):
            await door.ask("DELETE", "/admin/pools/sim", **headers)
        await door.ask("DELETE", "/admin/nothing", **right, **page)
    told = [(line["action"], line["outcome"], line["who"], line.get("code")) for line in lines(caplog)]
    assert told == [
        ("pool.resume", "refused", None, "foreign_origin"),
        ("pool.resume", "refused", None, "admin_token_required"),
        ("pool.resume", "refused", None, "misdirected_request"),
        ("pool.resume", "done", "local", None),
        ("admin.unknown", "refused", None, "foreign_origin"),
    ]


async def test_the_log_says_why_a_page_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Once for each origin and host, with path and fix: a browser tells a page of a CORS or network error only."""
    door = Door({})
    for _ in range(3):
        assert await door.ask("GET", "/v1/models", origin="https://once.example") == 403
        assert await door.ask("GET", "/v1/models", host="once-host.example") == 421
    origin, host = [record.getMessage() for record in caplog.records if record.name == "api.auth.guard"]
    assert "foreign_origin" in origin and "'/v1/models'" in origin and "https://once.example" in origin
    assert "cors_origins" in origin and "once-host.example" in host and "[keys" in host


async def test_a_line_of_the_audit_log_is_no_longer_than_it_may_be(caplog: pytest.LogCaptureFixture) -> None:
    """An address holds whatever its sender likes; the start of it is enough to find it again."""
    with caplog.at_level(logging.INFO, logger=audit.AUDIT):
        await Door(ADMIN).ask("DELETE", f"/admin/dlq/{'x' * 5000}", authorization=f"Bearer {KEY}")
    (line,) = lines(caplog)
    assert line["target"] == "x" * 256


# --- what is refused -------------------------------------------------------------------------------------------------


async def test_what_the_guard_refuses_is_counted() -> None:
    """By its code: whoever watches the metrics sees somebody trying keys, addresses and origins."""
    keyed, open_ = Door(PLAIN), Door({})
    assert await keyed.ask("GET", "/v1/jobs") == 401
    assert await keyed.ask("GET", "/v1/jobs", authorization="Bearer guess") == 401
    assert await keyed.ask("GET", "/admin/dlq", authorization=f"Bearer {KEY}") == 403
    assert await keyed.ask("GET", "/nowhere") == 404
    assert await keyed.ask("PATCH", "/v1/jobs") == 405
    assert await keyed.ask("GET", "/v1/jobs", authorization=f"Bearer {KEY}") == 200
    assert sorted(keyed.errors.values()) == [1, 1, 1, 2]
    assert keyed.errors["invalid_api_key"] == 2
    assert await open_.ask("GET", "/v1/jobs", origin="https://evil.example") == 403
    assert await open_.ask("GET", "/v1/jobs", host="evil.example") == 421
    assert sorted(open_.errors.values()) == [1, 1] and "misdirected_request" in open_.errors


@pytest.mark.parametrize("scheme", ["tauri", "capacitor", "ionic", "app", "file", "chrome-extension", "ftp", "ws"])
def test_a_page_of_an_app_is_no_page_of_this_machines(scheme: str) -> None:
    """Apps show pages, of strangers too, under the name localhost and a scheme of their own."""
    origins = Origins((), keyless=True)
    origins.check("POST", "/v1/chat/completions", {b"origin": b"http://localhost:3000"})
    origins.check("POST", "/v1/chat/completions", {b"origin": b"https://127.0.0.1"})
    with pytest.raises(ApiError) as refused:
        origins.check("POST", "/v1/chat/completions", {b"origin": f"{scheme}://localhost".encode()})
    assert refused.value.status == 403
