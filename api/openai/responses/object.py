"""Response object: a job of the Responses API as its owner sees it, with every field that the standard requires."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from api.openai.job_errors import from_terminal
from api.openai.logprobs import token_logprobs
from api.openai.rendering import TIER
from api.openai.responses.answer_items import answer_output
from api.openai.responses.ids import output_item_id, response_id
from api.openai.responses.items import output_item, output_text, refusal_part
from penstock.engine import Logprob
from penstock.loops import ROWS_PER_SLICE, Sliced
from streaming.jobs.codec import Delta, Terminal, Usage
from streaming.jobs.job import Chat, Job, JobState, ResponseForm

Status: TypeAlias = Literal["queued", "in_progress", "completed", "failed", "cancelled", "incomplete"]

RUNNING: dict[JobState, Status] = {JobState.QUEUED: "queued", JobState.RUNNING: "in_progress"}


class Outcome(NamedTuple):
    """How a response ended."""

    status: Status
    incomplete: dict[str, str] | None = None
    """`incomplete_details`."""
    error: dict[str, str] | None = None


def outcome(terminal: Terminal) -> Outcome:
    """Return how the response of a job ended."""
    match terminal.state:
        case JobState.COMPLETED if "content_filter" in terminal.finishes:
            return Outcome("incomplete", {"reason": "content_filter"})
        case JobState.COMPLETED if "length" in terminal.finishes:
            return Outcome("incomplete", {"reason": "max_output_tokens"})
        case JobState.COMPLETED:
            return Outcome("completed")
        case JobState.CANCELLED:
            return Outcome("cancelled")
        case _:
            failure = from_terminal(terminal)
            return Outcome("failed", error=error_object(failure.status, failure.message))


def error_object(status: int, message: str) -> dict[str, str]:
    """Return the `error` of a failed response: the standard has one code for the request's faults, one for others."""
    return {"code": "invalid_prompt" if status in (400, 413, 422) else "server_error", "message": message}


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


class ResponseFacts(msgspec.Struct, frozen=True):
    """What is constant in every rendering of one response. `created_ms` is Redis time."""

    job: Job
    created_ms: int

    @property
    def form(self) -> ResponseForm:
        return self.job.response or ResponseForm()

    def item_id(self, output_index: int) -> str:
        return output_item_id(self.job.id, output_index)

    def object(
        self,
        status: Status,
        *,
        output: Sequence[Any] = (),
        terminal: Terminal | None = None,
        ended: Outcome | None = None,
    ) -> dict[str, Any]:
        """Render the object; once the response has ended, with its `terminal` and how it `ended`."""
        job, form, sampling = self.job, self.form, self.job.sampling
        turns = job.prompt.turns if isinstance(job.prompt, Chat) else ()
        done_ms = terminal.last_ms if terminal is not None and status == "completed" else 0
        return {
            "id": response_id(job.id),
            "object": "response",
            "created_at": self.created_ms // 1000,
            "conversation": {"id": form.conversation} if form.conversation else None,
            "completed_at": done_ms // 1000 or None,
            "status": status,
            "background": form.background,
            "error": ended.error if ended else None,
            "incomplete_details": ended.incomplete if ended else None,
            "instructions": turns[0].content if form.instructed and turns else None,
            "max_output_tokens": sampling.max_tokens,
            "max_tool_calls": form.max_tool_calls,
            "model": job.model,
            "output": output,
            "parallel_tool_calls": form.parallel_tool_calls,
            "previous_response_id": response_id(form.previous) if form.previous else None,
            "presence_penalty": sampling.presence_penalty or 0.0,
            "frequency_penalty": sampling.frequency_penalty or 0.0,
            "prompt_cache_key": form.prompt_cache_key,
            "reasoning": {"effort": None if job.reasoning in ("", "default") else job.reasoning, "summary": None},
            "safety_identifier": form.safety_identifier,
            "service_tier": TIER[job.priority],
            "store": form.store,
            "temperature": 1.0 if sampling.temperature is None else sampling.temperature,
            "text": {"format": form.format or {"type": "text"}, "verbosity": "medium"},
            "tool_choice": form.tool_choice,
            "tools": form.tools,
            "top_logprobs": form.top_logprobs,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "truncation": "disabled",
            "usage": usage_object(terminal.usage) if terminal else None,
            "user": job.user,
            "metadata": job.metadata if form.metadata is None else form.metadata,
            **({"served_by": terminal.served_by[0]} if terminal is not None and terminal.served_by else {}),
            **({"cancelled_by": terminal.cancelled_by} if terminal is not None and terminal.cancelled_by else {}),
        }


def ended_response(
    facts: ResponseFacts, terminal: Terminal, rows: Sequence[Delta], output_index: int = 0
) -> Sliced[dict[str, Any]]:
    """Render a response that has ended, in slices of `ROWS_PER_SLICE` deltas; `output_index` of its answer is the
    number of texts that were given up before it."""
    ended = outcome(terminal)
    if facts.job.parted:
        output = answer_output(facts.job.id, rows, output_index, completed=ended.status == "completed")
        return facts.object(ended.status, output=output, terminal=terminal, ended=ended)
    texts: list[str] = []
    refusals: list[str] = []
    logprobs: list[Logprob] = []
    for first in range(0, len(rows), ROWS_PER_SLICE):
        if first:
            yield
        for row in rows[first : first + ROWS_PER_SLICE]:
            texts.append(row.text)
            logprobs.extend(row.logprobs)
            if row.extras and isinstance(said := row.extras.get("delta", {}).get("refusal"), str):
                refusals.append(said)
    text, refused, output = "".join(texts), "".join(refusals), list[dict[str, Any]]()
    if text or refused or terminal.state is JobState.COMPLETED:
        parts = [output_text(text, token_logprobs(logprobs))] if text or not refused else []
        parts += [refusal_part(refused)] if refused else []
        status = "completed" if ended.status == "completed" else "incomplete"
        output.append(output_item(facts.item_id(output_index), status, parts))
    return facts.object(ended.status, output=output, terminal=terminal, ended=ended)
