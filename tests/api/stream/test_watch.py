"""Hearing from a connection that its client has left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from starlette.requests import ClientDisconnect

from api.stream.writer import Watched
from penstock.loops import Sliced


class Connection:
    """As much of one as a watch sees."""

    def __init__(self) -> None:
        self.on_lost: Callable[[], None] | None = None

    def watch(self, on_lost: Callable[[], None] | None) -> None:
        self.on_lost = on_lost


def scope(connection: Connection) -> dict[str, object]:
    return {"type": "http", "state": {"connection": connection}}


async def test_a_connection_tells_of_its_end_by_itself() -> None:
    """No task waits for it, and it is watched no longer than somebody wants to know."""
    connection, told = Connection(), list[bool]()
    with Watched(scope(connection), lambda: told.append(True)) as client:
        assert connection.on_lost is not None and len(asyncio.all_tasks()) == 1
        client.check()
        connection.on_lost()
        assert told == [True]
        with pytest.raises(ClientDisconnect):
            client.check()
    assert connection.on_lost is None


async def test_work_for_a_client_that_has_left_is_given_up() -> None:
    connection, done = Connection(), list[int]()

    def work() -> Sliced[str]:
        for number in range(9):
            done.append(number)
            yield
        return "all of it"

    with Watched(scope(connection)) as client:
        assert connection.on_lost is not None
        slices = client.while_there(work())
        next(slices)
        next(slices)
        connection.on_lost()
        with pytest.raises(ClientDisconnect):
            next(slices)
    assert done == [0, 1]
