"""Messages of `penstock up` about processes that keep ending."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.child import Child, Program, Status
from cli.screen import crash_loop


@pytest.mark.parametrize(
    ("cause", "message", "shown", "step"),
    [
        (
            "killed by SIGKILL, running only job_1: penstock dlq show job_1",
            "worker-1 died 3 times in a row, the last time running only job job_1",
            "killed by SIGKILL",
            "penstock dlq show job_1;",
        ),
        ("exit 2: no weights", "worker-1 ended 3 times in a row", "exit 2: no weights", "penstock doctor;"),
    ],
)
def test_a_crash_loop_is_the_jobs_where_one_is_known(
    cause: str, message: str, shown: str, step: str, tmp_path: Path
) -> None:
    """A worker that came up and died of its job did come up: the next step is that job's dead letter."""
    program = Program(role="worker", id="worker-1", argv=(), log=tmp_path / "worker-1.log", env={})
    child = Child(program, lambda _child: None)
    child.status = Status(state="restarting", failures=3, cause=cause)
    problem = crash_loop(child)
    assert (str(problem), problem.cause) == (message, shown)
    assert problem.next_step.startswith(step) and str(program.log) in problem.next_step
