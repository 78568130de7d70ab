"""A row of the fault kit with one fault, for tests that play a history into it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.chaos.stage import FaultRow, FaultTestbed


async def _nothing(_: FaultTestbed) -> None:
    pass


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[FaultTestbed]:
    stage = FaultTestbed(FaultRow("F00", "none", "nothing", 2, _nothing, 10), tmp_path / "F00")
    yield stage
    stage.history.close()
