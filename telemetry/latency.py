"""Latency definitions: names and formulas of all latencies of a request (TTFT, ITL, TPOT, end-to-end and their parts).

Pure. Callers pass timestamps of one clock.

The timestamps are t0 to t6 of the ScaleLLM paper, with queueing as a part of its own. Two of the paper's formulas are
corrected: time between tokens is seconds per token, not its inverse, and the end-to-end time of a streamed answer ends
with its last token, not with its first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from msgspec.structs import asdict, replace

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


class Stamps(msgspec.Struct, frozen=True):
    """Timestamps of a request in microseconds of one clock; 0: not reached, or unknown."""

    received: int = 0
    """t1: the API has the request's first byte. A caller that knows t0 (the client sent it) sets that instead."""
    accepted: int = 0
    """t1e: the job is in its lane."""
    started: int = 0
    """Its first claim by a worker."""
    claimed: int = 0
    """t1d: the claim of the attempt that generated the first token; later than the first claim if the attempts before
    it were lost, or were handed back."""
    released: int = 0
    """t1g: the worker has submitted it to the engine. Unknown of an attempt that did not end the job, as t2."""
    scheduled: int = 0
    """t2: the engine has begun to run it."""
    first_token: int = 0
    """t2f: the engine has generated its first token, whichever attempt that was: a reader could see it from then on."""
    resumed: int = 0
    """The first token of the attempt that ended the job, if an earlier one had generated the job's first."""
    last_token: int = 0
    """t3: the engine has generated its last token."""
    first_got: int = 0
    """t4f: the API process has its first token."""
    first_sent: int = 0
    """t5 as a server sees it: written to the network. A caller that knows when the client had it sets that instead."""
    last_got: int = 0
    """t4: the API process has its end."""
    last_sent: int = 0
    """t6: the last token, as t5."""
    ended: int = 0
    """Its terminal record was written."""
    kept: int | None = None
    """No timestamp, but for how long earlier attempts generated the text that the last one continued; None: the
    first token is that of the attempt that ended the job."""

    def continued(self, shown: int, claimed: int, kept: int) -> Stamps:
        """These stamps, if an attempt that was `claimed` earlier generated the first token that was `shown`; 0: not."""
        if not shown:
            return self
        claimed = claimed or self.started
        later = {"claimed": claimed, "released": 0, "scheduled": 0, "first_token": shown, "resumed": self.first_token}
        return replace(self, **later, kept=kept)


STAMPS = tuple(name for name in Stamps.__struct_fields__ if name != "kept")
OF_ANSWER = ("first_got", "first_sent", "last_got", "last_sent")
"""Those of the API process."""


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

PART_NAMES = tuple([part.name for part in PARTS])

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


def _lengths(times: Sequence[int]) -> dict[str, int]:
    """Lengths of the parts, given when the first one began and when each ended; 0: not known.

    If the stamp between two parts is unknown, the later part gets the time of both.
    """
    found: dict[str, int] = {}
    since = times[0]
    for name, end in zip(PART_NAMES, times[1:], strict=False):
        if end:
            if since:
                found[name] = end - since
            since = end
    return found


def engine_parts(times: Sequence[int], lost: int = 0) -> dict[str, int]:
    """Lengths of the parts up to the engine's last token, as `split` has them; a cheaper form for counting.

    Args:
        times: when the request was received and when each of these parts ended, in one unit; 0: not known.
        lost: the time in decode that was lost to retries.
    """
    parts = _lengths(times)
    for name, moved in (("retries", lost), ("decode", -lost)) if lost else ():
        if name in parts:
            parts[name] += moved
    return {name: max(0, spent) for name, spent in parts.items()}


def first_seen(stamps: Stamps, *, whole: bool) -> int:
    """When the reader of an answer saw its first token, the one meaning of "first token" in all figures; 0: not known.

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
    """Divide a request's time among its parts, as `_lengths` does. The time between the last stamp of a job and its
    early end belongs to the part it was in.

    Args:
        over: the job has ended.
        unsent: the reason given where the answer has no stamp.
    """
    at = asdict(stamps)
    ends = {part.name: at[part.ends] for part in PARTS}
    cut = over and not stamps.last_token
    if cut:
        reached = [number for number, name in enumerate(PART_NAMES[:-1]) if ends[name]]
        ends[PART_NAMES[max(reached, default=-1) + 1]] = stamps.ended
    known = _lengths((stamps.received, *ends.values()))
    parts: dict[str, int | None] = {name: known.get(name) for name in PART_NAMES}
    reasons = _reasons(known, ends, cut=cut, unsent=unsent if over else "not yet")
    first, end = stamps.first_token, ends["decode"]
    if stamps.kept is not None and first and end:
        lost = lost_between(first, stamps.resumed or end, stamps.kept)
        before = parts["retries"] or 0
        parts["retries"], parts["decode"] = before + lost, (parts["decode"] or 0) - lost
        reasons.pop("retries", None)
        if lost > before:  # the first token came first
            parts |= {name: parts.pop(name) for name in ("retries", "decode", "egress_tail")}
    parts[EGRESS_FIRST.name], reason = _egress_first(stamps, unsent if over else "not yet")
    if reason:
        reasons[EGRESS_FIRST.name] = reason
    until = next((name for name in ("last_sent", "last_token", "ended") if at[name]), "") if over else ""
    whole = int(end_to_end(stamps.received, at[until])) if until and stamps.received else None
    return Split(parts, reasons, whole, until)


def _reasons(known: Mapping[str, int], ends: Mapping[str, int], *, cut: bool, unsent: str) -> dict[str, str]:
    """Why each part of unknown length has none. `cut`: the job ended early."""
    reasons, later = dict[str, str](), ""
    for name in reversed(PART_NAMES):
        if name in known:
            later = name
        elif ends[name]:
            reasons[name] = "its beginning has no stamp"
        elif later:
            reasons[name] = "the job ended before" if cut else f"not told apart from {later}"
        else:  # of a job that ended early the answer alone can be unsent: the parts before it did not happen
            reasons[name] = NOT_REACHED if cut and name != PART_NAMES[-1] else unsent
    return dict(reversed(reasons.items()))


def _egress_first(stamps: Stamps, unsent: str) -> tuple[int | None, str]:
    """The length of the part egress_first, or None and the reason."""
    made, got, sent = stamps.first_token, stamps.first_got, stamps.first_sent
    if not sent:
        return None, unsent
    if not made:
        return None, "there was no token"
    if 0 < got < made and stamps.started != stamps.claimed:
        return None, "the first token came from an earlier attempt"
    return sent - made, ""
