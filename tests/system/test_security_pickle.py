"""No process of ours unpickles anything while it serves: a trap is set in each, and a control shows that it snaps."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from batching import begin, client, ended, line
from house import House, serving

pytestmark = pytest.mark.slow

TRAP = """
import os, pickle, sys

def snap(what):
    with open({marker!r}, "a") as file:
        file.write(f"{{sys.orig_argv}}: {{what}}\\n")

def hook(event, args):
    if event == "pickle.find_class":  # raised by every unpickler, in C and in Python, that makes an object
        snap(args)

sys.addaudithook(hook)

def trapped(name, real):
    def call(*args, **rest):
        snap(name)
        return real(*args, **rest)
    return call

for name in ("load", "loads"):
    setattr(pickle, name, trapped(name, getattr(pickle, name)))
"""


@pytest.fixture
def trapped(tmp_path: Path) -> Iterator[tuple[House, Path]]:
    """One process of each role with the trap set, and the file it writes to."""
    marker, folder = tmp_path / "unpickled", tmp_path / "trap"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(TRAP.format(marker=str(marker)))
    paths = f"{folder}:{Path(__file__).parents[2]}"
    with serving(tmp_path, "workers", "offline", "scheduler", PYTHONPATH=paths) as house:
        yield house, marker


def test_nothing_is_unpickled_while_it_serves(trapped: tuple[House, Path]) -> None:
    """A chat, a stream, JSON held to a schema, a job and a batch, through every role."""
    house, marker = trapped
    chat = {"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    for more in ({}, {"stream": True}, {"response_format": schema}):
        assert house.post("/v1/chat/completions", chat | more)[0] < 500
    job = json.loads(house.post("/v1/jobs", chat)[2])["id"]
    assert json.loads(house.get(f"/v1/jobs/{job}?wait=30")[1])["status"] == "completed"
    openai = client(house)
    assert ended(openai, begin(openai, [line(0), line(1)])).status == "completed"
    assert not marker.exists(), marker.read_text()
    for code in (
        "import pickle; pickle.loads(pickle.dumps(1))",
        "import _pickle, pickle; _pickle.loads(pickle.dumps(print))",
    ):
        subprocess.run([sys.executable, "-c", code], env=house.environ, check=True)
    assert len(marker.read_text().splitlines()) == 2
