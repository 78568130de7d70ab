"""Listening sockets, and what people are told of a port that is taken."""

from __future__ import annotations

import socket

import pytest

from cli.deployment import is_free, listening, next_free
from cli.output import Problem, error_block
from penstock import process


def test_taken_port_is_told_with_a_way_out() -> None:
    """The next free port is proposed, in at most four lines."""
    with listening("127.0.0.1", 0) as (first,):
        port = first.getsockname()[1]
        with pytest.raises(Problem, match=f"port {port} is taken") as caught, listening("127.0.0.1", port):
            pass
        free = next_free("127.0.0.1", port + 1)
    problem = caught.value
    assert problem.exit_code == 1
    assert len(error_block(problem)) <= 4
    assert problem.next_step == f"penstock up --port {free}"


def test_unknown_host_is_a_problem() -> None:
    """A host that is none of this machine's is told, not thrown."""
    for host in ("192.0.2.1", "no-such-host.invalid"):
        with pytest.raises(Problem, match="cannot listen"), listening(host, 0):
            pass


def test_localhost_is_both_loopbacks() -> None:
    """On one port; if another program has that port of one of them, its name would lead to that program."""
    with listening("localhost", 0) as listeners:
        port = listeners[0].getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            with socket.create_connection((host, port)):
                pass
        assert not is_free("localhost", port) and not is_free("::1", port)
    for host in ("127.0.0.1", "::1"):
        with listening(host, 0) as (other,):
            port = other.getsockname()[1]
            with pytest.raises(Problem, match=f"port {port} is taken"), listening("localhost", port):
                pass


def test_a_machine_may_lack_one_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for missing in ("::1", "127.0.0.1"):
        # An address of no interface stands for the missing one.
        monkeypatch.setattr(process, "LOCALHOST", tuple(
            {"::1": "2001:db8::1", "127.0.0.1": "192.0.2.1"}[host] if host == missing else host
            for host in ("127.0.0.1", "::1")
        ))  # fmt: skip
        with listening("localhost", 0) as (listener,), socket.create_connection(listener.getsockname()[:2]):
            pass
    monkeypatch.setattr(process, "LOCALHOST", ("192.0.2.1", "2001:db8::1"))
    with pytest.raises(Problem, match="cannot listen"), listening("localhost", 0):
        pass
