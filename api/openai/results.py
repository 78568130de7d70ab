"""Result: the answer and the input of a job, in the form of the endpoint that the job came through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from api.openai.errors import from_terminal
from api.openai.rendering import Facts, completion_in_slices
from api.openai.responses.items import sent_items
from api.openai.responses.object import ended_response
from api.openai.tasks import task_answer_in_slices
from penstock.engine import Sampling, Task
from penstock.loops import Sliced, at_once
from penstock.tools import Tools
from streaming.jobs.codec import Delta, Terminal
from streaming.jobs.job import Chat, Inputs, Job, JobState, ResponseForm, TaskForm, Text, Tokens
from streaming.jobs.records import JobRecord


def answer_in_slices(
    facts: Facts, terminal: Terminal, rows: Sequence[Delta], drafts: Sequence[bytes] = ()
) -> Sliced[dict[str, Any]]:
    """Render the answer of a job that has ended, in slices of a few milliseconds. `drafts`: the texts of a response
    that were given up before it.

    Raises ApiError for a job that did not complete.
    """
    if terminal.state is not JobState.COMPLETED:
        raise from_terminal(terminal)
    if facts.job.task is not None:
        return task_answer_in_slices(facts.job, terminal, rows)
    if facts.job.response is None:
        return completion_in_slices(facts, terminal, rows)
    return ended_response(facts, terminal, rows, drafts)


def result(record: JobRecord) -> dict[str, Any]:
    """Render the answer of a job that has ended at once, given its record with the deltas. Raises ApiError."""
    assert record.terminal is not None
    facts = Facts(record.job, record.created_ms)
    return at_once(answer_in_slices(facts, record.terminal, record.terminal.rows, record.drafts))


SAME = (
    *("max_tokens", "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty"),
    *("top_k", "min_p", "repetition_penalty"),
)
"""Fields of a request that a job keeps under the same name."""
NEWER_LIMIT = "max_completion_tokens"


def input_object(job: Job) -> dict[str, Any]:
    """Render a job's request. Fields without effect, and those left at their defaults, are not kept."""
    if job.response is not None:
        return _response_input(job, job.response)
    found: dict[str, Any] = {"endpoint": job.endpoint.path, "model": job.model, **_prompt(job)}
    found |= _generation(job) if job.task is None else _task_options(job.task, job.task_form)
    found |= _tools(job.tools) | _kept(job) | _passed(job)
    return {name: value for name, value in found.items() if name != "max_tokens" or NEWER_LIMIT not in found}


def _prompt(job: Job) -> dict[str, Any]:
    match job.prompt:
        case Chat(turns):
            return {"messages": [turn.shown for turn in turns]}
        case Text(texts):
            return {"prompt": list(texts) if len(texts) > 1 else texts[0]}
        case Tokens(ids):
            return {"tokens": list(ids[0])} if job.task is not None else {"prompt": [list(each) for each in ids]}
        case Inputs(groups) if job.task is not None and job.task.kind == "rerank":
            return {"query": groups[0][0], "documents": [each for group in groups for each in group[1:]]}
        case Inputs(groups):
            return {"input": [each if isinstance(each, str) else list(each) for group in groups for each in group]}


def _generation(job: Job) -> dict[str, Any]:
    """Render what a chat or a completion asks for."""
    sampling, found = job.sampling, _sampling(job.sampling)
    if sampling.n > 1:
        found["n"] = sampling.n
    if sampling.stop:
        found["stop"] = list(sampling.stop)
    if sampling.logprobs is not None and isinstance(job.prompt, Chat):
        found |= {"logprobs": True, "top_logprobs": sampling.logprobs}
    elif sampling.logprobs is not None:
        found["logprobs"] = sampling.logprobs
    if sampling.json_schema is not None:
        found["response_format"] = _response_format(sampling.json_schema, job.passed.get("response_format", {}))
    if job.reasoning not in ("", "default"):
        found["reasoning_effort"] = job.reasoning
    return found | ({"echo": True} if job.echo else {})


def _task_options(task: Task, form: TaskForm) -> dict[str, Any]:
    options = {
        "dimensions": task.dimensions,
        "encoding_format": "base64" if form.base64 else None,
        "top_n": form.top_n,
        "return_documents": form.documents or None,
        "add_special_tokens": None if task.special_tokens else False,
        "add_generation_prompt": None if task.generation_prompt else False,
    }
    return {name: value for name, value in options.items() if value is not None}


def _sampling(sampling: Sampling) -> dict[str, Any]:
    """Render the fields that every generated answer has."""
    found = {name: value for name in SAME if (value := getattr(sampling, name)) is not None}
    if sampling.logit_bias:
        found["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    return found | ({"ignore_eos": True} if sampling.ignore_eos else {})


def _passed(job: Job) -> dict[str, Any]:
    """Render the fields that the job has for its model's server. Those of a schema are in the format."""
    return {name: value for name, value in job.passed.items() if name not in ("response_format", "metadata")}


def _tools(tools: Tools | None) -> dict[str, Any]:
    if tools is None:
        return {}
    named = {"type": "function", "function": {"name": tools.named}} if tools.named else tools.choice
    found: dict[str, Any] = {"tools": [tool.shown for tool in tools.offered], "tool_choice": named}
    return found if tools.parallel else found | {"parallel_tool_calls": False}


def _kept(job: Job) -> dict[str, Any]:
    """Render what every endpoint takes beside prompt and sampling."""
    user = {} if job.user is None else {"user": job.user}
    queue = {"priority": job.priority.value, "deadline_ms": job.deadline_ms, "max_queue_ms": job.max_queue_ms}
    return user | {"queue": {name: value for name, value in queue.items() if value is not None}}


def _response_input(job: Job, form: ResponseForm) -> dict[str, Any]:
    """Render the request of a response, with the turns of the responses that it continues."""
    turns = job.prompt.turns if isinstance(job.prompt, Chat) else ()
    found: dict[str, Any] = {"endpoint": "/v1/responses", "model": job.model}
    if form.instructed:
        found["instructions"] = turns[0].content
    found["input"] = [item for turn in turns[1 if form.instructed else 0 :] for item in sent_items(turn)]
    sampling = job.sampling
    found |= {
        name if name != "max_tokens" else "max_output_tokens": value for name, value in _sampling(sampling).items()
    }
    if job.reasoning not in ("", "default"):
        found["reasoning"] = {"effort": job.reasoning}
    if form.tools:
        found |= {"tools": form.tools, "tool_choice": form.tool_choice}
    if form.tools and not form.parallel_tool_calls:
        found["parallel_tool_calls"] = False
    if form.format:
        found["text"] = {"format": form.format}
    if sampling.logprobs is not None:
        found |= {"include": ["message.output_text.logprobs"], "top_logprobs": form.top_logprobs}
    if form.background:
        found["background"] = True
    if not form.store:
        found["store"] = False
    in_place = ("reasoning_effort", "verbosity")
    return found | _kept(job) | {name: value for name, value in _passed(job).items() if name not in in_place}


def _response_format(schema: dict[str, Any], named: dict[str, Any]) -> dict[str, Any]:
    if not schema:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "schema", **named, "schema": schema}}
