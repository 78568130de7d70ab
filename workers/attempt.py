"""One claimed job on its way through the engine: requests out, pieces in, numbered deltas and a terminal out.

It knows neither Redis nor which engine runs it; it decides nothing but when the job is over and how.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from streaming.lease import SILENT, Claim
from streaming.messages import (
    Chat,
    Delta,
    Failure,
    Generated,
    State,
    Terminal,
    Text,
    Turn,
    Usage,
    encode,
    encode_delta,
    packed,
    unpacked,
)
from workers.engine import Piece, Request
from workers.stamps import AttemptStamps

EXPIRED = Failure("deadline_exceeded", "The job's deadline passed before it was done.", 408)
CANCELLED = Failure("job_cancelled", "The job was cancelled.", 409)


class Attempt:
    """`stream` is the number that stands for the job in this worker's frames, `history` are the deltas that earlier
    attempts logged."""

    def __init__(self, claim: Claim, stream: int, history: Sequence[Delta]) -> None:
        self.claim = claim
        self.stream = stream
        self.job = claim.job
        self.partition = claim.partition
        self._history = history
        self._record = bytearray(b"".join([encode(replace(row, stream=stream)) for row in history]))
        """All deltas of the job as they are logged, one behind the other. Kept as objects, each in a place of its own,
        they would leave nothing of what a token needs in the processor's cache."""
        self._completion = sum([row.n for row in history])
        """Tokens generated."""
        self.seq = history[-1].seq if history else 0
        """The last delta's number."""
        self._lost = self.seq - len(history)
        """Deltas of earlier attempts that no log holds any more: none, unless a store lost them."""
        self.stamps = AttemptStamps()
        self._begun = False
        self.deadline: asyncio.TimerHandle | None = None
        """Of the worker's, kept here so that it ends with the attempt."""
        self.addresses: Sequence[str] = (claim.reply if claim.job.stream else ()) or (SILENT,)
        """Where its deltas go."""
        self.unnamed = True
        """Some of them have not been told yet what its number is."""
        self._choices = choices = self.job.choices
        self._finishes = [""] * choices
        for row in history:
            if row.finish:
                self._finishes[row.index] = row.finish
        self._prompt_tokens = [0] * choices
        self._cached_tokens = [0] * choices
        self._stopped: tuple[State, Failure] | None = None
        self._open: set[int] = set()
        """Choices the engine still owes a last piece."""

    @property
    def _count(self) -> int:
        """Of deltas in the record."""
        return self.seq - self._lost

    @property
    def over(self) -> bool:
        """Every request has had its last piece."""
        return not self._open

    @property
    def stopped(self) -> bool:
        return self._stopped is not None

    def follow(self, address: str) -> None:
        """One more reader."""
        if address not in self.addresses:
            self.addresses = (*(known for known in self.addresses if known != SILENT), address)
            self.unnamed = True

    def requests(self) -> dict[int, Request]:
        """What is still to be generated: by its index, a request for each choice that has not finished."""
        requests = {}
        for index in range(self._choices):
            past = [(row.text, row.ids, row.n) for row in self._history if row.index == index]
            if not self._finishes[index] and self._spent(past):
                self._finishes[index] = "length"
            if not self._finishes[index]:
                requests[index] = self._request(index, past)
        self._open = set(requests)
        return requests

    def _spent(self, past: Sequence[tuple[str, Sequence[int], int]]) -> bool:
        limit = self.job.sampling.max_tokens
        return limit is not None and sum([count for _, _, count in past]) >= limit

    def _request(self, index: int, past: Sequence[tuple[str, Sequence[int], int]]) -> Request:
        sampling = self.job.sampling
        prompt = self._prompt(index // sampling.n)
        if sampling.n > 1:
            # Copies of one prompt must differ: each has a seed of its own.
            seed = None if sampling.seed is None else sampling.seed + index % sampling.n
            sampling = replace(sampling, n=1, seed=seed)
        return Request(self._request_id(index), prompt, sampling, past)

    def _request_id(self, index: int) -> str:
        return f"{self.job.id}/{index}"

    def _prompt(self, number: int) -> Sequence[Turn] | str | Sequence[int]:
        prompt = self.job.prompt
        if isinstance(prompt, Chat):
            return prompt.turns
        return prompt.texts[number] if isinstance(prompt, Text) else prompt.ids[number]

    def live_ids(self) -> list[str]:
        """Engine ids of the requests that are not over."""
        return [self._request_id(index) for index in self._open]

    def take(self, index: int, piece: Piece, now: float) -> bytes | None:
        """One piece of one choice, which came `now` (monotonic), as a numbered delta, encoded, or None if it shows
        nothing. What comes after a stop is not shown. Done once a token."""
        finish = piece.finish
        if finish or piece.failure is not None:
            self._close(index, piece, now)
        if self._stopped is not None or not (piece.n or piece.text or finish or piece.ids):
            return None
        if not self._begun:
            self._begun = True
            self.stamps.begin(now)
        self.seq += 1
        n = piece.n
        delta = encode_delta(Delta(self.stream, self.seq, index, piece.text, piece.ids, n, finish, piece.logprobs))
        self._completion += n
        self._record += delta
        return delta

    def _close(self, index: int, piece: Piece, now: float) -> None:
        """Take note of a choice's last piece."""
        self._open.discard(index)
        self.stamps.finish(piece.times, now)
        self._prompt_tokens[index] = piece.prompt_tokens
        self._cached_tokens[index] = piece.cached_tokens
        if piece.failure is not None:
            self.stop(State.FAILED, piece.failure)
        elif piece.finish == "cancelled":
            self.stop(State.CANCELLED, CANCELLED)
        elif self._stopped is None:
            self._finishes[index] = piece.finish

    def logged(self) -> list[bytes]:
        """All deltas of the job, each encoded, as they were given out."""
        return [encode(delta) for delta in unpacked(self._count, self._record)]

    def stop(self, state: State, failure: Failure) -> None:
        """Nothing more is shown; the first reason stands. The engine still owes its last pieces."""
        self._stopped = self._stopped or (state, failure)

    def abandon(self) -> None:
        """The engine will give nothing more for this job."""
        self._open.clear()

    def terminal(self, worker: str, generated: Generated) -> Terminal:
        """The end of the job, with everything a reader may still ask for. `generated` are its stamps in Redis time."""
        state, failure = self._stopped or (State.COMPLETED, None)
        return Terminal(
            self.job.id,
            state,
            self.seq,
            tuple([finish or "stop" for finish in self._finishes] if state is State.COMPLETED else self._finishes),
            self._usage(),
            failure,
            worker,
            generated.first // 1000,
            packed(self._count, self._record),
            generated,
        )

    def _usage(self) -> Usage:
        """Each prompt is counted once, whatever `n`; tokens of earlier attempts count like the others."""
        return Usage(self._once(self._prompt_tokens), self._completion, self._once(self._cached_tokens))

    def _once(self, tokens: Sequence[int]) -> int:
        """Of every prompt those of the choice that counts most."""
        n = self.job.sampling.n
        return sum(tokens) if n == 1 else sum([max(tokens[at : at + n]) for at in range(0, self._choices, n)])
