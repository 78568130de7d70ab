"""docs/walk.md says of every file what it is for."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("api", "workers", "scheduler", "offline", "streaming")


def named(room: str, page: str) -> list[str]:
    """File names and patterns in the part of the page that begins with the room's name in bold."""
    begin = page.index(f"**`{room}/`**")
    end = page.find("\n**`", begin + 1)
    return re.findall(r"`([\w*]+\.(?:py|lua))`", page[begin:end])


@pytest.mark.parametrize("room", ROOMS)
def test_the_walk_names_every_file_of_a_room(room: str) -> None:
    """Each in its room's part, and no file that is gone."""
    names = named(room, (ROOT / "docs" / "walk.md").read_text(encoding="utf-8"))
    files = {path.name for path in (ROOT / room).glob("*.py")} - {"__init__.py"}
    files |= {path.name for path in (ROOT / room / "lua").glob("*.lua")}
    assert [file for file in sorted(files) if not any(fnmatch(file, name) for name in names)] == []
    assert [name for name in names if not any(fnmatch(file, name) for file in files)] == []
