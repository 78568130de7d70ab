"""Prompts of a job: picks the prompt of each of its choices, and makes the requests that the engine checks. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from penstock.engine import ChatTurn, Input, Request
from streaming.jobs.job import Chat, Inputs, Job, Text, prompt_count


def prompt_of(job: Job, number: int) -> Sequence[ChatTurn] | str | Sequence[int]:
    """The job's prompt with this index; that of a group of inputs is empty."""
    prompt = job.prompt
    if isinstance(prompt, Inputs):
        return ""
    if isinstance(prompt, Chat):
        return prompt.turns if job.response is None else merged_calls(prompt.turns)
    return prompt.texts[number] if isinstance(prompt, Text) else prompt.ids[number]


def inputs_of(job: Job, number: int) -> Sequence[Input]:
    """The job's group of inputs with this index; a prompt has none."""
    return job.prompt.groups[number] if isinstance(job.prompt, Inputs) else ()


def merged_calls(turns: Sequence[ChatTurn]) -> Sequence[ChatTurn]:
    """Turns in which the calls of one answer, which the Responses API has as items of their own, are one turn."""
    merged: list[ChatTurn] = []
    for turn in turns:
        if turn.calls and not turn.content and merged and merged[-1].role == turn.role == "assistant":
            extras = turn.extras | merged[-1].extras
            merged[-1] = replace(merged[-1], calls=merged[-1].calls + turn.calls, extras=extras)
        else:
            merged.append(turn)
    return merged


def samples(job: Job) -> Iterator[Request]:
    """One request for each prompt of the job, for `Engine.check`."""
    sampling = replace(job.sampling, n=1)
    for number in range(prompt_count(job.prompt)):
        yield Request(
            f"{job.id}/{number}",
            prompt_of(job, number),
            sampling,
            (),
            job.tenant,
            tools=job.tools,
            reasoning=job.reasoning,
            task=job.task,
            inputs=inputs_of(job, number),
            passed=job.passed,
        )
