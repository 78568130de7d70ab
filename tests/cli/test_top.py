"""`penstock top`: what a screen says, and how the terminal is left."""

from __future__ import annotations

import io
import json
import signal
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any

import pytest
from http_serving import QuietHandler, serving_http
from rich.console import Console
from terminals import OnTerminal

from cli.top import frame

PROBLEM = {
    "severity": "warning", "title": "chats of sim wait", "cause": "every slot is taken",
    "next_step": "penstock scale set sim 3", "page": "", "delays": True,
}  # fmt: skip
LANES = {
    "interactive": {"waiting": 3, "running": 2, "oldest_s": 12.5, "wait_s": 1.0},
    "batch": {"waiting": 0, "running": 0, "oldest_s": 0.0, "wait_s": 0.0},
}
OVERVIEW: dict[str, Any] = {
    "at": 1_795_693_125.3,
    "verdict": {"flow": "behind", "title": "Falling behind: chats of sim wait.", "problems": [PROBLEM]},
    "rates": {
        "window_s": 2.0, "first_token_ms": {"p50": 92.0, "p95": 310.0}, "per_token_ms": None, "tokens_per_s": 3120.5,
        "jobs_per_s": 12.25, "failed": 2, "open_streams": 7,
    },
    "pools": [{
        "model": "sim", "ready": 1, "want": 2, "reason": "4 running", "lanes": LANES,
        "workers": [{"id": "worker-1", "step_ms": 15.5}],
    }],
    "processes": [
        {
            "role": "worker", "id": "worker-1", "host": "box\u001b[2J", "state": "ready", "since": 1_795_693_005.3,
            "slots": 4, "running": 3, "kv_tokens": 1000, "kv_used": 250,
        },
        {
            "role": "api", "id": "api-1", "host": "box", "state": "draining", "since": 1_795_693_120.0,
            "slots": None, "running": None, "kv_tokens": None, "kv_used": None,
        },
    ],
}  # fmt: skip


def shown(overview: dict[str, Any], width: int = 100, **options: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, highlight=False, emoji=False, markup=False).print(
        frame(overview, "http://box:8000", width=width, **options)
    )
    return out.getvalue()


def test_a_screen_says_what_is_wrong_and_what_waits() -> None:
    """The verdict first, then each problem with its cause and next step; lanes, rates and processes below. What is not
    known is not 0, and a worker whose server is away is not ready."""
    text = shown(OVERVIEW)
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines[0] == "Falling behind: chats of sim wait."
    assert "warning: chats of sim wait" in lines and "  next:  penstock scale set sim 3" in lines
    words = [line.split() for line in lines]
    assert ["sim", "interactive", "3", "12.5", "s", "2", "1", "of", "2"] in words
    assert ["batch", "0", "–", "0"] in words, "no job waits, so none is oldest"
    assert [each[2:4] for each in words if each[:2] == ["between", "tokens"]] == [["–", "–"]], "no token came"
    assert any(line.startswith("first token") and "92.0 ms" in line and "3,120" in line for line in lines)
    assert any(line.startswith("worker-1") and "3/4" in line and "25%" in line and "15.5 ms" in line for line in lines)
    assert "failed in 2 s" in text and "\u001b" not in text and "server away" not in text
    worker, api = OVERVIEW["processes"]
    assert "server away" in shown(OVERVIEW | {"processes": [worker | {"away": ["http://x (gone)"]}, api]})


def test_an_old_screen_gives_no_advice() -> None:
    """Once the server does not answer, nobody knows what is wrong; the time of the data is named."""
    text = shown(OVERVIEW, stale="the server does not answer since 12:00:00")
    assert text.startswith("Unknown: the server does not answer since 12:00:00.")
    assert "data of" in text and "penstock scale set" not in text and "worker-1" in text


# --- the command ---------------------------------------------------------------------------------------------------


class Serve(QuietHandler):
    answers = threading.Event()

    def do_GET(self) -> None:  # noqa: N802
        if self.answers.is_set():
            self.send(200, OVERVIEW)
        self.close_connection = True


@pytest.fixture
def url() -> Iterator[str]:
    Serve.answers.set()
    with serving_http(ThreadingHTTPServer(("127.0.0.1", 0), Serve)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


def test_one_screen_goes_into_a_pipe(url: str, told: Any) -> None:
    """As text, or as the API's own object."""
    text = told("top --once --url", url).out
    assert text.startswith("Falling behind") and "q leaves" not in text and "\u001b" not in text
    assert json.loads(told("top --once --json --url", url).out) == OVERVIEW


def test_without_a_terminal_it_names_what_works(url: str, told: Any) -> None:
    out, err = told("top --url", url, code=2)
    assert not out and "penstock ps --json" in err


@pytest.mark.slow
@pytest.mark.parametrize(("end", "code"), [("q", 0), (signal.SIGINT, 130), (signal.SIGTERM, 130)])
def test_whatever_ends_it_the_terminal_is_as_before(url: str, end: str | signal.Signals, code: int) -> None:
    """Its settings, its cursor and its first screen."""
    with on_terminal(url, TERM="xterm") as screen:
        before = screen.settings
        screen.until(lambda seen: "worker-1" in seen)
        screen.type(end) if isinstance(end, str) else screen.interrupt(end)
        assert screen.end() == code
        assert screen.settings == before
    assert screen.seen.count("\x1b[?1049h") == screen.seen.count("\x1b[?1049l") == 1
    assert screen.seen.rindex("\x1b[?25h") > screen.seen.rindex("\x1b[?25l")


def on_terminal(url: str, **environ: str) -> OnTerminal:
    return OnTerminal(["-m", "cli", "top", "--url", url, "--interval", "0.5"], columns=100, environ=environ)


@pytest.mark.slow
def test_a_server_that_goes_makes_the_screen_unknown(url: str) -> None:
    """What was shown before stays, as old; q still leaves; when the server answers again, it is live again."""
    unknown = "Unknown: the server has not answered for"
    with on_terminal(url, TERM="xterm", NO_COLOR="1") as screen:
        screen.until(lambda seen: "Falling behind" in seen)
        Serve.answers.clear()
        screen.until(lambda seen: unknown in seen)
        Serve.answers.set()
        screen.until(lambda seen: "Falling behind" in seen.rpartition(unknown)[2])
        screen.type("q")
        assert screen.end() == 0
