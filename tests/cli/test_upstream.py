"""`penstock up --upstream`: which model it serves, and what it says when it cannot know."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any

import pytest
from http_serving import QuietHandler, serving_http

from cli import deployment as engines
from cli.deployment import own_name, with_upstream
from cli.output import UNREACHABLE, USAGE, Problem


class Models(QuietHandler):
    """The list of models of a server that takes one key."""

    names: tuple[str, ...] = ()
    key = ""
    loading = 0
    """How often it says that it loads its model."""

    def do_GET(self) -> None:  # noqa: N802
        if Models.loading:
            Models.loading -= 1
            self.send(503, {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}})
            return
        known = not self.key or self.headers.get("Authorization") == f"Bearer {self.key}"
        names = {"data": [{"id": name} for name in self.names]}
        self.send(200 if known else 401, names if known else {"error": "no"})


@pytest.fixture
def server() -> Iterator[str]:
    """Its address; tests set what `Models` has."""
    with serving_http(ThreadingHTTPServer(("127.0.0.1", 0), Models)) as found:
        yield f"http://127.0.0.1:{found.server_port}/v1"


def of(url: str, **flags: Any) -> dict[str, Any]:
    return {"upstream": url, "engine": None, "model": None, **flags}


def test_the_only_model_is_served(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the server's name for it, and by ours if one is given; then nobody asks the server."""
    monkeypatch.setattr(Models, "names", ("meta-llama/Llama-3.1-8B",))
    served = with_upstream(of(server), {})
    assert (served["engine"], served["model"]) == ("upstream", "meta-llama/Llama-3.1-8B")
    assert with_upstream(of("http://127.0.0.1:1/v1", model="mine"), {})["model"] == "mine"
    assert with_upstream(of("http://127.0.0.1:1/v1"), {"PENSTOCK_MODEL": "mine"})["model"] == "mine"


def test_a_server_that_loads_its_model_is_waited_for(
    server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And no longer than allowed."""
    monkeypatch.setattr(Models, "names", ("m",))
    monkeypatch.setattr(Models, "loading", 2)
    monkeypatch.setattr(engines, "RETRY_DELAY_S", 0.0)
    assert with_upstream(of(server), {})["model"] == "m" and Models.loading == 0
    assert "HTTP 503: Loading model" in capsys.readouterr().err
    monkeypatch.setattr(Models, "loading", 9)
    monkeypatch.setattr(engines, "START_TIMEOUT_S", 0.0)
    with pytest.raises(Problem, match="Loading model") as told:
        with_upstream(of(server), {})
    assert told.value.exit_code == UNREACHABLE


def test_several_models_need_a_choice(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Models, "names", ("a", "b"))
    with pytest.raises(Problem, match="has 2 models: a, b") as told:
        with_upstream(of(server), {})
    assert told.value.exit_code == USAGE and "--model" in told.value.next_step


def test_a_key_comes_from_a_variable(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, the error says where its name belongs."""
    monkeypatch.setattr(Models, "names", ("a",))
    monkeypatch.setattr(Models, "key", "sk-1")
    with pytest.raises(Problem, match="needs an API key") as told:
        with_upstream(of(server), {})
    assert "PENSTOCK_UPSTREAM_KEY_ENV" in told.value.next_step
    monkeypatch.setenv("THE_KEY", "sk-1")
    assert with_upstream(of(server), {"PENSTOCK_UPSTREAM_KEY_ENV": "THE_KEY"})["model"] == "a"


def test_a_server_that_is_away_is_named() -> None:
    with pytest.raises(Problem, match=r"http://127\.0\.0\.1:1/v1 cannot be used") as told:
        with_upstream(of("http://127.0.0.1:1/v1"), {})
    assert told.value.exit_code == UNREACHABLE


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("/models/SmolLM2-135M-Instruct.F16.gguf", "SmolLM2-135M-Instruct.F16"),
        ("llama3.1:8b", "llama3.1:8b"),
        ("org/model", "org/model"),
        ("a model", "a-model"),
        ("/", "upstream"),
        ("", "upstream"),
        ("x" * 500, "x" * 128),
    ],
)
def test_a_name_of_a_server_becomes_one_of_ours(name: str, ours: str) -> None:
    assert own_name(name) == ours
