"""Ports are given out once, in a process and among processes."""

from __future__ import annotations

import socket
import subprocess
import sys

from bench.ports import FIRST_PORT, MAX_RANGES, RANGE_SIZE, free_port

ASK = "from bench.processes import free_port; print(free_port(), flush=True); input()"


def range_of(port: int) -> int:
    return (port - FIRST_PORT) // RANGE_SIZE


def test_each_port_of_a_range_is_given_out_before_any_comes_again() -> None:
    """Nobody listens on the first yet when the last is asked for; what somebody listens on is left out."""
    given = [free_port()]
    while (port := free_port()) != given[0]:
        given.append(port)
    assert len(set(given)) == len(given) > 10
    assert len({range_of(port) for port in given}) == 1 and 0 <= range_of(given[0]) < MAX_RANGES
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", given[1]))
        assert given[1] not in {free_port() for _ in given}


def test_processes_at_the_same_time_have_ranges_of_their_own() -> None:
    others = [subprocess.Popen([sys.executable, "-c", ASK], stdin=-1, stdout=-1, text=True) for _ in range(3)]
    try:
        first = {range_of(int(other.stdout.readline())) for other in others if other.stdout}
        assert len(first | {range_of(free_port())}) == 4
    finally:
        for other in others:
            other.communicate("\n", timeout=30)
    assert [other.returncode for other in others] == [0, 0, 0]
