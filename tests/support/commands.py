"""What pages tell people to type: the commands of a page, and a house that answers them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from house import ADMIN_TOKEN, House, serving

ROOT = Path(__file__).parents[2]
MODEL = "smollm2-135m-instruct"


def blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands(path: Path) -> list[str]:
    """Every line behind a prompt, without its comment."""
    lines = [line for block in blocks(path, "console") for line in block.splitlines() if line.startswith("$ ")]
    return [re.sub(r"\s{2,}# .*", "", line[2:]) for line in lines]


@contextmanager
def served_by(folder: Path, *roles: str, **environ: str) -> Iterator[House]:
    """The README's model name, with a simulated engine behind it."""
    (folder / "penstock.toml").write_text(f'[models."{MODEL}"]\nengine = "sim"\n')
    environ = {"PENSTOCK_RECORDS_DIR": str(folder / "records"), **environ}  # `penstock up` would have set it
    with serving(folder, *roles, **environ) as house:
        yield house


def curl(house: House, command: str) -> tuple[int, str]:
    """The few flags of curl that the pages use."""
    words = shlex.split(command)[1:]
    url = next(word for word in words if word.startswith("http"))
    data = words[words.index("-d") + 1] if "-d" in words else None
    headers = dict(words[at + 1].split(": ", 1) for at, word in enumerate(words) if word == "-H")
    path = url.replace("http://127.0.0.1:8000", "")
    status, _, body = house.request("POST" if data else "GET", path, data.encode() if data else None, headers)
    return status, body.decode()


def penstock(house: House, line: str) -> str:
    """A line that begins with `penstock`, run to its end. Returns what it wrote on stdout; one that fails, or says
    nothing, is an error."""
    environ = {**os.environ, **house.environ, "PENSTOCK_API_PORT": str(house.port)}
    # `penstock up` would have put the token, and the address that may learn it, where the commands find them.
    environ |= {"PENSTOCK_API_KEY": ADMIN_TOKEN, "PENSTOCK_URL": house.url}
    command = [sys.executable, "-m", "cli", *shlex.split(line)[1:]]
    done = subprocess.run(
        command, env=environ, cwd=house.folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0 and done.stdout + done.stderr, (line, done.stderr)
    return done.stdout
