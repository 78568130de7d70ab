"""A plugin of pytest: coverage notes which test ran a line, and a file says how long each test took that passed.

Processes that a test starts are named after it too: coverage reads their context from what pytest puts into the
environment (`RC` in `bench/mutants/reach.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from coverage import Coverage

TIMES = "SUITE_TIMES"
"""Variable that names the file of the times; one that begins with PENSTOCK_ would be taken for a setting."""


class Times:
    """Seconds by test, of all its phases; of those that passed, for a test that fails anyway notices nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if not report.passed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        passed = {test: seconds for test, seconds in self._seconds.items() if test not in self._failed}
        self._path.write_bytes(msgspec.json.encode(passed))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if (measured := Coverage.current()) is not None:
        measured.switch_context(item.nodeid)
    return (yield)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and (path := os.environ.get(TIMES)):  # one process hears of all tests
        config.pluginmanager.register(Times(Path(path)))
