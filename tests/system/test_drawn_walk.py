"""The drawn walk: docs/walk.md names the files that a streamed chat and its tokens really come through."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from house import House

pytestmark = pytest.mark.slow

TREE = Path(__file__).parents[2]
TRACED = TREE / "tests/support/traced"
MAX_FILES, MAX_ENTRIES = 14, 2


def drawn(title: str) -> list[str]:
    """The files that the page lists under this heading, in order."""
    page = (TREE / "docs/walk.md").read_text(encoding="utf-8")
    part = page.split(f"### {title}\n", 1)[1].split("\n#", 1)[0]
    return re.findall(r"^\d+\. `([^`]+)`", part, re.MULTILINE)


class Trace:
    """What one process handed on, and through which files."""

    def __init__(self, path: Path) -> None:
        self._lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def first(self, last_file: str, sent: str, begin: str = "") -> list[str]:
        """The files of the first call that ends in this file, sends this, and comes from a file that begins so."""
        for line in self._lines:
            files = line["files"]
            if files and files[-1] == last_file and sent in line["sent"] and files[0].startswith(begin):
                return list(files)
        raise AssertionError(f"{last_file} sent no {sent}")


def test_the_drawn_walk_is_the_one_that_a_chat_takes(empty_house: House, tmp_path: Path) -> None:
    house, traces = empty_house, {role: tmp_path / f"{role}.jsonl" for role in ("api", "workers")}
    house.start_api(PYTHONPATH=f"{TRACED}:{TREE}", TRACED_CALLS=str(traces["api"]))
    house.start("workers", PYTHONPATH=f"{TRACED}:{TREE}", TRACED_CALLS=str(traces["workers"]))
    house.wait_ready()
    chat = {"model": "sim", "stream": True, "max_tokens": 40, "messages": [{"role": "user", "content": "hi"}]}
    status, headers, _ = house.post("/v1/chat/completions", chat)
    assert status == 200
    api, worker, job = Trace(traces["api"]), Trace(traces["workers"]), headers["x-job-id"]
    connection = "streaming/redis/connection.py"
    way_in = [
        *api.first("api/stream/connection.py", ""),
        *api.first("penstock/loops.py", job),
        *api.first(connection, job, "penstock/loops.py")[1:],
        "streaming/lua/accept.lua",
    ]
    way_out = [
        *worker.first(connection, "penstock:api:", "workers/engines/"),
        "streaming/lua/run.lua",
        *api.first("api/stream/reply.py", "Delta"),
    ]
    for title, way in (("From the socket to the lane", way_in), ("From the engine to the socket", way_out)):
        assert drawn(title) == way
        assert len(set(way)) <= MAX_FILES and max(Counter(way).values()) <= MAX_ENTRIES
