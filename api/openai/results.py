"""Results: the answer and the input of a job, in the form of the endpoint that the job came through."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from api.anthropic.answer import message_in_slices
from api.anthropic.request import sent_fields
from api.openai.errors import from_terminal
from api.openai.rendering import Facts, completion_in_slices
from api.openai.responses.items import sent_items
from api.openai.responses.object import ended_response
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
    if facts.job.message is not None:
        return message_in_slices(facts, terminal, rows)
    if facts.job.response is None:
        return completion_in_slices(facts, terminal, rows)
    return ended_response(facts, terminal, rows, drafts)


def result(record: JobRecord) -> dict[str, Any]:
    """Render the answer of a job that has ended at once, given its record with the deltas. Raises ApiError."""
    assert record.terminal is not None
    facts = Facts(record.job, record.created_ms)
    return at_once(answer_in_slices(facts, record.terminal, record.terminal.rows, record.drafts))


# --- answers of tasks ------------------------------------------------------------------------------------------------

NUMBERS_PER_SLICE = 8192
"""Numbers rendered in one slice: some milliseconds."""
FLOAT32_DIGITS = 9
"""Decimal digits that tell any float32 from its neighbours."""

_TOKENS = msgspec.json.Decoder(dict[str, Any])
_SCORES = msgspec.json.Decoder(list[float])


def task_answer_in_slices(job: Job, terminal: Terminal, rows: Sequence[Delta]) -> Sliced[dict[str, Any]]:
    """Render the answer to a completed job with a task."""
    assert job.task is not None
    texts = [""] * job.choices
    for row in rows:
        texts[row.index] += row.text
    match job.task.kind:
        case "embed":
            return (yield from _embeddings(job, terminal, texts))
        case "rerank":
            return _ranking(job, terminal, texts)
        case "tokenize":
            found = _TOKENS.decode(texts[0])
            return {"count": len(found["tokens"]), **found}
        case "detokenize":
            return {"prompt": texts[0]}
        case _:
            is_object = texts[0].lstrip().startswith("{")
            return msgspec.json.decode(texts[0]) if is_object else {"text": texts[0]}


def count_of(answer: str) -> int:
    """The number of token ids in the answer to a `tokenize`, without parsing them."""
    ids = answer[answer.index("[") + 1 : answer.index("]")]
    return ids.count(",") + 1 if ids.strip() else 0


def _usage(terminal: Terminal) -> dict[str, int]:
    return {"prompt_tokens": terminal.usage.prompt, "total_tokens": terminal.usage.prompt}


def _embeddings(job: Job, terminal: Terminal, texts: Sequence[str]) -> Sliced[dict[str, Any]]:
    data: list[dict[str, Any]] = []
    rendered = 0
    for encoded in [each for text in texts for each in text.split(",")]:
        vector: Any = encoded
        if not job.task_form.base64:
            numbers = _numbers(encoded)
            vector, rendered = msgspec.Raw(_as_json(numbers)), rendered + len(numbers)
            if rendered > NUMBERS_PER_SLICE:
                rendered = 0
                yield
        data.append({"object": "embedding", "index": len(data), "embedding": vector})
    return {"object": "list", "data": data, "model": job.full_model, "usage": _usage(terminal)}


def _numbers(encoded: str) -> array[float]:
    numbers = array("f", base64.b64decode(encoded))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _as_json(numbers: array[float]) -> bytes:
    """A JSON list with the shortest digits that give the same float32 again, or one more."""
    return msgspec.json.encode([float(f"{number:.{FLOAT32_DIGITS}g}") for number in numbers])


def _ranking(job: Job, terminal: Terminal, texts: Sequence[str]) -> dict[str, Any]:
    assert isinstance(job.prompt, Inputs)
    scores = [score for text in texts for score in _SCORES.decode(text)]
    documents = [each for group in job.prompt.groups for each in group[1:]]
    best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    results = []
    for index in best[: job.task_form.top_n]:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        results.append(result | ({"document": {"text": documents[index]}} if job.task_form.documents else {}))
    return {
        "id": f"rerank-{terminal.job}",
        "object": "list",
        "model": job.full_model,
        "results": results,
        "usage": _usage(terminal),
    }


# --- the input -------------------------------------------------------------------------------------------------------

SAME = (
    *("max_tokens", "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty"),
    *("top_k", "min_p", "repetition_penalty"),
)
"""Fields of a request that a job keeps under the same name."""
NEWER_LIMIT = "max_completion_tokens"


def input_object(job: Job) -> dict[str, Any]:
    """Render a job's request. Fields without effect, and those left at their defaults, are not kept."""
    found: dict[str, Any] = {"endpoint": job.endpoint.path, "model": job.full_model}
    if job.response is not None:
        found |= _response(job, job.response)
    elif job.message is not None:
        found |= _sampling(job.sampling) | sent_fields(job, job.message)
    else:
        found |= _prompt(job) | (_generation(job) if job.task is None else _task_options(job.task, job.task_form))
        found |= _tools(job.tools)
    queue = {"priority": job.priority.value, "deadline_ms": job.deadline_ms, "max_queue_ms": job.max_queue_ms}
    found |= {"user": job.user, "queue": _given(queue)}
    in_place = ("response_format", "metadata", *(("reasoning_effort", "verbosity") if job.response else ()))
    found |= {name: value for name, value in job.passed.items() if name not in in_place}
    if NEWER_LIMIT in found:
        found.pop("max_tokens", None)
    return _given(found)


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


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
    sampling, form = job.sampling, None
    chosen = sampling.logprobs is not None and isinstance(job.prompt, Chat)
    if sampling.json_schema:
        named = {"name": "schema", **job.passed.get("response_format", {}), "schema": sampling.json_schema}
        form = {"type": "json_schema", "json_schema": named}
    elif sampling.json_schema is not None:
        form = {"type": "json_object"}
    return _sampling(sampling) | {
        "n": sampling.n if sampling.n > 1 else None,
        "stop": list(sampling.stop) or None,
        "logprobs": chosen or sampling.logprobs,
        "top_logprobs": sampling.logprobs if chosen else None,
        "response_format": form,
        "reasoning_effort": _effort(job),
        "echo": job.echo or None,
    }


def _task_options(task: Task, form: TaskForm) -> dict[str, Any]:
    return {
        "dimensions": task.dimensions,
        "encoding_format": "base64" if form.base64 else None,
        "top_n": form.top_n,
        "return_documents": form.documents or None,
        "add_special_tokens": None if task.special_tokens else False,
        "add_generation_prompt": None if task.generation_prompt else False,
    }


def _sampling(sampling: Sampling) -> dict[str, Any]:
    """Render the fields that every generated answer has."""
    biases = {str(token): bias for token, bias in sampling.logit_bias.items()}
    same = {name: getattr(sampling, name) for name in SAME}
    return same | {"logit_bias": biases or None, "ignore_eos": sampling.ignore_eos or None}


def _effort(job: Job) -> str | None:
    return None if job.reasoning in ("", "default") else job.reasoning


def _tools(tools: Tools | None) -> dict[str, Any]:
    if tools is None:
        return {}
    named = {"type": "function", "function": {"name": tools.named}} if tools.named else tools.choice
    parallel = None if tools.parallel else False
    return {"tools": [tool.shown for tool in tools.offered], "tool_choice": named, "parallel_tool_calls": parallel}


def _response(job: Job, form: ResponseForm) -> dict[str, Any]:
    """Render the request of a response, with the turns of the responses that it continues."""
    turns, own = job.prompt.turns if isinstance(job.prompt, Chat) else (), _sampling(job.sampling)
    first, logprobs = 1 if form.instructed else 0, job.sampling.logprobs is not None
    return {
        "instructions": turns[0].content if form.instructed else None,
        "input": [item for turn in turns[first:] for item in sent_items(turn)],
        "max_output_tokens": own.pop("max_tokens"),
        **own,
        "reasoning": {"effort": effort} if (effort := _effort(job)) else None,
        "tools": form.tools or None,
        "tool_choice": form.tool_choice if form.tools else None,
        "parallel_tool_calls": False if form.tools and not form.parallel_tool_calls else None,
        "text": {"format": form.format} if form.format else None,
        "include": ["message.output_text.logprobs"] if logprobs else None,
        "top_logprobs": form.top_logprobs if logprobs else None,
        "background": form.background or None,
        "store": None if form.store else False,
    }
