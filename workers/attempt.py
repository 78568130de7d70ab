"""One claimed job on its way through the engine: requests out, pieces in, numbered deltas and a terminal out.

It knows neither Redis nor which engine runs it; it decides nothing but when the job is over and how.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from streaming.jobs.codec import encode_delta, encode_plain, packed, unpacked
from streaming.jobs.frames import Delta, Opening, PlainDelta, Run, Section
from streaming.jobs.history import NOTHING, History
from streaming.jobs.job import Chat, ChatTurn, Job, JobState, Text, prompt_count
from streaming.jobs.lease import SILENT, Claim
from streaming.jobs.terminal import Failure, Generated, Terminal, Usage
from workers.engines.base import Piece, Request
from workers.engines.constraint import complete_texts
from workers.stamps import AttemptStamps

EXPIRED = Failure("deadline_exceeded", "The job's deadline passed before it was done.", 408)
CANCELLED = Failure("job_cancelled", "The job was cancelled.", 409)


class Attempt:
    """`history` is what earlier runs logged; this one goes on behind it."""

    def __init__(self, claim: Claim, history: History = NOTHING) -> None:
        self.claim = claim
        self.number = claim.number
        """Of its run: stands for the job in this worker's frames."""
        self.job = claim.job
        self.partition = claim.partition
        self._history, self._sections = history.rows, history.sections
        self.opening = Opening(claim.job.id, len(history.rows) + 1, history.last_run)
        self._record = bytearray(b"".join([encode_delta(replace(row, stream=claim.number)) for row in history.rows]))
        """All deltas of the job as they are logged, one behind the other. Kept as objects, each in a place of its own,
        they would leave nothing of what a token needs in the processor's cache."""
        self._completion = sum([row.n for row in history.rows])
        """Tokens generated."""
        self.seq = len(history.rows)
        """The last delta's number."""
        self.first_frame = claim.first_frame
        """The first frame of the log that is still needed for it."""
        self.check: asyncio.Task[None] | None = None
        """The check of its answer against the schema it asked for."""
        self.checkpointing = False
        """Its deltas are being logged anew."""
        self.stamps = AttemptStamps()
        self._begun = False
        self.deadline: asyncio.TimerHandle | None = None
        """Of the worker's, kept here so that it ends with the attempt."""
        self.addresses: Sequence[str] = (claim.reply if claim.job.stream else ()) or (SILENT,)
        """Where its deltas go."""
        self.unnamed = True
        """Some of them have not been told yet which run its number stands for."""
        self._choices = choices = self.job.choices
        self._finishes = [""] * choices
        self._prompts: dict[int, tuple[int, int]] = {}
        """By choice: tokens of its prompt and the cached ones of them, as the first engine that ran it counted."""
        self._uncarried: dict[int, tuple[int, int]] = {}
        """Those that no delta carries yet: a choice that is not run again is counted by what the log says."""
        for row in history.rows:
            if row.finish:
                self._finishes[row.index] = row.finish
            if row.prompt is not None:
                self._prompts.setdefault(row.index, row.prompt)
        self._stopped: tuple[JobState, Failure] | None = None
        self._open: set[int] = set()
        """Choices that have not ended."""
        self._waiting: deque[tuple[int, Request]] = deque()
        """Open choices that the engine has not been given yet."""
        self.share = 1
        """How many of its choices the engine may have at a time."""
        self.last_start = 0
        """The number, among all texts of the worker, of the one that the engine was given last."""

    @property
    def over(self) -> bool:
        """Every choice has had its last piece, and none waits to be started."""
        return not self._open

    @property
    def waits(self) -> bool:
        """Whether choices wait to be started."""
        return bool(self._waiting)

    @property
    def started(self) -> int:
        """Choices the engine has, or has queued."""
        return len(self._open) - len(self._waiting)

    @property
    def is_checked(self) -> bool:
        """Whether its answer is being checked just now."""
        return self.check is not None and not self.check.done()

    @property
    def stopped(self) -> bool:
        return self._stopped is not None

    @property
    def constrained(self) -> bool:
        """Whether its texts must be JSON, as far as they are complete."""
        return self.job.sampling.json_schema is not None and not self.stopped

    def follow(self, address: str) -> None:
        """One more reader."""
        if address not in self.addresses:
            self.addresses = (*(known for known in self.addresses if known != SILENT), address)
            self.unnamed = True

    def unfollow(self, address: str) -> None:
        """One reader less."""
        self.addresses = tuple(known for known in self.addresses if known != address) or (SILENT,)

    def requests(self) -> dict[int, Request]:
        """What is still to be generated: by its index, a request for each choice that has not finished."""
        requests = {}
        pasts: defaultdict[int, list[tuple[str, Sequence[int], int]]] = defaultdict(list)
        for row in self._history:
            pasts[row.index].append((row.text, row.ids, row.n))
        for index in range(self._choices):
            past = pasts[index]
            if not self._finishes[index] and self._spent(past):
                self._finishes[index] = "length"
            if not self._finishes[index]:
                requests[index] = self._request(index, past)
        self._open = set(requests)
        return requests

    def queue_choices(self) -> None:
        """Let every choice that has not finished wait to be started, in the order of their numbers."""
        self._waiting.extend(self.requests().items())

    def start_next(self) -> tuple[int, Request]:
        """The choice that has waited longest, which the engine is given now."""
        return self._waiting.popleft()

    def refuse(self, index: int, failure: Failure) -> None:
        """The engine has not taken a choice it was given: the job fails."""
        self._open.discard(index)
        self.stop(JobState.FAILED, failure)

    def start_no_more(self) -> None:
        """Choices that wait are never started."""
        self._open.difference_update([index for index, _ in self._waiting])
        self._waiting.clear()

    def _spent(self, past: Sequence[tuple[str, Sequence[int], int]]) -> bool:
        limit = self.job.sampling.max_tokens
        return limit is not None and sum([count for _, _, count in past]) >= limit

    def _request(self, index: int, past: Sequence[tuple[str, Sequence[int], int]]) -> Request:
        sampling = self.job.sampling
        prompt = prompt_of(self.job, index // sampling.n)
        if sampling.n > 1:
            # Copies of one prompt must differ: each has a seed of its own.
            seed = None if sampling.seed is None else sampling.seed + index % sampling.n
            sampling = replace(sampling, n=1, seed=seed)
        return Request(self._request_id(index), prompt, sampling, past, self.job.tenant)

    def _request_id(self, index: int) -> str:
        return f"{self.job.id}/{self.number}/{index}"

    def live_ids(self) -> list[str]:
        """Engine ids of the requests that were started and are not over."""
        waiting = {index for index, _ in self._waiting}
        return [self._request_id(index) for index in self._open if index not in waiting]

    def take(self, index: int, piece: Piece, now: float) -> bytes | None:
        """One piece of one choice, which came `now` (monotonic), as a numbered delta, encoded, or None if it shows
        nothing. What comes after a stop is not shown. Done once a token."""
        finish = piece.finish
        if piece.prompt_tokens:
            self._count_prompt(index, piece)
        if finish or piece.failure is not None:
            self._close(index, piece, now)
        if self._stopped is not None or not (piece.n or piece.text or finish or piece.ids):
            return None
        if not self._begun:
            self._begun = True
            self.stamps.begin(now)
        self.seq += 1
        n = piece.n
        if self._uncarried and index in self._uncarried:
            delta = self._counted(index, piece)
        else:
            delta = encode_plain(
                PlainDelta(self.number, self.seq, index, piece.text, piece.ids, n, finish, piece.logprobs)
            )
        self._completion += n
        self._record += delta
        return delta

    def _count_prompt(self, index: int, piece: Piece) -> None:
        """Take note of a prompt's size; the first that is known of it stands, whatever a later attempt counts."""
        if index not in self._prompts:
            self._prompts[index] = self._uncarried[index] = piece.prompt_tokens, piece.cached_tokens

    def _counted(self, index: int, piece: Piece) -> bytes:
        """A delta that says how large its choice's prompt is."""
        prompt, stream, seq = self._uncarried.pop(index), self.number, self.seq
        return encode_delta(
            Delta(stream, seq, index, piece.text, piece.ids, piece.n, piece.finish, piece.logprobs, prompt)
        )

    def _close(self, index: int, piece: Piece, now: float) -> None:
        """Take note of a choice's last piece."""
        self._open.discard(index)
        self.stamps.finish(piece.times, now)
        if piece.failure is not None:
            self.stop(JobState.FAILED, piece.failure)
        elif piece.finish == "cancelled":
            self.stop(JobState.CANCELLED, CANCELLED)
        elif self._stopped is None:
            self._finishes[index] = piece.finish

    def logged(self) -> list[bytes]:
        """All deltas of the job, each encoded: this run's as they were given out, earlier ones as copies."""
        first = self.opening.first
        deltas = unpacked(self.seq, self._record)
        return [encode_delta(row if row.seq >= first else replace(row, stream=-self.number)) for row in deltas]

    def own(self) -> list[bytes]:
        """The deltas of this run, each encoded."""
        return [encode_delta(row) for row in unpacked(self.seq, self._record) if row.seq >= self.opening.first]

    @property
    def is_checkpointed(self) -> bool:
        """Whether its deltas were logged anew since its claim."""
        return self.first_frame != self.claim.first_frame

    @property
    def copies(self) -> Opening | None:
        """What stands for the copies of earlier runs' deltas, if there are any."""
        return Opening(self.job.id, copied=self._sections) if self._history else None

    def complete_texts(self) -> list[str] | Failure:
        """Of a constrained job that is over: its texts that must follow the schema, or why it fails."""
        texts = [""] * self._choices
        for delta in unpacked(self.seq, self._record):
            texts[delta.index] += delta.text
        return complete_texts(texts, self._finishes, stops=any(self.job.sampling.stop))

    def stop(self, state: JobState, failure: Failure) -> None:
        """Nothing more is started or shown; the first reason stands. The engine still owes last pieces of what it was
        given."""
        self._stopped = self._stopped or (state, failure)
        self.start_no_more()

    def terminal(self, worker: str, generated: Generated) -> Terminal:
        """The end of the job, with everything a reader may still ask for. `generated` are its stamps in Redis time."""
        state, failure = self._stopped or (JobState.COMPLETED, None)
        return Terminal(
            self.job.id,
            state,
            self.seq,
            tuple([finish or "stop" for finish in self._finishes] if state is JobState.COMPLETED else self._finishes),
            self._usage(),
            failure,
            worker,
            generated.first // 1000,
            (*self._sections, Section(self.opening.first, Run(worker, self.number))),
            packed(self.seq, self._record),
            generated,
        )

    def _usage(self) -> Usage:
        """Each prompt is counted once, whatever `n`; tokens of earlier attempts count like the others."""
        prompts = [self._prompts.get(index, (0, 0)) for index in range(self._choices)]
        return Usage(
            self._once([size for size, _ in prompts]), self._completion, self._once([each for _, each in prompts])
        )

    def _once(self, tokens: Sequence[int]) -> int:
        """Of every prompt those of the choice that counts most."""
        n = self.job.sampling.n
        return sum(tokens) if n == 1 else sum([max(tokens[at : at + n]) for at in range(0, self._choices, n)])


def prompt_of(job: Job, number: int) -> Sequence[ChatTurn] | str | Sequence[int]:
    """One of its prompts."""
    prompt = job.prompt
    if isinstance(prompt, Chat):
        return prompt.turns
    return prompt.texts[number] if isinstance(prompt, Text) else prompt.ids[number]


def samples(job: Job) -> Iterator[Request]:
    """For each of its prompts one choice, as an engine may check it."""
    sampling = replace(job.sampling, n=1)
    for number in range(prompt_count(job.prompt)):
        yield Request(f"{job.id}/{number}", prompt_of(job, number), sampling, (), job.tenant)
