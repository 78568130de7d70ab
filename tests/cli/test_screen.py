"""Messages of `penstock up` about processes that keep ending."""

from __future__ import annotations

import io
from pathlib import Path

from msgspec.structs import replace

from cli.output import ProgressLine
from cli.supervisor import Child, Program, counts_after
from cli.up import Screen


def test_a_death_is_reported_once_it_is_known_what_the_worker_ran(tmp_path: Path) -> None:
    """Jobs that were given up with it each time, a crash loop once; neither while that is unknown."""
    program = Program(role="worker", id="worker-1", argv=(), log=tmp_path / "worker-1.log", env={})
    child, stream = Child(program, lambda _child: None), io.StringIO()
    screen = Screen(ProgressLine(stream, {}))

    def says(given_up: list[str], failures: int) -> list[str]:
        before, cause = len(stream.getvalue()), "killed by SIGKILL"
        child.status = replace(child.status, state="restarting", alike=failures, was_ready=True, cause=cause)
        screen.noticed(child, starting=False, releasing=True)
        assert "error" not in stream.getvalue()[before:]
        screen.released(child, given_up, starting=False)
        return stream.getvalue()[before:].splitlines()

    assert [line[9:] for line in says([], 2)] == ["worker-1 ended (killed by SIGKILL); starting it again"]
    message, cause, step = says(["job_1"], 3)
    assert message == "error: worker-1 died running job_1, which is a dead letter now"
    assert "killed by SIGKILL (" in cause and step.startswith("next:  penstock dlq show job_1;")
    assert says(["job_1", "job_2"], 4)[0] == "error: worker-1 died running job_1, job_2, which are dead letters now"
    assert says([], 5) == []
    child.status = replace(child.status, state="ready")
    screen.noticed(child, starting=False)
    assert says([], 6)[0] == "error: worker-1 ended 6 times, each soon after its start"


def test_each_kind_of_crash_loop_is_reported_once_with_its_own_cause(tmp_path: Path) -> None:
    """A worker that was killed, and whose engine then does not start: the report must not stay with the kills. The
    figures in a cause, such as an address, make no other kind."""
    program = Program(role="worker", id="worker-1", argv=(), log=tmp_path / "worker-1.log", env={})
    child, stream = Child(program, lambda _child: None), io.StringIO()
    screen = Screen(ProgressLine(stream, {}))

    def says(cause: str, *, was_ready: bool = False) -> list[str]:
        before = len(stream.getvalue())
        counts = counts_after(child.status, was_ready=was_ready, ran_s=1.0)
        child.status = replace(child.status, state="restarting", cause=cause, **counts)
        screen.noticed(child, starting=False)
        return [line.partition(" (")[0] for line in stream.getvalue()[before:].splitlines()[:2]]

    kills = [says("killed by SIGKILL", was_ready=True) for _ in range(3)]
    assert [line[9:] for line in kills[0] + kills[1]] == ["worker-1 ended"] * 2, "each one, until it is a loop"
    assert kills[2:] == [["error: worker-1 ended 3 times, each soon after its start", "cause: killed by SIGKILL"]]
    first, *more = [says(f"no device at 0x{number}f") for number in range(4)]
    assert first[0].endswith(" worker-1 ended")
    assert more == [[], ["error: worker-1 did not start 3 times in a row", "cause: no device at 0x2f"], []]
    assert says("no weights") == ["error: worker-1 did not start 5 times in a row", "cause: no weights"]


def test_who_comes_back_is_told_with_the_time_that_it_took(tmp_path: Path) -> None:
    """Once for each loss that was told, and never at the first start."""
    program = Program(role="api", id="api-1", argv=(), log=tmp_path / "api-1.log", env={})
    child, screen = Child(program, lambda _child: None), Screen(ProgressLine(io.StringIO(), {}))

    def recovered(state: str, **changes: object) -> str:
        child.status = replace(child.status, state=state, **changes)
        return screen.noticed(child, starting=False)

    assert recovered("ready", pid=1) == ""
    for _ in range(2):
        counts = counts_after(child.status, was_ready=True, ran_s=1.0)
        assert recovered("restarting", pid=None, cause="killed by SIGKILL", **counts) == ""
        assert recovered("starting", pid=2) == ""
        assert recovered("ready", pid=2).startswith("api-1 is ready again after 0.")
        assert recovered("ready", pid=2) == ""


def test_what_is_waited_for_is_told_when_it_goes_and_when_it_is_back(tmp_path: Path) -> None:
    """A worker's server; each once."""
    program = Program(role="worker", id="worker-1", argv=(), log=tmp_path / "worker-1.log", env={})
    child, stream = Child(program, lambda _child: None), io.StringIO()
    screen = Screen(ProgressLine(stream, {}))
    for away in ("", "http://a refuses", "http://a refuses", "", ""):
        child.status = replace(child.status, state="ready", away=away)
        assert screen.noticed(child, starting=False) == ""
    gone, back = stream.getvalue().splitlines()
    assert "worker-1 is away (http://a refuses)" in gone and "worker-1 is back after 0." in back
