"""Records: the JSON lines that every process keeps on the local disk, one struct for each kind.

A line holds no prompt, no answer, no key and nothing else that a client chose, but for the names of its model and its
tenant, which the settings list. docs/records.md describes every field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeAlias

import msgspec

from penstock.config import expanded
from telemetry.latency import Stamps

VERSION = 1
"""Version of all kinds. A reader skips lines of a greater one, and counts them. New fields do not raise it."""

REFUSED = "refused"
"""State of a request that became no job; the other states are those of jobs."""

KIND = "kind"


def _version() -> int:
    """The default of `v`: from a function, because a line leaves out fields that have a plain default."""
    return VERSION


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field=KIND, tag="request"):
    """The end of one request: exactly one for each, whatever ended it. Times are microseconds of Redis time (of a
    refused request: of its API process's clock), 0 where the request never came so far."""

    v: int = msgspec.field(default_factory=_version)
    id: str
    """Id of the job; of a refused request, the id of the request."""
    ended_us: int
    state: str
    """completed, failed, cancelled, expired, or refused."""
    model: str
    lane: str = ""
    tenant: str = ""
    by: str = ""
    """The process that ended it, as `penstock ps` names it: a worker, or one that swept or refused."""
    code: str = ""
    """Code of the error that its client was told."""
    cancelled_by: str = ""
    """Who cancelled it, as the job object says; "" also if a version that noted it nowhere did."""
    status: int = 0
    """HTTP status of a refused request."""
    received_us: int = 0
    accepted_us: int = 0
    started_us: int = 0
    """Its first claim."""
    claimed_us: int = 0
    """Its last claim."""
    released_us: int = 0
    scheduled_us: int = 0
    first_us: int = 0
    last_us: int = 0
    """The engine's first and last token, of the attempt that ended the job."""
    shown_us: int = 0
    """The job's first token, if an earlier attempt generated it."""
    shown_claimed_us: int = 0
    """The claim of that attempt."""
    kept_us: int = 0
    """For how long earlier attempts generated the text that the last one continued."""
    clock_us: int = 0
    """By how much the worker's stamps may be off."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Of all attempts, each token once."""
    cached_tokens: int = 0
    """Tokens of the prompt that the engine had in its cache."""
    continued_tokens: int = 0
    """Tokens that earlier attempts had generated, and this one continued."""
    choices: int = 1
    stream: bool = False
    attempts: int = 0
    lost: int = 0
    handed_back: int = 0
    preempted: int = 0
    """How many of the earlier attempts ended so."""

    @property
    def stamps(self) -> Stamps:
        """Its times, as the latency definitions need them; without those of its answer."""
        return Stamps(
            received=self.received_us,
            accepted=self.accepted_us,
            started=self.started_us or self.claimed_us,
            claimed=self.claimed_us,
            released=self.released_us,
            scheduled=self.scheduled_us,
            first_token=self.first_us,
            last_token=self.last_us,
            ended=self.ended_us,
        ).continued(self.shown_us, self.shown_claimed_us, self.kept_us)


class DeliveryRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field=KIND, tag="delivery"):
    """When the answer of a request went to its client; joined to the request by `id`. None of a request whose client
    did not wait. Times as in RequestRecord."""

    v: int = msgspec.field(default_factory=_version)
    id: str
    by: str = ""
    first_got_us: int = 0
    first_sent_us: int = 0
    last_got_us: int = 0
    last_sent_us: int = 0
    clock_us: int = 0
    whole: bool = False
    """The answer was sent in one piece, so it has no first token of its own."""


class RecordedDepth(msgspec.Struct, frozen=True, omit_defaults=True):
    """What waits in one lane of a model."""

    waiting: int = 0
    running: int = 0
    oldest_s: float = 0.0


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field=KIND, tag="sample"):
    """State of one process, every ten seconds, and at its start and its end. Counts grow from the process's start."""

    v: int = msgspec.field(default_factory=_version)
    at_us: int
    """Of the process's own clock."""
    role: str
    process: str
    """As `penstock ps` names it."""
    pid: int
    model: str = ""
    cpu_s: float
    """CPU time, user and system, of all threads."""
    rss_bytes: int = 0
    lag_ms: float = 0.0
    """The longest time since the last sample for which the event loop was late."""
    slots: int = 0
    running: int = 0
    waiting: int = 0
    """A worker: inside the engine."""
    kv_tokens: int = 0
    kv_used: int = 0
    steps: int = 0
    step_s: float = 0.0
    step_tokens: int = 0
    lanes: Mapping[str, RecordedDepth] = {}
    """The leading scheduler: by "model/lane"."""
    gpus: Mapping[str, float] = {}
    """Joules that each GPU of this machine has used, by its UUID, as the driver counts them. Empty: not known."""
    gpu_busy: Mapping[str, float] = {}
    """Share of the driver's last sample period, up to a second, in which each GPU ran a kernel; as `gpus`."""
    written: int = 0
    dropped: int = 0
    """Records of this process that were written and that were lost."""


Record: TypeAlias = RequestRecord | DeliveryRecord | SampleRecord

ENCODER = msgspec.json.Encoder()
DECODER = msgspec.json.Decoder(Record)


MIN_FILE_BYTES = 4096


class RecordSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [records]. The records stay on this machine."""

    enabled: bool = True
    """Whether records are kept."""
    dir: str = ""
    """Folder of the records; "": none are kept. `penstock up` uses records/ in its data folder if this is not set."""
    max_bytes: Annotated[int, msgspec.Meta(ge=MIN_FILE_BYTES)] = 2 * 1024**3
    """Of all files of the folder; the oldest go first."""
    keep_s: Annotated[float, msgspec.Meta(gt=0)] = 7 * 86_400.0
    """A file that was not written for so long is removed."""
    file_bytes: Annotated[int, msgspec.Meta(ge=MIN_FILE_BYTES)] = 64 * 1024**2
    """A process begins a new file when its present one has this size."""
    file_s: Annotated[float, msgspec.Meta(gt=0)] = 3600.0
    """A process begins a new file when its present one is this old."""
    sample_s: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """Between two samples of a process."""

    def __post_init__(self) -> None:
        if self.dir:
            msgspec.structs.force_setattr(self, "dir", str(expanded(self.dir)))
