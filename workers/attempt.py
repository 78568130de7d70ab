"""One claimed job on its way through the engine: requests out, pieces in, numbered deltas and a terminal out.

It knows neither Redis nor which engine runs it; it decides nothing but when the job is over and how.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from streaming.lease import SILENT, Claim
from streaming.messages import Chat, Delta, Failure, State, Terminal, Text, Turn, Usage
from workers.engine import Piece, Request

EXPIRED = Failure("deadline_exceeded", "The job's deadline passed before it was done.", 408)
CANCELLED = Failure("job_cancelled", "The job was cancelled.", 409)


class Attempt:
    """`history` are the deltas that earlier attempts logged."""

    def __init__(self, claim: Claim, history: Sequence[Delta]) -> None:
        self.claim = claim
        self.job = claim.job
        self.rows = list(history)
        self.first_ms = 0
        self.deadline: asyncio.TimerHandle | None = None
        """Of the worker's, kept here so that it ends with the attempt."""
        self._addresses = list(claim.reply) if claim.job.stream else []
        self._finishes = [""] * self.job.choices
        for row in history:
            if row.finish:
                self._finishes[row.index] = row.finish
        self._prompt_tokens = [0] * self.job.choices
        self._cached_tokens = [0] * self.job.choices
        self._stopped: tuple[State, Failure] | None = None
        self._open: set[int] = set()
        """Choices the engine still owes a last piece."""

    @property
    def seq(self) -> int:
        return self.rows[-1].seq if self.rows else 0

    @property
    def over(self) -> bool:
        """Every request has had its last piece."""
        return not self._open

    @property
    def stopped(self) -> bool:
        return self._stopped is not None

    @property
    def addresses(self) -> Sequence[str]:
        """Where its deltas go."""
        return self._addresses or (SILENT,)

    def follow(self, address: str) -> None:
        """One more reader."""
        if address not in self._addresses:
            self._addresses.append(address)

    def requests(self) -> list[Request]:
        """What is still to be generated: one request for each choice that has not finished."""
        requests = []
        for index in range(self.job.choices):
            past = [(row.text, row.ids, row.n) for row in self.rows if row.index == index]
            if not self._finishes[index] and self._spent(past):
                self._finishes[index] = "length"
            if not self._finishes[index]:
                requests.append(self._request(index, past))
        self._open = {index_of(request.id) for request in requests}
        return requests

    def _spent(self, past: Sequence[tuple[str, Sequence[int], int]]) -> bool:
        limit = self.job.sampling.max_tokens
        return limit is not None and sum(count for _, _, count in past) >= limit

    def _request(self, index: int, past: Sequence[tuple[str, Sequence[int], int]]) -> Request:
        sampling = self.job.sampling
        copy = index % sampling.n
        # Copies of one prompt must differ: each has a seed of its own.
        seed = None if sampling.seed is None else sampling.seed + copy
        sampling = msgspec.structs.replace(sampling, n=1, seed=seed)
        return Request(f"{self.job.id}/{index}", self._prompt(index // self.job.sampling.n), sampling, past)

    def _prompt(self, number: int) -> Sequence[Turn] | str | Sequence[int]:
        match self.job.prompt:
            case Chat(turns):
                return turns
            case Text(texts):
                return texts[number]
            case tokens:
                return tokens.ids[number]

    def live_ids(self) -> list[str]:
        """Engine ids of the requests that are not over."""
        return [f"{self.job.id}/{index}" for index in self._open]

    def take(self, piece: Piece, now_ms: int) -> Delta | None:
        """One piece as a numbered delta, or None if it shows nothing. What comes after a stop is not shown."""
        index = index_of(piece.id)
        if piece.last:
            self._open.discard(index)
            self._prompt_tokens[index] = piece.prompt_tokens
            self._cached_tokens[index] = piece.cached_tokens
        if self._stopped is not None:
            return None
        if piece.failure is not None:
            self.stop(State.FAILED, piece.failure)
            return None
        if piece.finish == "cancelled":
            self.stop(State.CANCELLED, CANCELLED)
            return None
        if not (piece.text or piece.ids or piece.n or piece.finish):
            return None
        self.first_ms = self.first_ms or now_ms
        delta = Delta(self.job.id, self.seq + 1, index, piece.text, piece.ids, piece.n, piece.finish, piece.logprobs)
        self._finishes[index] = piece.finish
        self.rows.append(delta)
        return delta

    def stop(self, state: State, failure: Failure) -> None:
        """Nothing more is shown; the first reason stands. The engine still owes its last pieces."""
        self._stopped = self._stopped or (state, failure)

    def abandon(self) -> None:
        """The engine will give nothing more for this job."""
        self._open.clear()

    def terminal(self, worker: str) -> Terminal:
        """The end of the job, with everything a reader may still ask for."""
        state, failure = self._stopped or (State.COMPLETED, None)
        return Terminal(
            self.job.id,
            state,
            self.seq,
            tuple(finish or "stop" for finish in self._finishes) if state is State.COMPLETED else tuple(self._finishes),
            self._usage(),
            failure,
            worker,
            self.first_ms,
            tuple(self.rows),
        )

    def _usage(self) -> Usage:
        """Each prompt is counted once, whatever `n`; tokens of earlier attempts count like the others."""
        n = self.job.sampling.n
        prompts = range(0, self.job.choices, n)
        return Usage(
            prompt=sum(max(self._prompt_tokens[first : first + n]) for first in prompts),
            completion=sum(row.n for row in self.rows),
            cached=sum(max(self._cached_tokens[first : first + n]) for first in prompts),
        )


def index_of(request_id: str) -> int:
    """The choice an engine id stands for."""
    return int(request_id.rpartition("/")[2])


def job_of(request_id: str) -> str:
    """The job an engine id stands for."""
    return request_id.rpartition("/")[0]
