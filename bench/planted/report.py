"""Trials for people and for programs."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.markup import escape
from rich.table import Table

from bench.planted.trial import TIMED_OUT, BugTrial, SuiteRun
from bench.report import MachineInfo, cores


def table(trials: Sequence[BugTrial], seconds: float) -> Table:
    """One row per bug."""
    missed = sum(not trial.caught for trial in trials)
    view = Table(title=f"{len(trials)} planted bugs, {missed} missed, {seconds:.0f} s on {cores()} cores")
    view.add_column("bug")
    view.add_column("caught by")
    view.add_column("s", justify="right")
    view.add_column("", no_wrap=True)
    for trial in trials:
        verdict = "[green]caught[/]" if trial.caught else "[red]MISSED[/]"
        view.add_row(trial.bug.name, escape(_test(trial) or why_missed(trial)), f"{trial.run.seconds:.1f}", verdict)
    return view


def why_missed(trial: BugTrial) -> str:
    """Why a run counts as having noticed nothing."""
    if trial.run.code == 0:
        return f"its tests pass{unsure(trial.run)}"
    if trial.run.code == TIMED_OUT:
        return trial.run.output
    return f"pytest ended with {trial.run.code} and no test failed"


def unsure(run: SuiteRun) -> str:
    """What is added where tests had to be left out."""
    return f"; {len(run.unsure)} left out as unsure" if run.unsure else ""


def as_document(trials: Sequence[BugTrial], seconds: float) -> dict[str, Any]:
    """The same for programs; nothing of this machine but its size."""
    return {
        **msgspec.to_builtins(MachineInfo()),
        "seconds": round(seconds),
        "passed": all(trial.caught for trial in trials),
        "bugs": [_row(trial) for trial in trials],
    }


def _row(trial: BugTrial) -> dict[str, Any]:
    return {
        "name": trial.bug.name,
        "breaks": trial.bug.breaks,
        "files": sorted({edit.file for edit in trial.bug.edits}),
        "caught": trial.caught,
        "by": _test(trial),
        "tests": f"{len(trial.chosen.tests)} of {trial.chosen.covering}" if trial.chosen.covering else "named with it",
        "said": _without_folders(trial.run.failure[1] if trial.run.failure else why_missed(trial)),
        "seconds": round(trial.run.seconds, 1),
    }


def _test(trial: BugTrial) -> str:
    """File and test, without the folder."""
    return trial.run.failure[0].removeprefix("tests/") if trial.run.failure else ""


def _without_folders(text: str) -> str:
    """Where a file lies on this machine says nothing about a bug: its name alone is kept."""
    tops = {Path(folder).parts[1] for folder in (sys.prefix, tempfile.gettempdir(), Path.home())}
    return re.sub(rf"/(?:{'|'.join(map(re.escape, tops))})/(?:[^\s'\"/]+/)*", "…/", text)
