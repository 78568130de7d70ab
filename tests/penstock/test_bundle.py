"""The import path of processes, in a checkout. tests/project/test_install.py looks at that of an installation."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from penstock import bundle

ROOT = str(Path(__file__).parents[2])


def test_in_a_checkout_the_packages_lie_beside_penstock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    before = list(sys.path)
    bundle.add_to_path()
    assert str(bundle.PACKAGES_DIR) == ROOT
    assert sys.path == before and "PYTHONPATH" not in os.environ


def test_the_packages_come_first_in_pythonpath_and_once() -> None:
    others = os.pathsep.join(["/one", ROOT, "/two"])
    assert bundle.python_path({}) == ROOT
    assert bundle.python_path({"PYTHONPATH": ""}) == ROOT
    assert bundle.python_path({"PYTHONPATH": others}) == os.pathsep.join([ROOT, "/one", "/two"])
