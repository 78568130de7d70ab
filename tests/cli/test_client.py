"""The commands against a small server: streams read to the byte, and what each answer means at a command line."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import os
import signal
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import pytest
from cli_instance import running_at
from http_serving import QuietHandler, serving_http

from cli.__main__ import main
from cli.client import LISTINGS, PATIENCE_S
from cli.instance import DataDir
from streaming.fleet.process import Process

pytestmark = pytest.mark.slow

JOB = {
    "id": "job_x", "object": "job", "status": "completed", "created_at": 1.5, "started_at": 2.0, "first_token_at": 2.5,
    "completed_at": 3.0, "expires_at": 9.0, "model": "sim", "priority": "standard", "queue_position": None,
    "eta_ms": None, "attempts": 1, "last_event_id": "0:2",
    "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
    "result": {"choices": [{"index": 0, "message": {"role": "assistant", "content": "the answer"}}]},
    "error": None, "metadata": {},
}  # fmt: skip
WAITING = JOB | {"status": "queued", "result": None, "completed_at": None, "usage": None}
FAILED = JOB | {"status": "failed", "result": None, "error": {"code": "worker_lost", "message": "three workers died"}}
ERROR = {"error": {"message": "no", "type": "t", "param": None, "code": "some_code"}}
STREAM = "/v1/jobs/job_x/events"


def said(name: str, event_id: str = "0:1", **data: Any) -> str:
    """One event as it is sent."""
    return f"event: {name}\nid: {event_id}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"


def token(text: str, index: int = 0) -> str:
    return said("delta", index=index, text=text, tokens=1)


COMPLETED = said("completed", **(JOB | {"result": None}))


def followed(end: str) -> tuple[int, str]:
    """The events of a job that ended so; "": they break off before."""
    events = said("ping") + said("started", worker="w1", attempt=1) + token("the answer")
    return 200, events + (said(end, **(JOB | {"status": end, "result": None})) if end else "")


def listed(*jobs: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    return 200, {"object": "list", "data": jobs, "has_more": False, "next_cursor": None}


class Door:
    """A server with one canned answer per path (a list: one after the other), and the requests it got."""

    ANSWERS: ClassVar[dict[str, tuple[int, Any]]] = {
        "/v1/models": (200, {"data": [{"id": "sim"}]}),
        "/v1/jobs": (202, WAITING),
        "/v1/jobs/job_x": (200, JOB),
        "/v1/jobs/job_x/cancel": (200, JOB | {"status": "cancelled"}),
        "/admin/dlq": (200, {"data": []}),
        STREAM: (200, ": ping\n" + token("the\u2028") + token("answer") + COMPLETED),
    }

    def __init__(self) -> None:
        self.answers, self.ignored = dict(self.ANSWERS), ""
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        door = self

        class Handler(QuietHandler):
            def answer(self) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                door.requests.append((self.path, headers, self.read_json()))
                status, said = door.answers[self.path.partition("?")[0]]
                said = said.pop(0) if isinstance(said, list) else said() if callable(said) else said
                kind = "text/event-stream" if self.path.endswith("/events") else "application/json"
                more = {"x-request-id": "req_1"} | ({"x-ignored-fields": door.ignored} if door.ignored else {})
                self.send(status, said, kind, **more)

            do_GET = do_POST = answer  # noqa: N815

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def found_by_port(door: Door, monkeypatch: pytest.MonkeyPatch) -> Door:
    """Named by no variable: it listens on the port of the settings."""
    monkeypatch.delenv("PENSTOCK_URL")
    Path("penstock.toml").write_text(f"[api]\nport = {door.server.server_port}\n")
    return door


@pytest.fixture
def found_by_redis(found_by_port: Door, monkeypatch: pytest.MonkeyPatch) -> Door:
    """As that of an API process that some Redis lists."""
    url = found_by_port.url
    api = Process(role="api", id="api-0", life="l", pid=1, host="h", state="ready", since=1.0, url=url)
    monkeypatch.setattr("cli.registry.processes", lambda _: [api])
    return found_by_port


REDIS = "redis://127.0.0.1:1/0"


@pytest.fixture
def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    """Commands find it by PENSTOCK_URL; their stdin is empty, and they give up when it fails them."""
    door = Door()
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("cli.client.PATIENCE_S", 0.0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_URL", door.url)
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    with serving_http(door.server):
        yield door


ASK = ("chat", "a question", "--model", "sim")
"""Without a model, it is looked up first."""


def test_chat_prints_the_answer_alone(door: Door, told: Any) -> None:
    """stdout is the answer alone, with what a terminal would obey shown; the model is the first one served."""
    assert told("chat", "a question", "--system", "be brief", "--max-tokens", "9").out == r"the\u2028answer" + "\n"
    (path, headers, body), (events, *_) = door.requests[-2:]
    assert (path, events) == ("/v1/jobs", STREAM) and len(headers["idempotency-key"]) == 32
    assert body == {
        "model": "sim",
        "max_tokens": 9,
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a question"}],
        "queue": {"priority": "interactive"},
    }


@pytest.mark.parametrize(("words", "piped", "asked"), [
    ([], "from a pipe\n", "from a pipe\n"), (["-"], "from a pipe", "from a pipe"),
    (["summarize:"], "a text\n", "summarize:\n\na text\n"), (["summarize:"], " \n", "summarize:"),
])  # fmt: skip
def test_chat_appends_what_is_piped(
    door: Door, monkeypatch: pytest.MonkeyPatch, words: list[str], piped: str, asked: str
) -> None:
    """Without an argument and a terminal stdin is the prompt; with one, it follows behind it."""
    monkeypatch.setattr("sys.stdin", io.StringIO(piped))
    assert main(["chat", *words, "--model", "other"]) == 0
    body = door.requests[-2][2]
    assert (body["messages"], body["model"]) == ([{"role": "user", "content": asked}], "other")


@pytest.mark.parametrize("words", ["chat --model sim", "submit - --model sim"])
def test_piped_text_may_have_a_byte_order_mark_and_no_other_encoding(
    door: Door, monkeypatch: pytest.MonkeyPatch, told: Any, words: str
) -> None:
    def piped(data: bytes, code: int) -> str:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), "ascii", errors="surrogateescape"))
        return str(told(words, code=code).err)

    piped("é".encode("utf-8-sig"), 0)
    assert [body["messages"][0]["content"] for _, _, body in door.requests if body and "messages" in body] == ["é"]
    assert "UTF-16" in piped("é".encode("utf-16"), 2) and "byte 2 is 0xe9" in piped("aé".encode("latin-1"), 2)


@pytest.mark.parametrize(("answer", "code", "words"), [
    ((200, token("the") + said("failed", **FAILED)), 5, "cause: three workers died"),
    ((200, [token("the") + said("stream.reset", epoch=1), COMPLETED]), 1, "next:  penstock jobs result job_x"),
    ((200, token("the") + said("error", **ERROR)), 1, "error: no"),
    ((200, token("the")), 3, "next:  the job goes on: penstock jobs result job_x"),
    ((400, ERROR), 1, "error: no"),
    ((401, ERROR), 4, "error: no"),
    ((403, ERROR), 4, "error: no"),
    ((503, "busy"), 1, "error: the server answered 503"),
])  # fmt: skip
def test_chat_that_fails(door: Door, told: Any, answer: tuple[int, Any], code: int, words: str) -> None:
    """A job that failed, an answer that must not be joined to another, a server that stays away, a refusal."""
    door.answers[STREAM] = answer
    captured = told(*ASK, code=code)
    assert words in captured.err and captured.out in ("the\n", "the", "")


def test_chat_outlives_a_connection_with_one_plain_line(door: Door, monkeypatch: pytest.MonkeyPatch, told: Any) -> None:
    """It goes on behind the last event, as often as it must."""
    monkeypatch.setattr("cli.client.PATIENCE_S", PATIENCE_S)
    door.answers[STREAM] = (200, [token("the"), "", token(" answer"), COMPLETED])
    captured = told(*ASK)
    assert captured == ("the answer\n", f"(the connection to {door.url} broke; trying again)\n")
    cursors = [headers.get("last-event-id") for path, headers, _ in door.requests if path == STREAM]
    assert cursors == [None, "0:1", "0:1", "0:1"]


def test_what_a_gateway_sends_without_data_is_no_event(door: Door, told: Any) -> None:
    door.answers[STREAM] = (200, "retry: 3000\n\n" + token("the") + "event: failed\n\nid: 0:9\n\n" + COMPLETED)
    assert told(*ASK) == ("the\n", "")


def test_leaving_a_chat_cancels_its_job(door: Door) -> None:
    """Ctrl-C, a closed terminal, a closed pipe: nobody reads the rest."""

    def leave() -> str:
        os.kill(os.getpid(), signals.pop())
        return token("x")

    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    door.answers[STREAM] = (200, leave)
    for _ in range(3):
        assert main([*ASK]) == 130
        assert door.requests[-1][0] == "/v1/jobs/job_x/cancel"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_leaving_a_chat_before_its_job_has_an_id_cancels_it_too(door: Door) -> None:
    """The job may be queued already: it is asked for once more under the same key."""

    def leave() -> dict[str, Any]:
        if len(door.requests) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return WAITING

    door.answers["/v1/jobs"] = (202, leave)
    assert main([*ASK]) == 130
    (_, first, body), (path, second, again), (cancelled, _, _) = door.requests
    assert (path, cancelled) == ("/v1/jobs", "/v1/jobs/job_x/cancel")
    assert first["idempotency-key"] == second["idempotency-key"] and again == body


def test_error_names_the_request(door: Door, told: Any) -> None:
    """The API's code and request id come through with --json."""
    door.answers["/v1/jobs/job_x"] = (404, ERROR)
    captured = told("jobs show job_x --json", code=1)
    assert captured.out == ""
    error = json.loads(captured.err)["error"]
    assert (error["code"], error["message"], error["request_id"]) == ("some_code", "no", "req_1")


@pytest.mark.parametrize("command", ["jobs show job_x", "jobs ls", "dlq show 0-1-0", "dlq replay 0-1-0"])
def test_every_time_of_a_job_has_one_format(command: str, door: Door, told: Any) -> None:
    """Those of its attempts, too, of which one runs."""
    past = {"worker": "w-1", "started_at": 2.0, "ended_at": 2.5, "tokens": 1, "outcome": "worker_lost"}
    job = JOB | {"attempt_log": [past, past | {"ended_at": None}]}
    door.answers |= {
        "/v1/jobs": listed(job),
        "/v1/jobs/job_x": (200, job),
        "/admin/dlq/0-1-0": (200, {"id": "0-1-0", "at": 3.0, "job": job}),
        "/admin/dlq/0-1-0/replay": (200, job),
    }
    shown = json.loads(told(f"{command} --json").out)
    shown = shown.get("job", shown)
    assert (shown["status"], shown["created_at"]) == ("completed", "1970-01-01T00:00:01Z")
    times = [(each["started_at"], each["ended_at"]) for each in shown["attempt_log"]]
    assert times == [("1970-01-01T00:00:02Z", "1970-01-01T00:00:02Z"), ("1970-01-01T00:00:02Z", None)]


@pytest.mark.parametrize("command", ["jobs show job_x", "dlq show 0-1-0"])
def test_what_became_of_each_attempt_is_said_in_words(command: str, door: Door, told: Any) -> None:
    """And where a worker died, which command shows what of."""

    def shown(*outcomes: str | None) -> Any:
        attempt = {"worker": "w-1", "started_at": 2.0, "ended_at": 2.5, "tokens": 1}
        job = JOB | {"attempt_log": [attempt | {"outcome": outcome} for outcome in outcomes]}
        door.answers |= {"/admin/dlq/0-1-0": (200, {"id": "0-1-0", "at": 3.0, "job": job})}
        door.answers |= {"/v1/jobs/job_x": (200, job)}
        return told(command)

    out, err = shown("handed_back", "preempted", "lost", None)
    for words in ("its worker was stopped", "made room for a higher lane", "its worker died", "running"):
        assert f"  {words}\n" in out
    assert "next:  penstock logs --job job_x\n" in err
    assert "penstock logs" not in shown("handed_back", "preempted").err


@pytest.mark.parametrize(("path", "answer", "command", "code", "words"), [
    ("/v1/jobs", (404, {"error": {"message": "Models served: sim.", "code": "model_not_found"}}),
     "submit hi --model nope", 1, "\nnext:  name one of these with --model, or leave the model out\n"),
    ("/v1/jobs/job_x", (200, "<html>"), "jobs show job_x", 3, "error: "),
    ("/v1/jobs/job_x", (200, FAILED), "submit hi --wait", 5, "cause: three workers died"),
    ("/v1/jobs/job_x", (200, FAILED), "jobs result job_x", 5, "cause: three workers died"),
    ("/v1/jobs/job_x", (401, {"error": {"message": "no", "code": "invalid_api_key"}}), "jobs show job_x", 4,
     "next:  set PENSTOCK_API_KEY to a key"),
    (STREAM, followed("completed"), "submit hi --follow", 0, ""),
    (STREAM, followed("cancelled"), "submit hi --follow", 5, ""),
    (STREAM, followed(""), "submit hi --follow", 3, ""),
    (STREAM, followed(""), "submit hi --wait 5s", 2, "Invalid value for '--wait': '5s' is not a valid float"),
], ids=[
    "a wrong model", "no penstock", "a failed job that is waited for", "a failed job", "no key", "the end",
    "a cancelled job", "a broken connection", "a wait that is no number",
])  # fmt: skip
def test_how_it_ended_is_the_exit_code(
    door: Door, told: Any, path: str, answer: tuple[int, Any], command: str, code: int, words: str
) -> None:
    """With what to do where something is wrong."""
    door.answers[path] = answer
    assert words in told(command, code=code).err


def keep_key(home: DataDir, key: str = "from-file") -> None:
    home.make_private()
    home.api_key.touch(0o600)
    home.api_key.write_text(f"{key}\n")


def keys_seen(door: Door) -> list[str | None]:
    return [headers.get("authorization") for _, headers, _ in door.requests]


def test_key_comes_from_variable_or_file(door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never from an argument; the variable outranks the file. An address that was said gets what was said with it."""
    with running_at(door.url, tmp_path / ".penstock") as home:
        keep_key(home)
        for named, variable in ((False, ""), (True, ""), (False, "from-variable"), (True, "from-variable")):
            monkeypatch.setenv("PENSTOCK_API_KEY", variable)
            monkeypatch.setenv("PENSTOCK_URL", door.url if named else "")
            assert main(["jobs", "show", "job_x"]) == 0
    monkeypatch.setenv("PENSTOCK_URL", door.url)
    assert main(["jobs", "show", "job_x"]) == 0
    assert keys_seen(door) == ["Bearer from-file"] * 2 + ["Bearer from-variable"] * 3


def test_the_key_of_the_folder_goes_to_its_own_instance_alone(door: Door, tmp_path: Path) -> None:
    """Neither to another address, nor to one where the instance was before it stopped."""
    with running_at("http://127.0.0.1:9", tmp_path / ".penstock") as home:
        keep_key(home)
        assert main(["jobs", "show", "job_x"]) == 0
    assert main(["jobs", "show", "job_x", "--url", door.url]) == 0
    assert keys_seen(door) == [None, None]


@pytest.mark.parametrize("source", ["file", "variable"])
def test_whoever_has_the_port_is_sent_no_key(
    found_by_port: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Any, source: str
) -> None:
    """Nothing runs in the data folder, and another process listens where it would: no request, a clear error. Without
    a key the configured port is tried."""
    told("jobs show job_x")
    if source == "file":
        keep_key(DataDir(tmp_path / ".penstock"))
    else:
        monkeypatch.setenv("PENSTOCK_API_KEY", "from-variable")
    said = told("jobs show job_x", code=3).err
    assert "nothing is running in" in said and "next:  penstock up, or --url http://HOST:8000" in said
    assert keys_seen(found_by_port) == [None]


@pytest.mark.parametrize(("options", "folder"), [("--data-dir 'a b'", "a b"), ("", ".penstock")])
def test_an_instance_that_is_down_is_not_replaced_by_another(
    found_by_port: Door, tmp_path: Path, told: Any, options: str, folder: str
) -> None:
    """A prompt for the instance of a folder must not get into the store of whichever one has the configured port."""
    if not options:
        with running_at(found_by_port.url, tmp_path / folder):
            pass
    for words in ("chat hello", "submit hello", "dlq ls"):
        said = told(f"{words} {options}", code=3).err
        assert f"error: nothing is running in {tmp_path / folder}\n" in said
        assert f"next:  penstock up{f' {options}' if options else ''}," in said
    assert found_by_port.requests == []


@pytest.mark.parametrize("options", ["", f" --redis-url {REDIS}"], ids=["variable", "flag"])
def test_an_address_out_of_the_store_is_sent_no_key(
    found_by_redis: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Any, options: str
) -> None:
    """Whoever may write to it can say that an API is anywhere: no request with a key, nor with an admin token, even
    if the own instance is there. Without a key Redis leads to the API."""
    if not options:
        monkeypatch.setenv("PENSTOCK_REDIS_URL", REDIS)
    told(f"dlq ls{options}")
    with running_at(found_by_redis.url, tmp_path / ".penstock") as home:
        home.new_admin_token()
        told(f"dlq ls --redis-url {REDIS}")
    monkeypatch.setenv("PENSTOCK_API_KEY", "root-key")
    said = told(f"dlq ls{options}", code=3).err
    assert "an API key is not sent to an address out of Redis" in said and "next:  --url http://HOST:8000" in said
    told(f"dlq ls{options} --url", found_by_redis.url)
    assert keys_seen(found_by_redis) == [None, None, "Bearer root-key"]


@pytest.mark.parametrize(("url", "sent"), [
    ("http://127.0.0.1:{port}", True), ("http://127.0.0.1:{port}/", True), ("http://127.0.0.1:{other}", False),
    ("http://localhost:{port}", True), ("https://127.0.0.1:{port}", False), ("http://127.0.0.2:{port}", False),
])  # fmt: skip
def test_the_admin_token_goes_to_its_own_instance_alone(
    door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, sent: bool
) -> None:
    """And with requests to /admin only: another server at a similar address must not learn it."""
    monkeypatch.setenv("PENSTOCK_API_KEY", "a-key")
    port = door.server.server_port
    with running_at(url.format(port=port, other=port + 1), tmp_path / ".penstock") as home:
        token_hash = home.new_admin_token()
        token = home.admin_token.read_text()
        assert main(["dlq", "ls"]) == 0 and main(["jobs", "show", "job_x"]) == 0
    assert token_hash == hashlib.sha256(token.encode()).hexdigest() and len(door.requests) == 2
    for path, headers, _ in door.requests:
        expected = token if sent and path.startswith("/admin") else "a-key"
        assert headers["authorization"] == f"Bearer {expected}", path


def test_by_another_name_of_this_machine_the_token_goes_to_the_instances_own_address(
    door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of localhost or ::1 another program may have the same port."""
    with running_at(door.url, tmp_path / ".penstock") as home:
        home.new_admin_token()
        for name in ("localhost", "[::1]"):
            monkeypatch.setenv("PENSTOCK_URL", door.url.replace("127.0.0.1", name))
            assert main(["dlq", "ls"]) == 0
    assert [headers["host"] for _, headers, _ in door.requests] == [door.url.removeprefix("http://")] * 2


@pytest.mark.parametrize(("status", "code", "key", "words"), [
    (401, "invalid_api_key", "sk-x", "set PENSTOCK_API_KEY to an admin key of [keys]"),
    (421, "misdirected_request", "", "use --url http://127.0.0.1:{port} (ssh -L from another machine)"),
    (401, "admin_token_required", "", "set PENSTOCK_API_KEY to the contents of FOLDER/run/admin-token"),
])  # fmt: skip
def test_each_refusal_has_its_next_step(
    door: Door, monkeypatch: pytest.MonkeyPatch, told: Any, status: int, code: str, key: str, words: str
) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", key)
    door.answers["/admin/dlq"] = (status, {"error": {"message": "the server's words", "code": code}})
    said = told("dlq ls", code=4 if status < 404 else 1).err
    assert words.format(port=door.server.server_port) in said and "the server's words" in said


def test_an_admin_token_that_others_can_read_is_not_used(door: Door, tmp_path: Path, told: Any) -> None:
    with running_at(door.url, tmp_path / ".penstock") as home:
        home.new_admin_token()
        home.admin_token.chmod(0o640)
        told("dlq ls", code=4)
    assert door.requests == []


def test_proxies_do_not_catch_this_machine(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request to loopback goes there, whatever the environment says."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert main(["jobs", "show", "job_x"]) == 0


def test_submit_prints_the_id(door: Door, told: Any) -> None:
    """stdout is the id and nothing else; what was asked for is in the body."""
    options = ["--priority", "batch", "--deadline-ms", "500", "--idempotency-key", "k", "--max-tokens", "3"]
    assert told("submit", "a text", *options).out == "job_x\n"
    _, headers, body = door.requests[-1]
    assert headers["idempotency-key"] == "k"
    assert body == {
        "model": "sim",
        "messages": [{"role": "user", "content": "a text"}],
        "max_tokens": 3,
        "queue": {"priority": "batch", "deadline_ms": 500},
    }


@pytest.mark.parametrize(("words", "text", "polled"), [
    (["a text", "--wait"], "a text", "30"), (["--wait", "2.5", "a text"], "a text", "2.5"),
    (["--wait", "--", "5"], "5", "30"),
])  # fmt: skip
def test_submit_and_wait_prints_the_answer(door: Door, words: list[str], text: str, polled: str, told: Any) -> None:
    """--wait takes a number of seconds, or none behind the text."""
    assert told("submit", *words).out == "the answer\n"
    assert door.requests[-2][2]["messages"][0]["content"] == text
    assert float(door.requests[-1][0].partition("wait=")[2]) == float(polled)


def test_wait_that_runs_out_is_code_6(door: Door, told: Any) -> None:
    """The id is on stdout, and on stderr how to go on."""
    door.answers["/v1/jobs/job_x"] = (200, WAITING)
    captured = told("submit", "a text", "--wait", "0.05", code=6)
    assert captured.out == "job_x\n"
    assert "error: the job is still queued" in captured.err and "next:  penstock jobs events job_x" in captured.err
    assert json.loads(told("submit", "a text", "--wait", "0.05", "--json", code=6).out)["status"] == "queued"


def test_events_are_followed_to_the_end(door: Door, told: Any) -> None:
    """Tokens on stdout, the rest on stderr; with --json one object per event; --after is the cursor."""
    door.answers["/v1/jobs/job_x/events"] = followed("completed")
    captured = told("jobs events job_x --after 0:1")
    assert captured.out == "the answer\n"
    assert "started on w1" in captured.err
    assert door.requests[-1][1]["last-event-id"] == "0:1"
    names = [json.loads(line)["event"] for line in told("jobs events job_x --json").out.strip().split("\n")]
    assert names == ["started", "delta", "completed"]


def test_a_job_that_begins_again_is_told_so(door: Door, told: Any) -> None:
    """With --json as an event. Without: nothing was shown yet, so nothing is joined to anything."""
    parts = [said("started", worker="w", attempt=1) + said("stream.reset", "1:0:-", epoch=1), token("new") + COMPLETED]
    for words, shown in ((["--json"], "stream.reset"), ([], "new\n")):
        door.answers[STREAM] = (200, list(parts))
        assert shown in told("jobs events job_x", *words).out
        assert door.requests[-1][1]["last-event-id"] == "1:0:-"


def test_jobs_ls_turns_pages(door: Door, told: Any) -> None:
    """--limit over more than a page; the cursor of a page leads to the next."""
    page = {"object": "list", "data": [JOB] * 100, "has_more": True, "next_cursor": "c"}
    door.answers["/v1/jobs"] = (200, page)
    assert len(told("jobs ls --limit 150 --status completed --json").out.strip().split("\n")) == 150
    queries = [path.partition("?")[2] for path, _, _ in door.requests]
    assert queries == ["status=completed&limit=100", "status=completed&cursor=c&limit=50"]


def test_jobs_ls_filters(door: Door, told: Any) -> None:
    """Those of a tenant come from /admin; times are sent as Unix seconds."""
    rows = [JOB | {"preview": "Name a river.", "tenant": "a"}, JOB | {"status": "cancelled", "cancelled_by": "reader"}]
    door.answers |= dict.fromkeys(("/v1/jobs", "/admin/jobs"), listed(*rows))
    wanted = ["--model", "sim", "--lane", "batch", "--since", "1970-01-01T00:01", "--until", "1970-01-01T00:02"]
    out = told("jobs ls", *wanted).out
    assert "Name a river." in out and "cancelled (reader)" in out
    assert main(["jobs", "ls", "--tenant", "*"]) == 0
    assert main(["jobs", "ls", "--since", "soon"]) == 2
    assert [path for path, _, _ in door.requests] == [
        "/v1/jobs?model=sim&lane=batch&since=60.0&until=120.0&limit=20",
        "/admin/jobs?tenant=%2A&limit=20",
    ]


def test_jobs_show_shows_the_request_where_it_is_asked_for(door: Door, told: Any) -> None:
    turns = [{"role": "user", "content": "a question"}]
    door.answers["/v1/jobs/job_x"] = (200, JOB | {"input": {"model": "sim", "messages": turns}})
    assert "a question" not in told("jobs show job_x").out and "a question" in told("jobs show job_x --input").out
    assert json.loads(told("jobs show job_x --json").out)["input"]["messages"] == turns


@pytest.mark.parametrize("state", ["completed", "cancelled"])
def test_a_cancel_that_comes_too_late_says_so(door: Door, told: Any, state: str) -> None:
    """What was to be cancelled and was before is no failure."""
    door.answers["/v1/jobs/job_x/cancel"] = (200, JOB | {"status": state, "already_ended": True})
    out, err = told("jobs cancel job_x", code=int(state != "cancelled"))
    if state == "cancelled":
        assert out == "job_x was cancelled before\n"
    else:
        assert not out and f"already ended as {state}" in err


@pytest.mark.parametrize(
    "command", [["jobs", "watch", "job_x"], ["jobs", "events", "job_x"], ["submit", "a text", "--wait"]]
)
def test_a_server_that_stays_away_leaves_the_way_to_the_answer(
    door: Door, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    door.answers |= {"/v1/jobs/job_x": (200, "<html>"), STREAM: (200, "")}
    assert main(command) == 3
    assert capsys.readouterr().err.endswith("next:  the job goes on: penstock jobs result job_x\n")


# --- ids -------------------------------------------------------------------------------------------------------------


JOB_IDS = [f"job_00{number:030x}" for number in range(0xABC000, 0xABC000 + 250)] + [f"job_00{'f' * 30}"]
BATCHES = [f"batch_00{'1' * 30}", f"batch_00{'2' * 30}"]
MESSAGES = [f"msg_00{'3' * 30}", f"msg_00{'4' * 30}"]
LETTERS = ["0-1795486176000-0", "0-1795486176000-1", "0-1795486200000-0"]
LETTER_JOBS = [JOB_IDS[0], JOB_IDS[-1], None]
"""One letter is of no job."""
KINDS = {"/v1/jobs": JOB_IDS, "/v1/batches": BATCHES, "/admin/dlq": LETTERS, "/admin/webhooks": MESSAGES}


class Lists(QuietHandler):
    """A server that lists ids in pages, batches one by one and by the last id, and answers everything else with 404,
    which names the path."""

    def do_GET(self) -> None:  # noqa: N802
        parts, query = urlsplit(self.path), parse_qs(urlsplit(self.path).query)
        if parts.path not in KINDS:
            self.send(404, {"error": {"message": f"asked for {self.path}", "code": "none"}})
            return
        ids = KINDS[parts.path]
        limit, cursor = (1, "last_id") if ids is BATCHES else (int(query["limit"][0]), "next_cursor")
        begin = int(query.get("cursor", query.get("after", ["0"]))[0])
        page: list[dict[str, Any]] = [{"id": each} for each in ids[begin : begin + limit]]
        if ids is LETTERS:
            page = [each | {"job_id": job_id} for each, job_id in zip(page, LETTER_JOBS, strict=True)]
        place = str(begin + limit) if begin + limit < len(ids) else None
        self.send(200, {"data": page, "has_more": place is not None, cursor: place})


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving_http(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Lists)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


@pytest.fixture
def complains(url: str, told: Any) -> Callable[[str], str]:
    """What a command complains of, for all of them fail."""
    return lambda words: str(told(f"{words} --url {url}", code=None).err)


@pytest.mark.parametrize(("command", "given", "path"), [
    ("jobs show", "job_00ffff", f"/v1/jobs/{JOB_IDS[-1]}?include=input"),  # on the third page
    ("jobs events", "job_00ffff", f"/v1/jobs/{JOB_IDS[-1]}/events"),
    ("batch show", "batch_001111", f"/v1/batches/{BATCHES[0]}"),
    ("webhooks show", "msg_0044", f"/admin/webhooks/{MESSAGES[1]}"),
    ("dlq show", "0-17954862", "/admin/dlq/0-1795486200000-0"),
    ("dlq show", "job_00ffff", f"/admin/dlq/{JOB_IDS[-1]}"),  # a letter by its job
    ("jobs show", f"job_00{'e' * 30}", f"/v1/jobs/job_00{'e' * 30}?include=input"),  # whole: not looked up
    ("jobs show", "job_00eeee", "/v1/jobs/job_00eeee?include=input"),  # nothing begins so: the server says it
    ("jobs show", "00ffff", f"/v1/jobs/{JOB_IDS[-1]}?include=input"),  # without the word at its front
    ("batch show", "002222", f"/v1/batches/{BATCHES[1]}"),
])  # fmt: skip
def test_a_beginning_stands_for_the_one_id(
    command: str, given: str, path: str, complains: Callable[[str], str]
) -> None:
    """Of jobs, batches, messages and dead letters alike, whatever page they are on."""
    assert f"asked for {path}\n" in complains(f"{command} {given}")


@pytest.mark.parametrize(
    ("command", "given"),
    [("jobs show", "job_00f"), ("jobs events", "job_"), ("batch output", "batch_001"), ("webhooks show", "msg_0"),
     ("dlq drop", "0-179"), ("dlq show", "job_00f"), ("jobs cancel", "00f")],
)  # fmt: skip
def test_a_beginning_that_is_too_short_is_said_to_be(command: str, given: str, complains: Callable[[str], str]) -> None:
    """It is not asked for, even if it is the only one: one digit more or less must not cancel another job."""
    error = complains(f"{command} {given}")
    assert f"{given} is too short" in error and "next:  give more digits" in error


@pytest.mark.parametrize("command", ["show", "cancel"])
def test_two_ids_that_begin_alike_are_an_error(command: str, complains: Callable[[str], str]) -> None:
    """Nothing is guessed; the error names the candidates."""
    common = JOB_IDS[0][:-2]
    error = complains(f"jobs {command} {common}")
    assert f"{common} is the beginning of several job ids" in error and f"{JOB_IDS[0]}, {JOB_IDS[1]}," in error
    assert "asked for" not in error


def test_a_list_that_is_cut_off_completes_nothing(
    complains: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server lists the newest hundred messages: an older one may begin alike."""
    monkeypatch.setitem(KINDS, "/admin/webhooks", MESSAGES + [f"msg_{number:032x}" for number in range(120)])
    error = complains("webhooks replay msg_003333")
    assert "only the newest 100" in error and "whole id" in error
    assert f"asked for /admin/webhooks/{MESSAGES[0]}\n" in complains(f"webhooks show {MESSAGES[0]}")


def test_every_argument_that_is_an_id_has_a_list() -> None:
    """An argument of another name would not be completed."""
    from cli import admin, batch, jobs  # noqa: PLC0415

    groups = (jobs.jobs, batch.batch, admin.dlq, admin.webhooks, admin.keys)
    arguments = {param.name for group in groups for each in group.commands.values() for param in each.params}
    assert {name for name in arguments if name and name.endswith("_id") and name != "as_json"} == set(LISTINGS)
