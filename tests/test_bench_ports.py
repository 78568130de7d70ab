"""Ports are given out once, in a process and among processes."""

from __future__ import annotations

import socket
import subprocess
import sys

from bench.ports import EACH, FIRST, RANGES, free_port

ASK = "from bench.ports import free_port; print(free_port(), flush=True); input()"


def range_of(port: int) -> int:
    return (port - FIRST) // EACH


def test_each_port_of_a_range_is_given_out_before_any_comes_again() -> None:
    """Nobody listens on the first yet when the last is asked for."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        given = [free_port() for _ in range(EACH - 1)]
        assert len({range_of(port) for port in given}) == 1 and 0 <= range_of(given[0]) < RANGES
        assert len({*given, taken.getsockname()[1]}) == EACH
        assert free_port() in given, "given out again, but for the one that is taken"


def test_processes_at_the_same_time_have_ranges_of_their_own() -> None:
    others = [subprocess.Popen([sys.executable, "-c", ASK], stdin=-1, stdout=-1, text=True) for _ in range(3)]
    try:
        first = {range_of(int(other.stdout.readline())) for other in others if other.stdout}
        assert len(first | {range_of(free_port())}) == 4
    finally:
        for other in others:
            other.communicate("\n", timeout=30)
    assert [other.returncode for other in others] == [0, 0, 0]
