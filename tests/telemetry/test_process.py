"""What a process opens of its telemetry is closed with it, and what cannot be opened keeps it from starting."""

from __future__ import annotations

import argparse
import contextlib
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from penstock.config import Config
from penstock.process import Launch, Lifeline, StartError
from telemetry import process as subject
from telemetry.process import Telemetry


@pytest.fixture(autouse=True)
def logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mock]:
    """The log of this process stays as it is."""
    with monkeypatch.context() as patch:
        setup = Mock()
        patch.setattr(subject.logs, "setup", setup)
        yield setup


def launch(exits: contextlib.ExitStack, **settings: object) -> Launch:
    return Launch(argparse.Namespace(), Config({"telemetry": settings}), Lifeline(None), exits)


def test_it_is_closed_with_the_process(logs: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces before metrics; without a port nothing is served."""
    closed: list[str] = []
    with contextlib.ExitStack() as exits:
        telemetry = Telemetry(launch(exits, log_level="debug"), "api")
        telemetry.serve_metrics()
        tracing = telemetry.trace()
        monkeypatch.setattr(telemetry.metrics, "serve", lambda *_: pytest.fail("served"))
        exits.callback(closed.append, "others")
        assert not closed and tracing is not None
    logs.assert_called_once_with("api", "debug")
    assert closed == ["others"]


def test_a_taken_port_keeps_it_from_starting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, contextlib.ExitStack() as exits:
        port = taken.getsockname()[1]
        telemetry = Telemetry(launch(exits, metrics_port=port), "api")
        with pytest.raises(StartError, match=f"metrics cannot be served on 127.0.0.1:{port}"):
            telemetry.serve_metrics()


def test_a_folder_that_cannot_be_made_keeps_it_from_starting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with contextlib.ExitStack() as exits, pytest.raises(StartError):
        Telemetry(launch(exits, metrics_dir=str(tmp_path / "file" / "metrics")), "api")


def test_a_malformed_variable_keeps_it_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "soon")
    with contextlib.ExitStack() as exits:
        telemetry = Telemetry(launch(exits, otlp_endpoint="http://127.0.0.1:1"), "api")
        with pytest.raises(StartError, match="OTEL_BSP_SCHEDULE_DELAY"):
            telemetry.trace()
    logging.captureWarnings(False)
