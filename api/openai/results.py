"""Result: the answer of a completed job, in the form of the endpoint that the job came through."""

from __future__ import annotations

from typing import Any

from api.openai.job_errors import from_terminal
from api.openai.rendering import Facts, completion_in_slices
from api.openai.responses.answer_items import given_up
from api.openai.responses.object import ResponseFacts, ended_response
from api.openai.tasks.answers import task_answer_in_slices
from penstock.loops import Sliced, at_once
from streaming.jobs.job import JobState
from streaming.jobs.records import JobRecord


def result_in_slices(facts: Facts, record: JobRecord) -> Sliced[dict[str, Any]]:
    """Render the result of a job that has ended, whose record holds the deltas, in slices of a few milliseconds.

    Raises ApiError for a job that did not complete.
    """
    assert record.terminal is not None
    if record.terminal.state is not JobState.COMPLETED:
        raise from_terminal(record.terminal)
    if record.job.task is not None:
        return task_answer_in_slices(record.job, record.terminal, record.terminal.rows)
    if record.job.response is None:
        return completion_in_slices(facts, record.terminal, record.terminal.rows)
    response = ResponseFacts(record.job, record.created_ms)
    return ended_response(response, record.terminal, record.terminal.rows, given_up(record.job, record.drafts))


def result(record: JobRecord) -> dict[str, Any]:
    """Like `result_in_slices`, at once."""
    return at_once(result_in_slices(Facts.of(record.job, record.created_ms), record))
