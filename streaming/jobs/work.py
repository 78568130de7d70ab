"""Work estimate: the most tokens that a request may generate, and the most bytes that it may still write. Pure.

One unit of work is one token of one choice. The store's memory reservation (`streaming/store/memory.py`) and the token
quotas of batches use it, and a worker's share of its KV cache uses the same limit of an answer, so that no form of a
request (prompt lists, n, no max_tokens) is cheaper in one of them. Quotas also count prompts, once for each choice: an
engine computes the prompt of every choice unless its prefix cache has it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from penstock.engine import CHARACTERS_PER_TOKEN, ChatTurn, Input, ModelCard, Sampling, Task
from penstock.tools import Tools
from streaming.jobs.job import Chat, Inputs, Job, Prompt, Text, Tokens, prompt_count
from streaming.order import patience_ms, units

UNKNOWN_OUTPUT = 4096
"""Tokens of an answer without a limit by a model that no worker has loaded yet."""

TOKEN_BYTES = 96
"""Bytes of one token that is alone in its step: an entry of the log with one reply address, and a row of the record.
tests/streaming/store/test_memory.py measures 46 and 21 with Valkey 8; in steps shared by many jobs the log's share is
21. The rest is for longer texts and for what the allocator rounds up."""
LOGPROB_BYTES, ALTERNATIVE_BYTES = 40, 40
"""More for the log-probability of a token, and for each of its alternatives: both stand in log and record."""
ID_BYTES, TEXT_BYTES, SCORE_BYTES = 9, 32, 26
"""Of the answers to tasks: a token id with its comma, the text of a token, and a score."""
NUMBER_BYTES = 16 / 3
"""Of one number of a vector, as base64 of float32."""
PADDING_BYTES = 4
"""Of the base64 of a vector, with the comma behind it."""
UNKNOWN_SIZE = 4096
"""Numbers of a vector of a model that does not say how many."""
JOB_BYTES = 1536
"""Beside its tokens: fields of its hash that come with claim and end, its places in streams and sets."""


def work_of(prompt: Prompt, sampling: Sampling, card: ModelCard | None) -> int:
    """The most tokens of all choices together. `card`: of the model, if one is known."""
    if isinstance(prompt, Tokens):
        return sampling.n * sum([answer_tokens(sampling.max_tokens, card, len(ids)) for ids in prompt.ids])
    return sampling.n * prompt_count(prompt) * answer_tokens(sampling.max_tokens, card)


def weight_of(prompt: Prompt, sampling: Sampling, card: ModelCard | None, tools: Tools | None = None) -> int:
    """Tokens that quotas count: the work, and the prompt of every choice. `card` as for `work_of`."""
    return sampling.n * sum(prompt_sizes(prompt, tools)) + work_of(prompt, sampling, card)


@dataclass(frozen=True, slots=True)
class Cost:
    """What the order of the queue knows of a job (streaming/order.py)."""

    prompt: int
    """Tokens of the prompts, once for each choice."""
    output: int
    """The most tokens of all choices together; the job's end corrects it."""
    patience_ms: int
    """From its arrival to its latest start."""

    @property
    def units(self) -> int:
        return units(self.prompt, self.output)


def cost_of(job: Job, card: ModelCard | None = None) -> Cost:
    """Estimate what a job costs. `card`: of its model, if one is known."""
    sampling = job.sampling
    output, choices = work_of(job.prompt, sampling, card), max(1, job.choices)
    patience = patience_ms(job.priority, job.deadline_ms, job.max_queue_ms, output // choices)
    return Cost(sampling.n * sum(prompt_sizes(job.prompt, job.tools)), output, patience)


def answer_tokens(max_tokens: int | None, card: ModelCard | None, prompt_tokens: int = 0) -> int:
    """The most tokens of one choice: as requested, else the engine's default, and at most the model's longest
    answer and the rest of its context behind `prompt_tokens`. Only the engine can count a text's tokens, so
    callers that need an upper bound pass 0 for texts."""
    if card is None:
        return UNKNOWN_OUTPUT if max_tokens is None else max_tokens
    wanted = (card.default_output or card.max_output) if max_tokens is None else max_tokens
    return max(0, min(wanted, card.max_output, card.context - prompt_tokens))


def prompt_sizes(prompt: Prompt, tools: Tools | None = None) -> list[int]:
    """Tokens of each prompt: counted where token ids were sent, estimated from the characters of texts and tools."""
    match prompt:
        case Chat(turns):
            offered = 0 if tools is None else len(msgspec.msgpack.encode(tools.offered))
            return [(offered + sum([_length(turn) for turn in turns])) // CHARACTERS_PER_TOKEN]
        case Text(texts):
            return [len(text) // CHARACTERS_PER_TOKEN for text in texts]
        case Tokens(ids):
            return [len(each) for each in ids]
        case Inputs(groups):
            return [sum([_input_size(each) for each in group]) for group in groups]


def _input_size(each: Input) -> int:
    return len(each) // CHARACTERS_PER_TOKEN if isinstance(each, str) else len(each)


def _length(turn: ChatTurn) -> int:
    own = len(turn.role) + len(turn.content)
    return own + sum([len(call.name) + len(call.arguments) for call in turn.calls]) if turn.calls else own


def task_bytes(job: Job, task: Task, card: ModelCard | None = None) -> int:
    """The most bytes of the answer to a task, as far as its request and the model's card tell."""
    prompt = job.prompt
    if task.kind == "tokenize":
        return ID_BYTES * len(
            msgspec.msgpack.encode(prompt)
        )  # a character beside the vocabulary has an id for each byte
    if task.kind == "detokenize":
        return TEXT_BYTES * sum(prompt_sizes(prompt))
    count = sum([len(group) for group in prompt.groups]) if isinstance(prompt, Inputs) else prompt_count(prompt)
    if task.kind == "rerank":
        return SCORE_BYTES * count
    size = task.dimensions or (card.embedding_size if card is not None else 0) or UNKNOWN_SIZE
    return count * (math.ceil(size * NUMBER_BYTES) + PADDING_BYTES)


def reserved_bytes(job: Job, card: ModelCard | None = None) -> int:
    """The most bytes that a job may write from its acceptance to its end: its log, then its record. `card`: of its
    model, if one is known."""
    if job.task is not None:
        return JOB_BYTES + 2 * task_bytes(job, job.task, card)  # log and record
    sampling = job.sampling
    each = TOKEN_BYTES
    if sampling.logprobs is not None:
        each += LOGPROB_BYTES + ALTERNATIVE_BYTES * sampling.logprobs
    return JOB_BYTES + work_of(job.prompt, sampling, card) * each + 2 * _echo_bytes(job)


def _echo_bytes(job: Job) -> int:
    """Of the prompts in front of all choices of a job."""
    if not job.echo or not isinstance(job.prompt, Text):
        return 0
    return job.sampling.n * sum([len(text.encode()) for text in job.prompt.texts])
