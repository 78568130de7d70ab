"""Held jobs by themselves: which of them log their deltas again, and which not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from workers.held_jobs import HeldJobs


def an_attempt(name: str, partition: int, **changes: bool) -> Any:
    """Of a job whose run began with the first frame of the log."""
    fields: dict[str, object] = {
        "job": SimpleNamespace(id=name), "partition": partition, "first_frame": 1, "seq": 4, "opening": None,
        "number": 1, "own": [], "checkpointing": False, "over": False,
    }  # fmt: skip
    return SimpleNamespace(**fields | changes)


def test_a_job_logs_its_deltas_again_in_its_own_partition_once_and_while_it_runs() -> None:
    """Not in the log of another partition, not while that is being written already, and not when it is over."""
    lease: Any = SimpleNamespace(next_frame=lambda _partition: 101)
    held, written, sent = HeldJobs(lease), list[Any](), list[int]()

    def checkpoint(attempt: Any) -> None:
        attempt.checkpointing = True
        written.append(attempt)

    writer: Any = SimpleNamespace(checkpoint=checkpoint, send=lambda: sent.append(len(written)))
    attempts = (
        an_attempt("long", 0),
        an_attempt("elsewhere", 1),
        an_attempt("under way", 0, checkpointing=True),
        an_attempt("over", 0, over=True),
    )
    held.attempts = {attempt.job.id: attempt for attempt in attempts}
    held.checkpoint(0, writer, at_least=101)
    assert (written, sent) == ([], [0]), "its log is not long enough yet"
    held.checkpoint(0, writer, at_least=100)
    held.checkpoint(0, writer, at_least=100)
    assert [attempt.job.id for attempt in written] == ["long"] and sent == [0, 1, 1]
    held.checkpoint(1, writer, at_least=100)
    assert [attempt.job.id for attempt in written] == ["long", "elsewhere"]
