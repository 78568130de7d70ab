"""The commands against a small server: streams read to the byte, and what each answer means at a command line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.__main__ import main
from cli.client import Event, parse_events
from cli.instance import DataDir, Instance

JOB = {
    "id": "job_1", "object": "job", "status": "completed", "created_at": 1.5, "started_at": 2.0, "first_token_at": 2.5,
    "completed_at": 3.0, "expires_at": 9.0, "model": "sim", "priority": "standard", "queue_position": None,
    "eta_ms": None, "attempts": 1, "last_event_id": "0:2",
    "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
    "result": {"choices": [{"index": 0, "message": {"role": "assistant", "content": "the answer"}}]},
    "error": None, "metadata": {},
}  # fmt: skip
WAITING = JOB | {"status": "queued", "result": None, "completed_at": None, "usage": None}
FAILED = JOB | {"status": "failed", "result": None, "error": {"code": "worker_lost", "message": "three workers died"}}
ERROR = {"error": {"message": "no", "type": "t", "param": None, "code": "some_code"}}
STREAM = "/v1/chat/completions"


def chunk(text: str) -> str:
    return "data: " + json.dumps({"choices": [{"delta": {"content": text}}]}, ensure_ascii=False) + "\n\n"


class Door:
    """A server with one canned answer per path, and the requests it got."""

    ANSWERS: ClassVar[dict[str, tuple[int, Any]]] = {
        "/v1/models": (200, {"data": [{"id": "sim"}]}),
        "/v1/jobs": (202, WAITING),
        "/v1/jobs/job_1": (200, JOB),
        STREAM: (200, ": ping\n" + chunk("the\u2028") + chunk("answer") + "data: [DONE]\n\n"),
    }

    def __init__(self) -> None:
        self.answers = dict(self.ANSWERS)
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        door = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                door.requests.append((self.path, headers, json.loads(body) if body else None))
                status, said = door.answers[self.path.partition("?")[0]]
                data = said if isinstance(said, str) else json.dumps(said)
                self.send_response(status)
                self.send_header("x-request-id", "req_1")
                self.end_headers()
                self.wfile.write(data.encode())

            do_GET = do_POST = answer  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    door = Door()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_URL", door.url)
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    thread = Thread(target=door.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield door
    door.server.shutdown()
    door.server.server_close()
    thread.join()


@given(st.lists(st.integers(1, 7)))
def test_events_do_not_depend_on_the_pieces(sizes: list[int]) -> None:
    """However the bytes are cut, the same events come out; other line separators stay in the text."""
    stream = (
        ': ping\nevent: delta\r\nid: 1:2\ndata: {"a":\ndata: "\u2028\u0085"}\n\n: x\n\nid: 1:3\ndata:{}\n\n'.encode()
    )
    pieces = []
    for size in sizes:
        pieces.append(stream[:size])
        stream = stream[size:]
    assert list(parse_events([*pieces, stream])) == [
        Event("delta", "1:2", '{"a":\n"\u2028\u0085"}'),
        Event("message", "1:3", "{}"),
    ]


def test_chat_prints_the_answer_alone(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    """stdout is the answer to the byte; the model is the first one served."""
    assert main(["chat", "a question", "--system", "be brief", "--max-tokens", "9"]) == 0
    assert capsys.readouterr().out == "the\u2028answer\n"
    assert door.requests[-1][2] == {
        "model": "sim",
        "max_tokens": 9,
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a question"}],
        "stream": True,
    }


def test_chat_takes_its_prompt_from_a_pipe(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an argument and a terminal stdin is the prompt."""
    import io  # noqa: PLC0415

    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert main(["chat", "--model", "other"]) == 0
    assert door.requests[-1][2]["messages"] == [{"role": "user", "content": "from a pipe"}]
    assert door.requests[-1][2]["model"] == "other"


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ((200, chunk("the") + "data: " + json.dumps(ERROR) + "\n\n"), 5),
        ((200, chunk("the")), 1),
        ((400, ERROR), 1),
        ((401, ERROR), 4),
        ((403, ERROR), 4),
        ((503, "busy"), 1),
    ],
)
def test_chat_that_fails(door: Door, answer: tuple[int, Any], code: int) -> None:
    """A job that failed, a connection that broke, a refusal, a key that is not allowed."""
    door.answers[STREAM] = answer
    assert main(["chat", "a question", "--model", "sim"]) == code


def test_error_names_the_request(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    """The API's code and request id come through with --json."""
    door.answers["/v1/jobs/job_1"] = (404, ERROR)
    assert main(["jobs", "show", "job_1", "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    error = json.loads(captured.err)["error"]
    assert (error["code"], error["message"], error["request_id"]) == ("some_code", "no", "req_1")


def test_not_a_penstock_is_code_3(door: Door) -> None:
    """Some other server on that port is not taken for one of ours."""
    door.answers["/v1/jobs/job_1"] = (200, "<html>")
    assert main(["jobs", "show", "job_1"]) == 3


def test_key_comes_from_variable_or_file(door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never from an argument; the variable outranks the file."""
    folder = tmp_path / ".penstock"
    folder.mkdir()
    (folder / "api-key").touch(0o600)
    (folder / "api-key").write_text("from-file\n")
    main(["jobs", "show", "job_1"])
    monkeypatch.setenv("PENSTOCK_API_KEY", "from-variable")
    main(["jobs", "show", "job_1"])
    assert [headers["authorization"] for _, headers, _ in door.requests] == ["Bearer from-file", "Bearer from-variable"]


@pytest.mark.parametrize(
    ("url", "sent"),
    [
        ("http://127.0.0.1:{port}", True), ("http://127.0.0.1:{port}/", True), ("http://127.0.0.1:{other}", False),
        ("http://localhost:{port}", False), ("https://127.0.0.1:{port}", False), ("http://127.0.0.2:{port}", False),
    ],
)  # fmt: skip
def test_the_admin_token_goes_to_its_own_instance_alone(
    door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, sent: bool
) -> None:
    """And with requests to /admin only: another server at a similar address must not learn it."""
    monkeypatch.setenv("PENSTOCK_API_KEY", "a-key")
    door.answers["/admin/dlq"] = (200, {"data": []})
    port, home = door.server.server_port, DataDir(tmp_path / ".penstock")
    names = {"pid": 1, "state": "ready", "phase": "", "redis_url": "", "data_dir": "", "engine": "sim", "started": 1.0}
    with home.lock():
        home.prepare()
        home.write(Instance(version="1", url=url.format(port=port, other=port + 1), models=("sim",), **names))
        token_hash = home.new_admin_token()
        token = home.admin_token.read_text()
        assert main(["dlq", "ls"]) == 0 and main(["jobs", "show", "job_1"]) == 0
    assert token_hash == hashlib.sha256(token.encode()).hexdigest()
    for path, headers, _ in door.requests:
        expected = token if sent and path.startswith("/admin") else "a-key"
        assert headers["authorization"] == f"Bearer {expected}", path


def test_an_admin_token_that_others_can_read_is_not_used(door: Door, tmp_path: Path) -> None:
    home = DataDir(tmp_path / ".penstock")
    names = {"pid": 1, "state": "ready", "phase": "", "redis_url": "", "data_dir": "", "engine": "sim", "started": 1.0}
    with home.lock():
        home.prepare()
        home.write(Instance(version="1", url=door.url, models=("sim",), **names))
        home.new_admin_token()
        home.admin_token.chmod(0o640)
        assert main(["dlq", "ls"]) == 4
    assert door.requests == []


def test_proxies_do_not_catch_this_machine(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request to loopback goes there, whatever the environment says."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert main(["jobs", "show", "job_1"]) == 0


def test_submit_prints_the_id(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    """stdout is the id and nothing else; what was asked for is in the body."""
    options = ["--priority", "batch", "--deadline-ms", "500", "--idempotency-key", "k", "--max-tokens", "3"]
    assert main(["submit", "a text", *options]) == 0
    assert capsys.readouterr().out == "job_1\n"
    _, headers, body = door.requests[-1]
    assert headers["idempotency-key"] == "k"
    assert body == {
        "model": "sim",
        "messages": [{"role": "user", "content": "a text"}],
        "max_tokens": 3,
        "queue": {"priority": "batch", "deadline_ms": 500},
    }


@pytest.mark.parametrize("words", [["--wait", "a text"], ["a text", "--wait"], ["a text", "--wait=30"]])
def test_submit_and_wait_prints_the_answer(door: Door, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """--wait alone takes no value, wherever it stands."""
    assert main(["submit", *words]) == 0
    assert capsys.readouterr().out == "the answer\n"
    assert "wait=" in door.requests[-1][0]


def test_submit_and_wait_as_json(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    """The job object, its times as RFC 3339."""
    assert main(["submit", "a text", "--wait", "--json"]) == 0
    job = json.loads(capsys.readouterr().out)
    assert job["status"] == "completed"
    assert job["created_at"] == "1970-01-01T00:00:01Z"


def test_wait_that_runs_out_is_code_6(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    """The id is on stdout, and the next step on stderr."""
    door.answers["/v1/jobs/job_1"] = (200, WAITING)
    assert main(["submit", "a text", "--wait=0.05"]) == 6
    captured = capsys.readouterr()
    assert captured.out == "job_1\n"
    assert "penstock jobs show job_1" in captured.err


@pytest.mark.parametrize("command", [["submit", "a text", "--wait"], ["jobs", "result", "job_1"]])
def test_failed_job_is_code_5(door: Door, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The job's own error is the cause."""
    door.answers["/v1/jobs/job_1"] = (200, FAILED)
    assert main(command) == 5
    assert "cause: three workers died" in capsys.readouterr().err


def test_events_are_followed_to_the_end(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens on stdout, the rest on stderr; with --json one object per event; --after is the cursor."""
    door.answers["/v1/jobs/job_1/events"] = (200, _events("completed"))
    assert main(["jobs", "events", "job_1", "--after", "0:1"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "the answer\n"
    assert "started on w1" in captured.err
    assert door.requests[-1][1]["last-event-id"] == "0:1"
    assert main(["jobs", "events", "job_1", "--json"]) == 0
    names = [json.loads(line)["event"] for line in capsys.readouterr().out.strip().split("\n")]
    assert names == ["started", "delta", "completed"]


@pytest.mark.parametrize(("end", "code"), [("completed", 0), ("cancelled", 5), ("", 1)])
def test_end_of_a_followed_job(door: Door, end: str, code: int) -> None:
    """The exit code tells how it ended; a connection that broke before is a failure."""
    door.answers["/v1/jobs/job_1/events"] = (200, _events(end))
    assert main(["submit", "a text", "--follow"]) == code


def test_jobs_ls_turns_pages(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    """--limit over more than a page; the cursor of a page leads to the next."""
    page = {"object": "list", "data": [JOB] * 100, "has_more": True, "next_cursor": "c"}
    door.answers["/v1/jobs"] = (200, page)
    assert main(["jobs", "ls", "--limit", "150", "--status", "completed", "--json"]) == 0
    assert len(capsys.readouterr().out.strip().split("\n")) == 150
    queries = [path.partition("?")[2] for path, _, _ in door.requests]
    assert queries == ["status=completed&limit=100", "status=completed&cursor=c&limit=50"]


def test_jobs_ls_as_a_table(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    """For people: how long it took and how many tokens."""
    door.answers["/v1/jobs"] = (200, {"object": "list", "data": [JOB], "has_more": False, "next_cursor": None})
    assert main(["jobs", "ls"]) == 0
    head, row = capsys.readouterr().out.strip().split("\n")
    assert head.split() == ["ID", "STATUS", "PRIORITY", "MODEL", "CREATED", "AT", "SECONDS", "TOKENS"]
    assert row.split() == ["job_1", "completed", "standard", "sim", "1970-01-01T00:00:01Z", "1.0", "2"]


def test_empty_list_is_no_error(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing on stdout, a word on stderr, exit 0."""
    door.answers["/v1/jobs"] = (200, {"object": "list", "data": [], "has_more": False, "next_cursor": None})
    assert main(["jobs", "ls"]) == 0
    assert capsys.readouterr() == ("", "no jobs\n")


def test_jobs_show_result_cancel(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    """One job for people: its fields, its answer, its end."""
    door.answers["/v1/jobs/job_1/cancel"] = (200, JOB | {"status": "cancelled"})
    assert main(["jobs", "show", "job_1"]) == 0
    assert "first token at" not in capsys.readouterr().out
    assert main(["jobs", "result", "job_1"]) == 0
    assert capsys.readouterr().out == "the answer\n"
    assert main(["jobs", "cancel", "job_1"]) == 0
    assert capsys.readouterr().out == "job_1 cancelled\n"


def _events(end: str) -> str:
    said = [
        ("ping", {}),
        ("started", {"worker": "w1", "attempt": 1}),
        ("delta", {"index": 0, "text": "the answer", "tokens": 2}),
    ]
    if end:
        said.append((end, JOB | {"status": end, "result": None}))
    return "".join(f"event: {name}\nid: 0:1\ndata: {json.dumps(data)}\n\n" for name, data in said)
