"""Latency definitions: names and formulas of all latencies of a request (TTFT, ITL, TPOT, end-to-end and their parts).

Pure. Callers pass timestamps of one clock.

The timestamps are t0 to t6 of the ScaleLLM paper, with queueing as a part of its own. Two of the paper's formulas are
corrected: time between tokens is seconds per token, not its inverse, and the end-to-end time of a streamed answer ends
with its last token, not with its first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

# --- one request, as its client sees it ------------------------------------------------------------------------------


def time_to_first_token(sent: float, first: float) -> float:
    """TTFT = t5 - t0: from sending the request to receiving its first token. With t4 instead of t5 (the API process has
    the first token) it is the gateway's TTFT."""
    return first - sent


def end_to_end(sent: float, last: float) -> float:
    """t6 - t0: from sending the request to its last token. Equal to TTFT for an answer in one piece."""
    return last - sent


def time_per_output_token(first: float, last: float, tokens: int) -> float | None:
    """TPOT, one request's mean ITL = (t6 - t5) / (Ng - 1). None for fewer than two tokens."""
    return (last - first) / (tokens - 1) if tokens > 1 else None


def inter_token_latency(before: float, now: float, tokens: int) -> float:
    """ITL of a chunk of `tokens` that came at `now`, after a chunk at `before`: `tokens` equal gaps. All that one read
    from Redis brings a reader is one chunk."""
    return (now - before) / (tokens or 1)


# --- the parts of a request's time -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stamps:
    """Timestamps of a request in microseconds of one clock; None: not reached, or unknown."""

    received: int | None = None
    """t1: the API has the request's first byte. A caller that knows t0 (the client sent it) sets that instead."""
    accepted: int | None = None
    """t1e: the job is in its lane."""
    started: int | None = None
    """Its first claim by a worker."""
    claimed: int | None = None
    """t1d: the claim of the attempt that generated the first token; later than the first claim if the attempts before
    it were lost, or were handed back."""
    released: int | None = None
    """t1g: the worker has submitted it to the engine. Unknown of an attempt that did not end the job, as t2."""
    scheduled: int | None = None
    """t2: the engine has begun to run it."""
    first_token: int | None = None
    """t2f: the engine has generated its first token, whichever attempt that was: a reader could see it from then on."""
    resumed: int | None = None
    """The first token of the attempt that ended the job, if an earlier one had generated the job's first."""
    last_token: int | None = None
    """t3: the engine has generated its last token."""
    first_got: int | None = None
    """t4f: the API process has its first token."""
    first_sent: int | None = None
    """t5 as a server sees it: written to the network. A caller that knows when the client had it sets that instead."""
    last_got: int | None = None
    """t4: the API process has its end."""
    last_sent: int | None = None
    """t6: the last token, as t5."""
    ended: int | None = None
    """Its terminal record was written."""
    kept: int | None = None
    """No timestamp, but for how long earlier attempts generated the text that the last one continued; None: the
    first token is that of the attempt that ended the job."""

    def continued(self, shown: int, claimed: int, kept: int) -> Stamps:
        """These stamps, if an attempt that was `claimed` earlier generated the first token that was `shown`; 0: not."""
        if not shown:
            return self
        later = {"claimed": claimed or self.started, "released": None, "scheduled": None}
        return replace(self, **later, first_token=shown, resumed=self.first_token, kept=kept)


STAMPS = tuple(name for name in Stamps.__dataclass_fields__ if name != "kept")


class LatencyPart(NamedTuple):
    """An interval of a request's time, between two stamps."""

    name: str
    begins: str
    ends: str
    meaning: str


PARTS = (
    LatencyPart("ingress", "received", "accepted", "reading the request, and putting the job on its lane"),
    LatencyPart("queue", "accepted", "started", "waiting for a worker"),
    LatencyPart("retries", "started", "claimed", "lost to retries: by attempts that did not end it, and after them"),
    LatencyPart("gate", "claimed", "released", "from the claim to the engine"),
    LatencyPart("engine_wait", "released", "scheduled", "waiting inside the engine"),
    LatencyPart("prefill", "scheduled", "first_token", "the engine, up to the first token"),
    LatencyPart("decode", "first_token", "last_token", "the engine, from the first token to the last"),
    LatencyPart("egress_tail", "last_token", "last_sent", "from the engine's last token to the client"),
)
"""Consecutive intervals, whose sum is the end-to-end time. What retries cost after the first token is moved from decode
to retries, which then stand behind prefill if that is most of their cost."""

_NAMES = tuple([part.name for part in PARTS])

NOT_REACHED = "no worker got so far"
"""The reason of a part that a job did not come to."""

EGRESS_FIRST = LatencyPart("egress_first", "first_token", "first_sent", "from the engine's first token to the client")
"""Overlaps decode, so it is not part of the sum."""

GROUPS = {
    "gateway": ("ingress", "gate", "egress_tail"),
    "queue": ("queue", "engine_wait"),
    "recovery": ("retries",),
    "engine": ("prefill", "decode"),
}
"""Parts by cause: the overhead of the path, waiting for a slot, what lost attempts cost, generation."""


def lost_between(first: int, resumed: int, kept: int) -> int:
    """The time lost to retries between a job's first token and that of its last attempt (or its end, if that gave
    none), in which earlier attempts generated for `kept`."""
    return max(0, resumed - first - kept)


def engine_parts(times: Sequence[int], lost: int = 0) -> dict[str, int]:
    """Lengths of the parts up to the engine's last token, as `split` has them; a cheaper form for counting.

    Args:
        times: when the request was received and when each of these parts ended, in one unit; 0: not known.
        lost: the time in decode that was lost to retries.
    """
    parts, since = dict[str, int](), times[0]
    for name, end in zip(_NAMES, times[1:], strict=False):
        if end:
            if since:
                parts[name] = end - since
            since = end
    for name, moved in (("retries", lost), ("decode", -lost)) if lost else ():
        if name in parts:
            parts[name] += moved
    return {name: max(0, spent) for name, spent in parts.items()}


def first_seen(stamps: Stamps, *, whole: bool) -> int | None:
    """When the reader of an answer saw its first token, the one meaning of "first token" in all figures.

    A streamed answer: when the token was written to the connection. One in one piece (`whole`): when that was written.
    Of a job that no request waited for: when it was generated, from when on it could be read. It may be of an attempt
    that was lost, and of a text that was given up: the reader has seen it.
    """
    return stamps.last_sent if whole else stamps.first_sent or stamps.first_token


@dataclass(frozen=True, slots=True)
class Split:
    """A request's time by parts, in microseconds. `reasons` says why a part is None."""

    parts: dict[str, int | None]
    """In the order in which they happened."""
    reasons: dict[str, str]
    end_to_end: int | None
    """None while the request runs."""
    until: str
    """The stamp at which the end-to-end time ends; "" while the request runs."""

    @property
    def total(self) -> int:
        """The sum of the known PARTS."""
        return sum(self.parts[part.name] or 0 for part in PARTS)

    def group(self, name: str) -> int:
        """The time of one of GROUPS."""
        return sum(self.parts[part] or 0 for part in GROUPS[name])


def split(stamps: Stamps, *, over: bool, unsent: str = "no answer was sent") -> Split:
    """Divide a request's time among its parts.

    If the stamp between two parts is unknown, the later part gets the time of both. The time between the last stamp of
    a job and its early end belongs to the part it was in.

    Args:
        over: the job has ended.
        unsent: the reason given where the answer has no stamp.
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
    if cut:  # the answer alone can be unsent: the parts before it did not happen
        reasons |= {name: NOT_REACHED for name in unknown if name != PARTS[-1].name}
    first, end = stamps.first_token, ends["decode"]
    if stamps.kept is not None and first is not None and end is not None:
        lost = lost_between(first, stamps.resumed or end, stamps.kept)
        before = parts["retries"] or 0
        parts["retries"], parts["decode"] = before + lost, (parts["decode"] or 0) - lost
        reasons.pop("retries", None)
        if lost > before:  # the first token came first
            parts |= {name: parts.pop(name) for name in ("retries", "decode", "egress_tail")}
    parts[EGRESS_FIRST.name], reason = _egress_first(stamps, unsent if over else "not yet")
    if reason:
        reasons[EGRESS_FIRST.name] = reason
    until = _end(stamps) if over else ""
    finish = _at(stamps, until) if until else None
    whole = None if finish is None or stamps.received is None else int(end_to_end(stamps.received, finish))
    return Split(parts, reasons, whole, until)


def _cut(ends: Mapping[str, int | None]) -> str:
    """The part in which a job ended that has no last token."""
    reached = [number for number, part in enumerate(PARTS[:-1]) if ends[part.name] is not None]
    return PARTS[max(reached, default=-1) + 1].name


def _end(stamps: Stamps) -> str:
    """The stamp that ends the request: of its answer, else of the generation, else of the job."""
    return next((name for name in ("last_sent", "last_token", "ended") if _at(stamps, name) is not None), "")


def _egress_first(stamps: Stamps, unsent: str) -> tuple[int | None, str]:
    """The length of the part egress_first, or None and the reason."""
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
