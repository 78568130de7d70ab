"""Messages of `penstock up` about processes that keep ending."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from cli.child import Child, Program, Status
from cli.job_deaths import Suspicion
from cli.progress import ProgressLine
from cli.screen import Screen, crash_loop


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


def test_a_death_is_reported_once_it_is_known_what_the_worker_ran(tmp_path: Path) -> None:
    """A job that is suspected each time, a crash loop once; none of them while it is unknown which one it is."""
    program = Program(role="worker", id="worker-1", argv=(), log=tmp_path / "worker-1.log", env={})
    child, stream = Child(program, lambda _child: None), io.StringIO()
    screen = Screen(ProgressLine(stream, {}))

    def says(suspicion: Suspicion | None, failures: int) -> list[str]:
        before = len(stream.getvalue())
        child.status = Status(state="restarting", failures=failures, cause="killed by SIGKILL")
        screen.noticed(child, starting=False, releasing=True)
        assert len(stream.getvalue()) == before
        screen.released(child, suspicion, starting=False)
        return stream.getvalue()[before:].splitlines()

    assert says(None, 2) == []
    message, cause, _ = says(Suspicion(("job_1",), {"worker-1": 3}), 3)
    assert message == "error: worker-1 died 3 times running job job_1" and "killed by SIGKILL (" in cause
    message, _, step = says(Suspicion(("job_1",), {"worker-1": 4}, given_up=True), 4)
    assert message == "error: worker-1 died 4 times running job job_1; it is a dead letter now"
    assert step.startswith("next:  penstock dlq show job_1;")
    assert says(None, 5) == []
    child.status = Status(state="ready", failures=5)
    screen.noticed(child, starting=False)
    assert says(None, 6)[0] == "error: worker-1 ended 6 times in a row"
