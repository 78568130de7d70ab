"""Requests of a report: each request's record joined to its delivery, and the latencies that follow from both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from telemetry.latency import GROUPS, PARTS, Split, Stamps, first_seen, split
from telemetry.records.schema import REFUSED, DeliveryRecord, Record, RequestRecord, SampleRecord

PART_NAMES = tuple(part.name for part in PARTS)
GROUP_OF = {part: group for group, parts in GROUPS.items() for part in parts}
"""The group of each part."""


@dataclass(frozen=True)
class ReportedRequest:
    """One request. Times are milliseconds; None: the request has no such time."""

    record: RequestRecord
    delivery: DeliveryRecord | None = None

    @property
    def stamps(self) -> Stamps:
        """The stamps of the record and of the delivery. One that was not received, as far as is known, begins when it
        was accepted."""
        known = self.record.stamps
        known = replace(known, received=known.received or known.accepted)
        if (sent := self.delivery) is None:
            return known
        return replace(
            known,
            first_got=sent.first_got_us or None,
            first_sent=sent.first_sent_us or None,
            last_got=sent.last_got_us or None,
            last_sent=sent.last_sent_us or None,
        )

    @property
    def split(self) -> Split:
        """Its time by parts, in microseconds."""
        return split(self.stamps, over=True)

    @property
    def refused(self) -> bool:
        return self.record.state == REFUSED

    @property
    def completed(self) -> bool:
        return self.record.state == "completed"

    @property
    def wait_ms(self) -> float | None:
        """From acceptance to the first claim; to its end, if no worker claimed it."""
        accepted = self.record.accepted_us
        until = self.record.started_us or self.record.claimed_us or self.record.ended_us
        return max(0, until - accepted) / 1000 if accepted else None

    @property
    def ttft_ms(self) -> float | None:
        """From receipt to the first token, as `first_seen` defines that."""
        stamps = self.stamps
        first = first_seen(stamps, whole=self.delivery is not None and self.delivery.whole)
        return None if first is None or stamps.received is None else max(0, first - stamps.received) / 1000

    @property
    def itl_ms(self) -> float | None:
        """Mean time between two tokens of one of its texts, after the first, in the engine."""
        first, last, own = self.record.first_us, self.record.last_us, self.own_tokens / (self.record.choices or 1)
        return max(0, last - first) / 1000 / (own - 1) if first and last and own > 1 else None

    @property
    def e2e_ms(self) -> float | None:
        """From receipt to the end of the answer; to the end of the job, if no client waited."""
        whole = self.split.end_to_end
        return None if whole is None else max(0, whole) / 1000

    @property
    def own_tokens(self) -> int:
        """Tokens that the last attempt has generated."""
        return max(0, self.record.completion_tokens - self.record.continued_tokens)


@dataclass
class Evidence:
    """All records of a window: requests, and the samples of each process in the order of time."""

    requests: list[ReportedRequest] = field(default_factory=list)
    samples: dict[tuple[str, int], list[SampleRecord]] = field(default_factory=dict)
    """By name and pid of the process."""
    interrupted: bool = False
    """Whether Ctrl-C ended the reading, so that records are missing."""


def evidence_of(records: Iterable[Record], *, keep_partial: bool = False) -> Evidence:
    """Join the records of a window. A delivery whose request is not in the window is left out.

    Args:
        keep_partial: Ctrl-C ends the reading, and what was read is returned, if there is a request in it.
    """
    deliveries: dict[str, DeliveryRecord] = {}
    requests: list[RequestRecord] = []
    found = Evidence()
    try:
        for record in records:
            if isinstance(record, RequestRecord):
                requests.append(record)
            elif isinstance(record, DeliveryRecord):
                deliveries.setdefault(record.id, record)
            else:
                found.samples.setdefault((record.process, record.pid), []).append(record)
    except KeyboardInterrupt:
        if not (keep_partial and requests):
            raise
        found.interrupted = True
    requests.sort(key=lambda each: (each.ended_us, each.id))
    found.requests = [ReportedRequest(record, deliveries.get(record.id)) for record in requests]
    for samples in found.samples.values():
        samples.sort(key=lambda sample: sample.at_us)
    return found
