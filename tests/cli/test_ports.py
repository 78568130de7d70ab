"""Who holds a port, and what people are told."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from cli import ports
from cli.output import Problem, error_block
from penstock import process

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows who holds a port")


def test_taken_port_is_told_with_a_way_out() -> None:
    """The next free port is proposed, in at most four lines."""
    with ports.listen("127.0.0.1", 0) as (first,):
        port = first.getsockname()[1]
        with pytest.raises(Problem, match=f"port {port} is taken") as caught, ports.listen("127.0.0.1", port):
            pass
        free = ports.next_free("127.0.0.1", port + 1)
    problem = caught.value
    assert problem.exit_code == 1
    assert len(error_block(problem)) <= 4
    assert problem.next_step == f"penstock up --port {free}"


@needs_proc
def test_holder_is_named() -> None:
    """Process id and command line of another process, or of this one; a port that nobody holds has none."""
    code = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0));"
        "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        holder = ports.holder(int(process.stdout.readline()))
        assert holder.startswith(f"pid {process.pid} ({sys.executable} ")
        process.communicate()
    with ports.listen("127.0.0.1", 0) as (listener,):
        port = listener.getsockname()[1]
        assert ports.holder(port).startswith(f"pid {os.getpid()} (")
    assert ports.holder(port) == ""


def test_unknown_host_is_a_problem() -> None:
    """A host that is none of this machine's is told, not thrown."""
    for host in ("192.0.2.1", "no-such-host.invalid"):
        with pytest.raises(Problem, match="cannot listen"), ports.listen(host, 0):
            pass


def test_localhost_is_both_loopbacks() -> None:
    """On one port; if another program has that port of one of them, its name would lead to that program."""
    with ports.listen("localhost", 0) as listeners:
        port = listeners[0].getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            with socket.create_connection((host, port)):
                pass
        assert not ports.is_free("localhost", port) and not ports.is_free("::1", port)
    for host in ("127.0.0.1", "::1"):
        with ports.listen(host, 0) as (other,):
            port = other.getsockname()[1]
            with pytest.raises(Problem, match=f"port {port} is taken"), ports.listen("localhost", port):
                pass


def test_a_machine_may_lack_one_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for missing in ("::1", "127.0.0.1"):
        # An address of no interface stands for the missing one.
        monkeypatch.setattr(process, "LOCALHOST", tuple(
            {"::1": "2001:db8::1", "127.0.0.1": "192.0.2.1"}[host] if host == missing else host
            for host in ("127.0.0.1", "::1")
        ))  # fmt: skip
        with ports.listen("localhost", 0) as (listener,), socket.create_connection(listener.getsockname()[:2]):
            pass
    monkeypatch.setattr(process, "LOCALHOST", ("192.0.2.1", "2001:db8::1"))
    with pytest.raises(Problem, match="cannot listen"), ports.listen("localhost", 0):
        pass


def test_backlog_and_reuse() -> None:
    """The socket can be bound again at once, and is not shared."""
    with ports.listen("127.0.0.1", 0) as (listener,):
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        assert not listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT)
        assert not listener.get_inheritable()
