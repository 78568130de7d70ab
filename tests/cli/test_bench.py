"""`penstock bench`: programs by name, imported when they are used and not before."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from cli.bench import PROGRAMS

LISTS = """
import sys
from cli.__main__ import main
assert main(["bench", "--help"]) == 0
heavy = [name for name in sys.modules if name.startswith(("bench.", "matplotlib", "redis", "uvloop"))]
assert heavy == [], heavy
"""


def test_the_list_of_programs_imports_none_of_them() -> None:
    done = subprocess.run([sys.executable, "-c", LISTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_is_there_and_says_what_it_takes(name: str, told: Any) -> None:
    assert find_spec(f"bench.{name}") is not None
    assert "--out" in told("bench", name, "--help").out
