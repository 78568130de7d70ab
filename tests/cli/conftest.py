"""Commands that run in the process of their test."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import pytest

from cli.__main__ import main


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs a command that ends with this exit code (None: with any), and returns what it has written on stdout and on
    stderr. The first of its words may be several."""

    def run(words: str = "", *more: str, code: int | None = 0) -> Any:
        capsys.readouterr()
        found = main([*shlex.split(words), *more])
        shown = capsys.readouterr()
        assert code in (found, None), shown
        return shown

    return run
