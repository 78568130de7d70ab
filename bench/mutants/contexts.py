"""A plugin of pytest: coverage notes which test ran a line, and a file says how long each took, and which failed.

Processes that a test starts are named after it too: coverage reads their context from what pytest puts into the
environment (`RC` in `reach.py`).
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


class TimesFile(msgspec.Struct):
    """What the file says."""

    seconds: dict[str, float] = {}
    """Of all phases of a test."""
    failed: set[str] = set()
    """A test that fails anyway notices nothing."""


class TimesPlugin:
    """Writes it when all is done."""

    def __init__(self, path: Path) -> None:
        self._path, self._told = path, TimesFile()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        told = self._told
        told.seconds[report.nodeid] = told.seconds.get(report.nodeid, 0.0) + report.duration
        if not report.passed:
            told.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._path.write_bytes(msgspec.json.encode(self._told))


def passed(path: Path) -> dict[str, float]:
    """Seconds by test. Raises FileNotFoundError."""
    told = msgspec.json.decode(path.read_bytes(), type=TimesFile)
    return {test: seconds for test, seconds in told.seconds.items() if test not in told.failed}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if (measured := Coverage.current()) is not None:
        measured.switch_context(item.nodeid)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """What a test file runs as it is imported is noted under its name."""
    if (measured := Coverage.current()) is not None and isinstance(collector, pytest.Module):
        measured.switch_context(collector.nodeid)
    return (yield)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and (path := os.environ.get(TIMES)):  # one process hears of all tests
        config.pluginmanager.register(TimesPlugin(Path(path)))
