"""Whether a job goes on after the tokens of an earlier attempt, or begins again."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engine import Capabilities, ChatTurn, Sampling
from streaming.jobs.codec import Delta
from streaming.jobs.job import Chat, Job, Text
from streaming.order import Priority
from workers.claimer import job_restart_reason

CANNOT = Capabilities(json_schema=True)
CAN = Capabilities(json_schema=True, json_resume=True)


def a_job(prompts: int = 0, **sampling: Any) -> Job:
    prompt = Text(("a",) * prompts) if prompts else Chat((ChatTurn("user", "hi"),))
    return Job(id="j", model="m", tenant="t", priority=Priority.STANDARD, prompt=prompt, sampling=Sampling(**sampling))


def rows(*parts: tuple[int, str]) -> list[Delta]:
    """One token each: (choice, how it ended)."""
    return [Delta(1, seq, index, "x", (seq,), 1, finish) for seq, (index, finish) in enumerate(parts, 1)]


@pytest.mark.parametrize("schema", [{}, {"type": "object"}])
def test_json_that_was_begun_is_computed_again(schema: dict[str, Any]) -> None:
    """An engine that cannot restore its grammar would put a second JSON text into the first one."""
    assert job_restart_reason(a_job(json_schema=schema), CANNOT, rows((0, "")))
    assert not job_restart_reason(a_job(json_schema=schema), CAN, rows((0, "")))


def test_what_was_not_begun_or_is_not_constrained_goes_on() -> None:
    """Nothing is logged, or nothing is asked of the text."""
    assert not job_restart_reason(a_job(json_schema={}), CANNOT, [])
    assert not job_restart_reason(a_job(), CANNOT, rows((0, "")))


@pytest.mark.parametrize("job", [a_job(n=2, json_schema={}), a_job(prompts=2, json_schema={})])
def test_one_choice_in_the_middle_is_enough(job: Job) -> None:
    """Choices that ended, and such as were not begun, are no reason."""
    assert not job_restart_reason(job, CANNOT, rows((0, ""), (0, "stop")))
    assert not job_restart_reason(job, CANNOT, rows((0, "length"), (1, "stop")))
    assert job_restart_reason(job, CANNOT, rows((0, "stop"), (1, "")))


def test_a_text_of_full_length_is_complete() -> None:
    """Its last token was logged, its end was not."""
    job = a_job(json_schema={}, max_tokens=2)
    assert job_restart_reason(job, CANNOT, rows((0, "")))
    assert not job_restart_reason(job, CANNOT, rows((0, ""), (0, "")))
