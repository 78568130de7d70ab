"""What the latencies of a request are called and how each is computed: the one place that defines them.

Pure. Callers bring the times, all of one clock; it knows neither where they were taken nor where they are shown.

The stamps are t0 to t6 of the ScaleLLM paper, with the time in the queue told apart. What it prints wrong is put right:
time between tokens is seconds per token, not its inverse, and a streamed answer's end-to-end time goes to its last
token, not to its first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

# --- one request, as its client sees it ------------------------------------------------------------------------------


def time_to_first_token(sent: float, first: float) -> float:
    """TTFT = t5 - t0: from sending the request to having its first token. The same with t4 in the place of t5 (the
    first token is at the API process) is the gateway's TTFT."""
    return first - sent


def end_to_end(sent: float, last: float) -> float:
    """t6 - t0: to the last token. Equal to TTFT where the answer comes in one piece."""
    return last - sent


def time_per_output_token(first: float, last: float, tokens: int) -> float | None:
    """TPOT, one request's mean ITL = (t6 - t5) / (Ng - 1). None for fewer than two tokens: there is nothing between."""
    return (last - first) / (tokens - 1) if tokens > 1 else None


def inter_token_latency(before: float, now: float, tokens: int) -> float:
    """ITL of a chunk of `tokens` that came at `now`, the chunk before it at `before`: so many equal gaps."""
    return (now - before) / (tokens or 1)


@dataclass(frozen=True, slots=True)
class Latency:
    """One request, in seconds of one clock. `tokens` are those of its answer."""

    sent: float
    first: float
    last: float
    tokens: int

    @property
    def ttft(self) -> float:
        return time_to_first_token(self.sent, self.first)

    @property
    def tpot(self) -> float | None:
        return time_per_output_token(self.first, self.last, self.tokens)

    @property
    def end_to_end(self) -> float:
        return end_to_end(self.sent, self.last)


@dataclass(frozen=True, slots=True)
class Objective:
    """The longest latencies, in seconds, that a service promises; None: no promise."""

    ttft: float | None = None
    tpot: float | None = None
    end_to_end: float | None = None

    def met(self, latency: Latency) -> bool:
        """All of them by the same request: a fast start does not make up for slow tokens."""
        pairs = ((self.ttft, latency.ttft), (self.tpot, latency.tpot), (self.end_to_end, latency.end_to_end))
        return all(limit is None or value is None or value <= limit for limit, value in pairs)


def goodput(latencies: Iterable[Latency], objective: Objective, seconds: float) -> float:
    """Requests per second that were answered within the objective, over a run of `seconds`."""
    return sum(map(objective.met, latencies)) / seconds


# --- where a request's time went -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stamps:
    """When a request passed each place, in microseconds of one clock; None: it has not, or nobody can say."""

    received: int | None = None
    """t1: the API has the request's head. Who knows when the client sent it (t0) puts that here."""
    accepted: int | None = None
    """t1e: the job is in its lane."""
    started: int | None = None
    """Its first claim by a worker."""
    claimed: int | None = None
    """t1d: its last claim; later than the first if a worker was lost or handed it back."""
    released: int | None = None
    """t1g: given to the engine."""
    scheduled: int | None = None
    """t2: the engine has first run it."""
    first_token: int | None = None
    """t2f: the engine has its first token, of the attempt that ended the job."""
    last_token: int | None = None
    """t3: the engine is done with it."""
    first_got: int | None = None
    """t4f: its first token is at the API process."""
    first_sent: int | None = None
    """t5, as far as a server can say: given to the network. Who knows when the client had it puts that here."""
    last_got: int | None = None
    """t4: its end is at the API process."""
    last_sent: int | None = None
    """t6, as t5."""
    ended: int | None = None
    """Its terminal record was written."""


class LatencyPart(NamedTuple):
    """A stretch of a request's way, between two stamps."""

    name: str
    begins: str
    ends: str
    meaning: str


PARTS = (
    LatencyPart("ingress", "received", "accepted", "reading the request, and putting the job on its lane"),
    LatencyPart("queue", "accepted", "started", "waiting for a worker"),
    LatencyPart("retries", "started", "claimed", "earlier attempts, whose workers were lost or handed it back"),
    LatencyPart("gate", "claimed", "released", "from the claim to the engine"),
    LatencyPart("engine_wait", "released", "scheduled", "waiting inside the engine"),
    LatencyPart("prefill", "scheduled", "first_token", "the engine, up to the first token"),
    LatencyPart("decode", "first_token", "last_token", "the engine, from the first token to the last"),
    LatencyPart("egress_tail", "last_token", "last_sent", "from the engine's last token to the client"),
)
"""In order, each beginning where the one before it ends: together they are the end-to-end time."""

EGRESS_FIRST = LatencyPart("egress_first", "first_token", "first_sent", "from the engine's first token to the client")
"""Runs beside decode, so it is no part of the sum."""

GROUPS = {
    "gateway": ("ingress", "gate", "egress_tail"),
    "queue": ("queue", "retries", "engine_wait"),
    "engine": ("prefill", "decode"),
}
"""Whose time a part is: what the path itself costs, waiting for a place, generating."""


@dataclass(frozen=True, slots=True)
class Split:
    """A request's time by parts, in microseconds. A part that is None has its reason."""

    parts: dict[str, int | None]
    reasons: dict[str, str]
    end_to_end: int | None
    """None while it goes on."""
    until: str
    """The stamp at which the end-to-end time ends, "" while it goes on."""

    @property
    def total(self) -> int:
        """The sum of PARTS, as far as they are known."""
        return sum(self.parts[part.name] or 0 for part in PARTS)

    def group(self, name: str) -> int:
        """The time of one of GROUPS."""
        return sum(self.parts[part] or 0 for part in GROUPS[name])


def split(stamps: Stamps, *, over: bool, unsent: str = "no answer was sent") -> Split:
    """Divide a request's time among its parts. `over`: the job has ended; `unsent`: why no answer has a stamp.

    Two parts that meet at a stamp nobody can give cannot be told apart: the later one has the time of both. What a job
    spent between its last stamp and an early end belongs to the part it was in.
    """
    ends = {part.name: _at(stamps, part.ends) for part in PARTS}
    cut = _cut(ends) if over and stamps.last_token is None else ""
    if cut:
        ends[cut] = stamps.ended
    parts: dict[str, int | None] = {}
    reasons: dict[str, str] = {}
    since, unknown = stamps.received, list[str]()
    for part in PARTS:
        end = ends[part.name]
        parts[part.name] = None if end is None or since is None else end - since
        if end is None:
            unknown.append(part.name)
        elif since is None:
            reasons[part.name] = "its beginning has no stamp"
        else:
            word = "the job ended before" if cut else f"not told apart from {part.name}"
            reasons |= dict.fromkeys(unknown, word)
            unknown = []
        since = since if end is None else end
    reasons |= dict.fromkeys(unknown, unsent if over else "not yet")
    parts[EGRESS_FIRST.name], reason = _egress_first(stamps, unsent if over else "not yet")
    if reason:
        reasons[EGRESS_FIRST.name] = reason
    until = _end(stamps) if over else ""
    finish = _at(stamps, until) if until else None
    whole = None if finish is None or stamps.received is None else int(end_to_end(stamps.received, finish))
    return Split(parts, reasons, whole, until)


def bottleneck(times: Mapping[str, float]) -> str:
    """The group, or part, that takes most of the time."""
    return max(times, key=lambda name: times[name])


def _cut(ends: Mapping[str, int | None]) -> str:
    """The part in which a job ended that never had its last token."""
    reached = [number for number, part in enumerate(PARTS[:-1]) if ends[part.name] is not None]
    return PARTS[max(reached, default=-1) + 1].name


def _end(stamps: Stamps) -> str:
    """The last there is of an answer, of the generation, of the job."""
    return next((name for name in ("last_sent", "last_token", "ended") if _at(stamps, name) is not None), "")


def _egress_first(stamps: Stamps, unsent: str) -> tuple[int | None, str]:
    """The part, or why there is none."""
    made, got, sent = stamps.first_token, stamps.first_got, stamps.first_sent
    if sent is None:
        return None, unsent
    if made is None:
        return None, "there was no token"
    if got is not None and got < made and stamps.started != stamps.claimed:
        return None, "the first token came from an earlier attempt"
    return sent - made, ""


def _at(stamps: Stamps, name: str) -> int | None:
    stamp: int | None = getattr(stamps, name)
    return stamp
