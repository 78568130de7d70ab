"""The API below a path of a reverse proxy: every link that it sends leads back to it, through the proxy."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urljoin

import pytest
from cli_instance import said_here
from house import ADMIN_TOKEN, House, module_house
from http_serving import serving_http

from penstock.client import PenstockClient

pytestmark = pytest.mark.slow

BASE = "/deep/llm"
CHAT = {"model": "sim", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}
ENDED_BY_CONNECTION = ("transfer-encoding", "connection")


@contextmanager
def proxy(house: House, *, strips: bool) -> Iterator[str]:
    """Serve what is below BASE; return its address. Everything else is another site's."""

    class Handler(BaseHTTPRequestHandler):
        def _pass(self) -> None:
            if not f"{self.path}/".startswith(f"{BASE}/"):
                self.send_error(404, "another site")
                return
            path = (self.path.removeprefix(BASE) or "/") if strips else self.path
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            server = http.client.HTTPConnection("127.0.0.1", house.port, timeout=60)
            server.request(self.command, path, body or None, dict(self.headers))
            answer = server.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ENDED_BY_CONNECTION:
                    self.send_header(name, value)
            self.end_headers()
            while data := answer.read1(65536):
                self.wfile.write(data)
                self.wfile.flush()
            server.close()

        do_GET = do_POST = do_DELETE = _pass  # noqa: N815 - as the library calls them

        def log_message(self, *_: object) -> None: ...

    with serving_http(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield f"http://127.0.0.1:{server.server_port}{BASE}"


house = module_house("workers", PENSTOCK_API_BASE_PATH=BASE)


@pytest.fixture(scope="module", params=[True, False], ids=["strips", "keeps"])
def url(house: House, request: pytest.FixtureRequest) -> Iterator[str]:
    with proxy(house, strips=request.param) as url:
        yield url


def asked(url: str, method: str = "GET", body: object = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
    host, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host, timeout=60)
    data = None if body is None else json.dumps(body).encode()
    fields = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_TOKEN}"} | headers
    connection.request(method, f"/{path}", data, fields)
    answer = connection.getresponse()
    found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    connection.close()
    return found


def test_links_lead_back_through_the_proxy(url: str) -> None:
    status, headers, body = asked(f"{url}/v1/jobs", "POST", CHAT)
    assert status == 202
    job = urljoin(f"{url}/v1/jobs", headers["location"])
    assert asked(f"{job}?wait=30")[0] == 200 and json.loads(asked(job)[2])["id"] == json.loads(body)["id"]
    respond = {"Prefer": "respond-async"}
    _, headers, _ = asked(f"{url}/v1/chat/completions", "POST", CHAT, **respond)
    assert asked(urljoin(f"{url}/v1/chat/completions", headers["location"]))[0] == 200
    _, headers, _ = asked(f"{url}/v1/chat/completions", "POST", CHAT | {"stream": True})
    assert asked(urljoin(url, headers["stream-url"]))[0] == 200
    _, headers, events = asked(f"{url}/v1/jobs/{json.loads(body)['id']}/events")
    assert asked(urljoin(url, headers["stream-url"]))[0] == 200 and b'"finish_reasons":["length"]' in events
    for link in json.loads(asked(f"{url}/")[2])["see"]:
        assert asked(urljoin(url, link))[0] in (200, 405), link
    (server,) = json.loads(asked(f"{url}/openapi.json")[2])["servers"]
    assert asked(urljoin(url, server["url"]) + "/v1/models")[0] == 200
    message = json.loads(asked(f"{url}/chat/completions", "POST", CHAT)[2])["error"]["message"]
    assert f"{BASE}/v1/chat/completions" in message
    assert f"{BASE}/openapi.json" in json.loads(asked(f"{url}/nothing")[2])["error"]["message"]
    link = json.loads(asked(f"{url}/admin/console/links", "POST", {})[2])["path"]
    assert b"<title>Penstock" in asked(urljoin(url, link).partition("#")[0])[2]


def test_without_the_proxy_nothing_changes(house: House) -> None:
    """Health checks and programs of the machine need no path before theirs; another path is none of ours."""
    for path in ("/healthz", "/v1/models", f"{BASE}/healthz"):
        assert asked(house.url + path)[0] == 200
    for path in (f"{BASE}x/v1/models", f"/x{BASE}/v1/models", f"{BASE}{BASE}/v1/models"):
        assert asked(house.url + path)[0] == 404


def test_our_clients_may_have_a_path_in_their_address(url: str, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    with PenstockClient(url) as client:
        job = client.submit(CHAT)
        assert "".join(event.text for event in client.stream(job["id"])) and client.wait(job["id"])["result"]
    monkeypatch.chdir(house.folder)
    monkeypatch.setenv("PENSTOCK_URL", url)
    monkeypatch.setenv("PENSTOCK_API_KEY", ADMIN_TOKEN)
    for words, begin in ((["jobs", "ls", "--json"], "{"), (["console", "--no-browser"], f"{url}/console#link=")):
        said, code, errors = said_here(*words)
        assert code == 0 and said.startswith(begin), errors
