"""RabbitMQ as the broker of events, a real node. Slow to start, so only `make test-rabbitmq` runs it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from brokering import JOBS, Outside, body, configure, lives_are_whole
from house import House, eventually
from rabbit import Rabbit, missing, rabbit

WANTED = "PENSTOCK_TEST_RABBITMQ"

pytestmark = [
    pytest.mark.skipif(WANTED not in os.environ, reason="slow: make test-rabbitmq"),
    pytest.mark.skipif(bool(missing()), reason=missing() or "there is one"),
]

COUNT = 200


@pytest.fixture
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rabbit]:
    with rabbit(tmp_path_factory.mktemp("rabbit")) as each:
        yield each


def start(house: House, node: Rabbit, folder: Path) -> Outside:
    configure(house, node.url)
    house.start_all("workers", "offline")
    return Outside(node.url)


def test_in_and_out_with_the_broker_killed_in_the_middle(empty_house: House, node: Rabbit, tmp_path: Path) -> None:
    """A job for every message, its whole life in events, and a bad message put aside, over two restarts."""
    outside = start(empty_house, node, tmp_path)
    names = [f"n-{number}" for number in range(COUNT)]
    outside.put("bad", b"not json")
    for restart, name in enumerate(names):
        if restart in (COUNT // 3, 2 * COUNT // 3):
            node.kill()
            node.start()
        outside.put(name, body(name, metadata={"name": name}))
    lives_are_whole(outside, set(names))
    rejected = outside.read(f"{JOBS}.rejected", 5)
    assert len(rejected) == 1 and "not valid JSON" in rejected[0][0]["x-penstock-reason"]
    assert "taking jobs failed" not in empty_house.log("offline")


def test_killed_while_it_takes_what_it_held_comes_again(empty_house: House, node: Rabbit, tmp_path: Path) -> None:
    """The taker is killed with messages in hand and others on their way: another has each become one job."""
    outside = start(empty_house, node, tmp_path)
    names = [f"k-{number}" for number in range(COUNT)]
    for name in names:
        outside.put(name, body(name, metadata={"name": name}))
    eventually(lambda: len(outside.completed()) >= COUNT // 10)
    empty_house._processes[-1].kill()
    empty_house.start("offline", "--id", "offline-2")
    lives_are_whole(outside, set(names))
