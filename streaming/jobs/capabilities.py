"""Capability check: compares a job's options with its engine's capabilities; the refusal names the request field.

The API checks a job before it accepts it, and the worker again before it runs it: the model's engine may have changed.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.engine import Capabilities, Failure, Task, TaskKind
from streaming.jobs.job import Chat, Inputs, Job, Tokens

NEUTRAL = {"top_k": 0, "min_p": 0, "repetition_penalty": 1, "logit_bias": {}, "ignore_eos": False}
"""Further fields of sampling, each with the value that asks an engine without it for nothing."""

MAX_NUMBERS, MAX_FLOATS = 1 << 22, 1 << 21
"""Numbers of the vectors of one answer at most, as base64 and as decimals. Those are 22 MB, and these take an API
process some 2 s of computing, in slices; either is put into its final form at once, in up to 30 ms."""

IN_RESPONSES = {"messages": "input", "response_format": "text.format", "logprobs": "include"}
"""Names that fields of a job have in the Responses API, where they differ."""


def unsupported(job: Job, capabilities: Capabilities, embedding_size: int = 0) -> Failure | None:
    """Return a failure for the first option of the job that the engine does not support, or None. `embedding_size`: of
    its model's card; 0: unknown."""
    if job.task is not None:
        return _task(job, job.task, capabilities) or _vectors(job, job.task, embedding_size)
    return (
        _prompt(job, capabilities)
        or _tools(job, capabilities)
        or _logprobs(job, capabilities)
        or _options(job, capabilities)
        or _further_sampling(job, capabilities)
        or _reasoning(job, capabilities)
    )


def is_continuable(job: Job, capabilities: Capabilities) -> bool:
    """Whether the engine can continue the job's texts after what another attempt generated."""
    if job.tools is not None:
        return capabilities.tool_resume
    return job.sampling.json_schema is None or capabilities.json_resume


def _prompt(job: Job, capabilities: Capabilities) -> Failure | None:
    if isinstance(job.prompt, Chat) and not capabilities.chat:
        return _refusal(job, "messages", "has no chat template; use /v1/completions")
    if not isinstance(job.prompt, Chat) and not capabilities.text_prompts:
        return _refusal(job, "prompt", "takes conversations only; use /v1/chat/completions")
    if isinstance(job.prompt, Tokens) and not capabilities.token_prompts:
        return _refusal(job, "prompt", "takes text prompts only, not token ids")
    return None


TASKS: Mapping[TaskKind, str] = {
    "embed": "makes no embeddings: use a model that GET /v1/models shows with embed",
    "rerank": "ranks no documents: use a model that GET /v1/models shows with rerank",
    "tokenize": "does not tell token ids: the usage of an answer counts them",
    "detokenize": "has no text for token ids",
}
"""What an engine without the task does, and what to do."""


def _task(job: Job, task: Task, capabilities: Capabilities) -> Failure | None:
    can = {"embed": capabilities.embed, "rerank": capabilities.rerank}
    if not can.get(task.kind, capabilities.tokenize):
        return _refusal(job, "model", TASKS[task.kind])
    if task.dimensions is not None and not capabilities.embedding_dimensions:
        return _refusal(job, "dimensions", "makes vectors of one length: leave dimensions out")
    if isinstance(job.prompt, Chat):
        return _prompt(job, capabilities)
    ids = isinstance(job.prompt, Inputs) and any(not isinstance(each, str) for row in job.prompt.groups for each in row)
    if ids and not capabilities.token_prompts:
        return _refusal(job, "input", "takes texts only, not token ids")
    return None


def _vectors(job: Job, task: Task, embedding_size: int) -> Failure | None:
    """Refuse an answer whose vectors are too many numbers."""
    if task.kind != "embed" or not isinstance(job.prompt, Inputs) or not (size := task.dimensions or embedding_size):
        return None
    most = MAX_NUMBERS if job.task_form.base64 else MAX_FLOATS
    if sum([len(group) for group in job.prompt.groups]) * size <= most:
        return None
    remedy = f"send at most {max(1, most // size)} inputs"
    if not job.task_form.base64:
        remedy += f", or {MAX_NUMBERS // size} with encoding_format base64"
    return _refusal(job, "input", f"makes {size} numbers of each, and an answer has at most {most}: {remedy}")


def _tools(job: Job, capabilities: Capabilities) -> Failure | None:
    turns, tools = job.prompt.turns if isinstance(job.prompt, Chat) else (), job.tools
    if not capabilities.tools and any(turn.calls or turn.call_id for turn in turns):
        what = "shows its model no calls of tools; send the text of each call and of its result as messages"
        return _refusal(job, "messages", what)
    if tools is None:
        return None
    if job.sampling.json_schema is not None and not capabilities.tools_with_schema:
        what = "cannot hold text to a schema where tools are offered, too"
        remedy = "offer a function whose parameters are that schema, and force its call with tool_choice"
        return _refusal(job, "response_format", f"{what}: {remedy}")
    if not tools.forced and not capabilities.tools:
        remedy = "set tool_choice to 'required' or name a function" if capabilities.forced_tools else "leave tools out"
        return _refusal(job, "tools", f"cannot let its model choose a tool: {remedy}")
    if tools.forced and not capabilities.forced_tools:
        remedy = "use 'auto'" if capabilities.tools else "leave tools out"
        return _refusal(job, "tool_choice", f"cannot force a call of a tool: {remedy}")
    return None


def _logprobs(job: Job, capabilities: Capabilities) -> Failure | None:
    wanted, most = job.sampling.logprobs, capabilities.logprobs
    if wanted is None or wanted <= most:
        return None
    if most < 0:
        return _refusal(job, "logprobs", "gives no log-probabilities")
    param = "top_logprobs" if isinstance(job.prompt, Chat) else "logprobs"
    return _refusal(job, param, f"gives the log-probabilities of at most {most} alternatives per token")


def _options(job: Job, capabilities: Capabilities) -> Failure | None:
    sampling = job.sampling
    if sampling.json_schema is not None and not capabilities.json_schema:
        return _refusal(job, "response_format", "cannot be held to JSON")
    if capabilities.penalties:
        return None
    if sampling.presence_penalty:  # zero asks for nothing
        return _refusal(job, "presence_penalty", "knows no penalties")
    if sampling.frequency_penalty:
        return _refusal(job, "frequency_penalty", "knows no penalties")
    return None


def _further_sampling(job: Job, capabilities: Capabilities) -> Failure | None:
    """Fields of sampling that have a capability of the same name."""
    for name, neutral in NEUTRAL.items():
        if getattr(job.sampling, name) not in (None, neutral) and not getattr(capabilities, name):
            return _refusal(job, name, f"has no {name}: leave it out")
    return None


def _reasoning(job: Job, capabilities: Capabilities) -> Failure | None:
    if job.reasoning and job.response is not None and job.sampling.logprobs is not None:
        return _refusal(job, "include", "gives no log-probabilities of an answer with reasoning: leave them out")
    if job.reasoning in ("", "default") or capabilities.reasoning_effort:
        return None
    param = "reasoning_effort" if job.response is None else "reasoning.effort"
    if job.reasoning != "none":
        return _refusal(job, param, f"cannot be told how much to reason: leave {param} out")
    return _refusal(job, param, "cannot be kept from reasoning: leave it out") if capabilities.reasoning else None


def _refusal(job: Job, param: str, what: str) -> Failure:
    param = param if job.response is None else IN_RESPONSES.get(param, param)
    return Failure("invalid_request_error", f"{param}: the engine of {job.model!r} {what}.", 400, param)
