"""Ports are given out once in a process."""

from __future__ import annotations

import socket

from bench.ports import FIRST_PORT, MAX_RANGES, RANGE_SIZE, free_port


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
