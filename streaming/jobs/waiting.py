"""Positions of waiting jobs in words for their owners, the backlog of the lanes, and what a job costs.

A position says how many jobs are expected to start before a waiting one. It follows the order of the queue
(`streaming/order.py`) as if no other job came and none ended. It counts the jobs of higher lanes, the requeued jobs of
its lane, the earlier ones of its tenant, and an estimate of those of other tenants: tenants take turns, so before the
n-th job of a tenant each other one gets n turns; one that got less gets one more; and all of them have no more turns
than jobs. This is exact while one tenant has jobs in the lane, and for two whose jobs cost the same and who have the
same weight. The floor and the age boost of lower lanes are left out.

The backlog counts the waiting and running jobs of each lane, with the oldest job's age and the nearest deadlines, and
says how long the next job of each tenant has waited.

The cost of a job counts tokens for each choice. The store's memory reservation (`streaming/store/monitor.py`), the
token quotas of batches and a worker's share of its KV cache use the same limit of an answer, so that no form of a
request (prompt lists, n, no max_tokens) is cheaper in one of them. Quotas also count prompts, once for each choice: an
engine computes the prompt of every choice unless its prefix cache has it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import msgspec

from penstock.engine import CHARACTERS_PER_TOKEN, MEDIA_KINDS, ChatTurn, Input, ModelCard, Sampling, Task
from penstock.tools import Tools
from streaming.jobs.job import Chat, Inputs, Job, Prompt, Text, Tokens, prompt_count
from streaming.keys import kind_of, parse_lane, partition_key
from streaming.order import COUNTER_SCALE, JOB_BYTES, LaneDepth, Priority, WaitingDeadline, patience_ms
from streaming.redis.client import Call, ClientUser, Query, RedisClient

MAX_DEADLINES = 32
"""Deadlines read from each partition."""
MAX_TENANTS = 50
"""Tenants read of each lane of each partition: 5 us each, in which the server does nothing else."""


@dataclass(frozen=True, slots=True)
class BacklogSnapshot:
    """Lanes and deadlines of all partitions at one time."""

    lanes: list[LaneDepth]
    due: list[WaitingDeadline]


class Backlog(ClientUser):
    """Reads the backlog, with one call per partition: one round trip per server."""

    async def lanes(self, models: Iterable[str]) -> list[LaneDepth]:
        """Count every lane of these models. Raises Unavailable."""
        return (await self._client.ask(backlog_of(models, self._client.partitions, deadlines=0))).lanes

    async def ages(self, models: Iterable[str]) -> dict[tuple[str, Priority], dict[str, int]]:
        """Read how long the next job of each tenant has waited, in milliseconds, by lane: of each partition, of the
        MAX_TENANTS that were served least. Raises Unavailable."""
        models = tuple(models)
        args: list[str | int] = [MAX_TENANTS, *models]
        answers = await self._client.calls([("ages", partition, args) for partition in self._client.partitions])
        names = [(model, priority) for model in models for priority in Priority]
        parts = zip(*([(now, lane) for lane in lanes] for now, lanes in answers), strict=True)
        return {name: _oldest(each) for name, each in zip(names, parts, strict=True)}


def backlog_of(
    models: Iterable[str], partitions: Iterable[int], deadlines: int = MAX_DEADLINES
) -> Query[BacklogSnapshot]:
    """Count every lane of these models, and read the nearest deadlines of waiting jobs of all models."""
    models = tuple(models)
    args: list[str | int] = [deadlines, *models]
    names = [(model, priority) for model in models for priority in Priority]

    def parse(answers: list[Any]) -> BacklogSnapshot:
        parts = zip(*([(now, *lane) for lane in lanes] for now, lanes, _ in answers), strict=True)
        return BacklogSnapshot(
            [_lane(model, priority, each) for (model, priority), each in zip(names, parts, strict=True)],
            [due for now, _, nearest in answers for each in nearest if (due := _due(now, *each)) is not None],
        )

    return Query([("lanes", partition, args) for partition in partitions], parse)


def _oldest(parts: Iterable[tuple[int, list[bytes | int]]]) -> dict[str, int]:
    """Merge one lane's tenants of all partitions: the longest wait of each, in milliseconds."""
    found: dict[str, int] = {}
    for now, pairs in parts:
        for name, since in zip(pairs[::2], pairs[1::2], strict=True):
            tenant = bytes(name).decode()
            found[tenant] = max(found.get(tenant, 0), now - int(since))
    return found


def _lane(model: str, priority: Priority, parts: Iterable[tuple[int, int, int, int, int]]) -> LaneDepth:
    """Sum one lane. `parts`, by partition: its time (ms), waiting, running, the oldest waiting job's time, ever put."""
    times, waiting, running, first, added = zip(*parts, strict=True)
    oldest_ms = max(now - since if since else 0 for now, since in zip(times, first, strict=True))
    return LaneDepth(model, priority, sum(waiting), sum(running), oldest_ms, sum(added))


def _due(now: int, lane: bytes, created: bytes, at: bytes) -> WaitingDeadline | None:
    """Decode a deadline; None for a job whose record is malformed."""
    try:
        model, priority = parse_lane(lane.decode())
        return WaitingDeadline(model, priority, max(0, int(float(at)) - now), now - int(float(created)))
    except (ValueError, OverflowError, LookupError, TypeError):
        return None


MAX_REPLY_BYTES, TRANSCRIPT_BYTES = 8 << 20, 1 << 20
"""The most bytes of a server's answer with images, and with a transcript."""
MEDIA_TOKENS = 1024
"""Estimated tokens of an image, a recording or a document."""
UNKNOWN_OUTPUT = 4096
"""Tokens of an answer without a limit by a model that no worker has loaded yet."""

TOKEN_BYTES = 72
"""Bytes of one token that is alone in its step: an entry of the log with one reply address, and a row of the record.
tests/streaming/store/test_memory.py measures 58 with Valkey 9; in steps shared by many jobs the log's share is half.
The rest is for longer texts and for what the allocator rounds up."""
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


def work_of(prompt: Prompt, sampling: Sampling, card: ModelCard | None) -> int:
    """The most tokens of all choices together. `card`: of the model, if one is known."""
    if isinstance(prompt, Tokens):
        return sampling.n * sum([answer_tokens(sampling.max_tokens, card, len(ids)) for ids in prompt.ids])
    return sampling.n * prompt_count(prompt) * answer_tokens(sampling.max_tokens, card)


def weight_of(prompt: Prompt, sampling: Sampling, card: ModelCard | None, tools: Tools | None = None) -> int:
    """Tokens that quotas count: the work, and the prompt of every choice. `card` as for `work_of`."""
    return prompt_tokens(prompt, sampling, tools) + work_of(prompt, sampling, card)


def prompt_tokens(prompt: Prompt, sampling: Sampling, tools: Tools | None) -> int:
    """Tokens of the prompts, once for each choice."""
    return sampling.n * sum(prompt_sizes(prompt, tools))


class Cost(msgspec.Struct, frozen=True, gc=False):
    """What the order of the queue (streaming/order.py) and the store's memory know of a job."""

    prompt: int
    """Tokens of the prompts, as `prompt_tokens` counts. Of a chat, only this field depends on its messages."""
    output: int
    """The most tokens of all choices together; the job's end corrects it."""
    patience_ms: int
    """From its arrival to its latest start."""
    may_write: int
    """Bytes, as `reserved_bytes` counts."""
    guessed: bool = False
    """`output` is a guess: neither the request nor a card of the model says how long an answer may be."""


def cost_of(job: Job, card: ModelCard | None = None) -> Cost:
    """Estimate what a job costs. `card`: of its model, if one is known."""
    sampling = job.sampling
    output, choices = work_of(job.prompt, sampling, card), max(1, job.choices)
    patience = patience_ms(job.priority, job.deadline_ms, job.max_queue_ms, output // choices)
    guessed, prompt = card is None and sampling.max_tokens is None, prompt_tokens(job.prompt, sampling, job.tools)
    return Cost(prompt, output, patience, reserved_bytes(job, card), guessed)


def answer_tokens(max_tokens: int | None, card: ModelCard | None, context_used: int = 0) -> int:
    """The most tokens of one choice: as requested, else the engine's default, and at most the model's longest
    answer and the rest of its context behind `context_used`. Only the engine can count a text's tokens, so
    callers that need an upper bound pass 0 for texts."""
    if card is None:
        return UNKNOWN_OUTPUT if max_tokens is None else max_tokens
    wanted = (card.default_output or card.max_output) if max_tokens is None else max_tokens
    return max(0, min(wanted, card.max_output, card.context - context_used))


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
    if turn.parts:
        own += MEDIA_TOKENS * CHARACTERS_PER_TOKEN * sum([part["type"] != "text" for part in turn.parts])
    return own + sum([len(call.name) + len(call.arguments) for call in turn.calls]) if turn.calls else own


def task_bytes(job: Job, task: Task, card: ModelCard | None = None) -> int:
    """The most bytes of the answer to a task, as far as its request and the model's card tell."""
    prompt = job.prompt
    if task.kind in MEDIA_KINDS:
        return MAX_REPLY_BYTES if task.kind in ("draw", "edit") else TRANSCRIPT_BYTES
    if task.kind == "tokenize":
        # A character beside the vocabulary has an id for each byte.
        return ID_BYTES * len(msgspec.msgpack.encode(prompt))
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
    return JOB_BYTES + work_of(job.prompt, sampling, card) * each + _echo_bytes(job, each)


def _echo_bytes(job: Job, each: int) -> int:
    """Of the prompts in front of all choices of a job, and of their tokens' log-probabilities: `each` has so many."""
    if not job.echo or not isinstance(job.prompt, Text | Tokens):
        return 0
    prompts = job.prompt.texts if isinstance(job.prompt, Text) else job.prompt.ids
    rows = each * sum(map(len, prompts)) if job.sampling.prompt_logprobs else 0  # a character is a token at most
    texts = 2 * sum([len(text.encode()) for text in prompts if isinstance(text, str)])
    return job.sampling.n * (rows + texts)


MAX_COUNTED = 1_000
"""Jobs of one tenant that are read from a lane; the later ones get this number."""
CACHE_MAX_AGE_S = 5.0
"""How long a read is cached without requests."""

LineRead: TypeAlias = tuple[Sequence[Any], Mapping[bytes, int]]
"""A tenant's first entries in a lane: the answer of the script `waiting`, and the index of each entry in it."""


class QueuePosition(msgspec.Struct, frozen=True, gc=False):
    """The position of a waiting job, in numbers of jobs that are expected to start before it."""

    higher: int = 0
    """Of higher lanes."""
    requeued: int = 0
    """Of its lane, which a worker had begun."""
    own: int = 0
    """Of its tenant."""
    others: int = 0
    """Of other tenants; an estimate."""
    served: int = 0
    """Units of work that its tenant got more than the tenant that got least."""
    lane: Priority = Priority.STANDARD
    kind: str = "lane"
    """Where it waits: lane, retry or suspects."""

    @property
    def in_lane(self) -> int:
        return self.requeued + self.own + self.others

    @property
    def before(self) -> int:
        return self.higher + self.in_lane

    @property
    def reason(self) -> str:
        """Why the job stands there, in words. It names no other tenant."""
        parts = [f"lane {self.lane}"]
        if self.higher:
            parts.append(f"{_jobs(self.higher)} of higher lanes first")
        if self.kind == "suspects":
            parts.append("it may have ended its workers, so it will run alone")
        elif self.kind == "retry":
            parts.append("a worker had begun it, so it goes before new jobs")
        if self.requeued:
            parts.append(f"{_jobs(self.requeued)} first that a worker had begun")
        if self.others:
            share = f"; your jobs got {self.served:,} units of work more than the least served" if self.served else ""
            parts.append(f"about {_jobs(self.others)} of others first, in turns{share}")
        parts.append(f"{_jobs(self.own)} of your own first, by deadline" if self.own else "next of your own")
        return "; ".join(parts)


FIRST = QueuePosition()


def _jobs(count: int) -> str:
    number = f"{count:,}" if count < MAX_COUNTED else f"{count:,} or more"
    return f"{number} job{'' if count == 1 else 's'}"


def _position(read: Sequence[Any], own: int, lane: str) -> QueuePosition:
    """The position of a job behind `own` others of its tenant, by the answer of the script `waiting`."""
    _, higher, requeued, waiting, mine, tenants, less, counter, least = read
    priority, kind = parse_lane(lane)[1], kind_of(lane)
    if kind != "lane":
        return QueuePosition(higher, own, lane=priority, kind=kind)
    others = min(waiting - mine, (tenants - 1) * own + less)
    return QueuePosition(higher, requeued, own, max(0, others), max(0, counter - least) // COUNTER_SCALE, priority)


class LineHead(NamedTuple):
    """One read of a tenant's first entries in a lane, finished or under way; `began` is monotonic time."""

    began: float
    read: asyncio.Task[LineRead]


class QueuePositions:
    """Finds the positions of waiting jobs; concurrent requests about a tenant's jobs in a lane share one read. One per
    process."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self._looks: dict[tuple[str, str], LineHead] = {}
        """By lane and tenant: the last read."""

    async def find(self, partition: int, lane: str, tenant: str, entry: str, old_s: float = 0.0) -> QueuePosition:
        """The position of an entry of a lane, by a read at most `old_s` old. Raises Unavailable."""
        asked, line = time.monotonic(), (lane, tenant)
        while True:
            look = self._looks.get(line)
            if look is None or look.began < asked - old_s or old_s == 0:
                look = self._look(partition, line)
            read, indexes = await asyncio.shield(look.read)
            # An entry that an older read does not have was perhaps put later, unless the read ends before it.
            if look.began >= asked or len(indexes) >= MAX_COUNTED or entry.encode() in indexes:
                return _position(read, indexes.get(entry.encode(), len(read[0])), lane)
            if self._looks.get(line) is look:
                del self._looks[line]

    async def expected(self, job: Job, card: ModelCard | None) -> int:
        """How many jobs of its lane would start before a job that is put now, in all partitions together. `card`: of
        its model. Raises Unavailable."""
        patience_ms = cost_of(job, card).patience_ms
        lanes = {each: partition_key(each, "lane", job.model, job.priority) for each in self._client.partitions}
        calls: list[Call] = [("waiting", each, (lane, job.tenant, 0, patience_ms)) for each, lane in lanes.items()]
        reads = await self._client.calls(calls)
        return sum(_position(read, read[0], lane).in_lane for read, lane in zip(reads, lanes.values(), strict=True))

    def _look(self, partition: int, line: tuple[str, str]) -> LineHead:
        now = time.monotonic()
        self._looks = {name: look for name, look in self._looks.items() if look.began > now - CACHE_MAX_AGE_S}
        look = self._looks[line] = LineHead(now, asyncio.create_task(self._read(partition, *line)))
        look.read.add_done_callback(lambda read: self._forget(line, look, read))
        return look

    def _forget(self, line: tuple[str, str], look: LineHead, read: asyncio.Task[Any]) -> None:
        """Drop a failed read from the cache, and retrieve its error: perhaps no caller waits for it any more."""
        if (read.cancelled() or read.exception()) and self._looks.get(line) is look:
            del self._looks[line]

    async def _read(self, partition: int, lane: str, tenant: str) -> LineRead:
        read: Sequence[Any] = await self._client.call("waiting", partition, lane, tenant, MAX_COUNTED, "")
        return read, {entry: index for index, entry in enumerate(read[0])}
