"""Claims jobs for one worker: chooses the partition, the batch size, and when to stop claiming."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from penstock.engine import Capabilities, Failure
from streaming.errors import Fenced, NewerMessage, Unavailable
from streaming.jobs.codec import AddAddress, Cancel, Delta, Draft
from streaming.jobs.history import NOTHING, History
from streaming.jobs.job import Job, is_continuable
from streaming.jobs.lease import Claim, Lease, UnreadableClaim
from streaming.jobs.media import MediaLost, MediaStore
from streaming.jobs.reader import JobReader
from streaming.order import Priority
from telemetry.logs import EventLog
from workers.attempt import Attempt
from workers.choices import ChoiceStarter
from workers.held_jobs import HeldJobs
from workers.preemption import Preemption
from workers.settings import WorkerSettings

log = logging.getLogger(__name__)
events = EventLog(__name__)

MEDIA_LOST = Failure(
    "media_lost", "The store has lost an image, a recording or a document of the request: send it again.", 500
)
MAX_MEDIA_BYTES = 128 << 20
"""Of the media of all jobs that a worker runs, or of one with more. Each byte takes up to four in memory: as base64, in
the conversation and in two copies of the engine's request."""
MEDIA_INTERVAL_S = 0.02
"""How often a job that waits for room for its media looks for it."""
NEWER_PAUSE_S = 0.5
"""After a claim that brought jobs which only a newer version can read: they wait for a newer worker without being
claimed over and over."""


def job_restart_reason(job: Job, capabilities: Capabilities, history: Sequence[Delta]) -> str:
    """Why the job must be generated from its first token, without `history`; "" if it can be continued.

    An engine applies a JSON grammar from its root to the first token that it generates. Unless it can restore the
    grammar's state behind the logged tokens, a continuation is a second JSON text inside the first one.
    """
    if is_continuable(job, capabilities) or capabilities.reattaches:
        return ""
    counts, limit = Counter[int](), job.sampling.max_tokens
    for row in history:
        counts[row.index] += row.n
    for index in sorted(counts.keys() - {row.index for row in history if row.finish}):
        if limit is None or counts[index] < limit:
            what = "calls of tools" if job.tools is not None else "JSON output"
            return f"the engine cannot continue {what} that another attempt began (choice {index})"
    return ""


class Claimer:
    """Claims for one worker until `end`: as many jobs as the starter has room for, in a round at once when its event
    `look` is set."""

    def __init__(
        self,
        lease: Lease,
        reader: JobReader,
        media: MediaStore,
        settings: WorkerSettings,
        starter: ChoiceStarter,
        held: HeldJobs,
        preemption: Preemption,
        *,
        begin: Callable[[Claim, History, Failure | None], None],
        refuse: Callable[[UnreadableClaim], None],
        on_fenced: Callable[[int], None],
    ) -> None:
        """
        Args:
            begin: called with a claimed job, what earlier attempts generated, and why the engine can never run it.
            refuse: called with a claimed job whose record is unreadable.
            on_fenced: called with the partition in which this worker has lost its lease.
        """
        self._lease, self._reader, self._media, self._settings = lease, reader, media, settings
        self._starter, self._held, self._preemption, self._look = starter, held, preemption, starter.look
        self._begin, self._refuse, self._on_fenced = begin, refuse, on_fenced
        self._claims: dict[int, asyncio.Task[bool]] = {}
        """By partition, the claim that has no reply yet."""
        self._under_way: set[int] = set()
        """Partitions with a claim in flight, or whose claimed jobs are being begun."""
        self._media_turn = asyncio.Lock()
        """Held by the job whose media are loaded: those of each partition would find the same room."""
        self._early = defaultdict[str, list[Cancel | AddAddress]](list)
        """By job, what was heard of it before the reply of its claim arrived."""
        self._suspects: set[int] = set()
        """Partitions whose suspects (jobs that may have killed a worker) this worker runs, one at a time."""
        self._unanswered: set[int] = set()
        """Partitions whose last claim failed without a reply."""
        self._held_until = 0.0
        """Until this monotonic time new jobs are left to workers of another shape."""
        self._newer_until = defaultdict[int, float](float)
        """By partition: until this monotonic time its jobs of a newer version are left to newer workers."""
        self._is_sole = False
        """Whether there is one partition alone."""
        self._ending = False

    async def run(self, partitions: Sequence[int]) -> None:
        """Claim from the partitions in turn, each round beginning with another, so that none starves. The first round
        waits until the worker hears messages, which are lost before."""
        turn, full, loop = deque(partitions), [False], asyncio.get_running_loop()
        self._is_sole = len(partitions) == 1
        try:
            while True:
                if not any(full):
                    poll = loop.call_later(self._settings.poll_ms / 1000, self._look.set)
                    try:
                        await self._look.wait()
                    finally:
                        poll.cancel()
                if self._ending:
                    break
                self._look.clear()
                full = [await self._claim_from(partition) for partition in turn]
                self._starter.on_claim_round()
                turn.rotate(-1)
            await asyncio.gather(*self._claims.values())  # this worker still runs what they claim
            self._starter.is_full = False
            self._starter.on_claim_round()
        finally:
            for claim in self._claims.values():
                claim.cancel()
            await asyncio.gather(*self._claims.values(), return_exceptions=True)

    def end(self) -> None:
        """Stop claiming; `run` returns once all claimed jobs are begun."""
        self._ending = True
        self._look.set()

    def hold(self, for_ms: int) -> None:
        """Claim nothing for `for_ms`; 0: claim again at once."""
        held, self._held_until = self._held_until, time.monotonic() + for_ms / 1000
        if not for_ms and time.monotonic() < held:
            self._look.set()

    def may_bring(self, partition: int) -> bool:
        """Whether a claim is in flight there: Redis may count jobs as this worker's that it does not know yet."""
        return partition in self._under_way

    def note(self, control: Cancel | AddAddress) -> None:
        """Remember what is said of an unknown job, which a claim in flight may bring."""
        if self._under_way:
            self._early[control.job].append(control)

    def early(self, job_id: str) -> Sequence[Cancel | AddAddress]:
        """What was said of the job before it was claimed."""
        return self._early.get(job_id, ())

    async def _claim_from(self, partition: int) -> bool:
        """Claim from one partition. Returns whether it may hold more jobs.

        A slow partition delays no other, if there are others: its jobs are begun when the reply arrives.
        """
        claim = self._claims.get(partition)
        if claim is None:
            want, free = self._wanted(partition)
            if want <= 0:
                return False
            if self._is_sole:
                # A choice that waits for a slot may not wait for a slow store.
                on_round = self._starter.on_claim_round
                looked = asyncio.get_running_loop().call_later(self._settings.poll_ms / 1000, on_round)
                try:
                    return await self._claim(partition, want, free)
                finally:
                    looked.cancel()
            claim = self._claims[partition] = asyncio.create_task(self._claim(partition, want, free))
            await asyncio.wait({claim}, timeout=self._settings.poll_ms / 1000)
            if not claim.done():
                claim.add_done_callback(lambda _: self._look.set())
        if not claim.done():
            return False
        del self._claims[partition]
        return claim.result()

    async def _claim(self, partition: int, want: int, free: int) -> bool:
        alone, lowest, begins = partition in self._suspects, self._starter.batch_room(), self._starter.begins
        shared, crowding = self._starter.shared_slots()
        adapters = self._starter.loaded_adapters() if self._starter.card.adapters else None
        self._under_way.add(partition)
        try:
            claimed = await self._lease.claim(
                partition, want, alone=alone, lowest=lowest, free=free, begins=begins, shared=shared, crowding=crowding,
                adapters=adapters,
            )  # fmt: skip
            (self._suspects.add if claimed.suspects else self._suspects.discard)(partition)
            self._unanswered.discard(partition)
            if claimed.jobs:
                message = "a job runs alone, for it may have ended workers" if alone else "jobs claimed"
                ids = [each.job.id if isinstance(each, Claim) else each.id for each in claimed.jobs]
                events.write(message, jobs=ids, worker=self._lease.name, alone=alone)
                await self._begin_jobs(partition, claimed.jobs)
        except Fenced:
            self._on_fenced(partition)
            return False
        except Unavailable as error:
            log.warning("no work can be claimed from partition %d, trying again: %s", partition, error)
            self._unanswered.add(partition)
            claimed = None
        finally:
            self._under_way.discard(partition)
            if not self._under_way:
                self._early.clear()
        if claimed is None:
            await asyncio.sleep(self._settings.poll_ms / 1000)
            return False
        return len(claimed.jobs) == want or (claimed.suspects and not alone)

    async def _begin_jobs(self, partition: int, jobs: Sequence[Claim | UnreadableClaim]) -> None:
        """Begin readable jobs, fail unreadable ones, put back those of a newer version. Jobs of lane interactive begin
        first: free slots are theirs, and no batch job gives way for another one. Raises Unavailable."""
        newer: list[UnreadableClaim] = []
        chats: list[Claim] = []
        others: list[Claim] = []
        for job in jobs:
            if isinstance(job, UnreadableClaim):
                (newer.append if job.newer else self._refuse)(job)
            else:
                (chats if job.job.priority is Priority.INTERACTIVE else others).append(job)
        self._preemption.make_room([claim.job for claim in chats])
        for claims in filter(None, (chats, others)):
            newer += await self._begin_all([claim for claim in claims if not claim.job.media])
            for claim in claims:  # what has media holds up no other, and is in memory once it is its turn
                if claim.job.media:
                    async with self._media_turn:
                        if (whole := await self._with_media(claim)) is not None:
                            newer += await self._begin_all([whole])
        if newer:
            log.warning("%d jobs are of a newer version and are put back, the first is %s", len(newer), newer[0].id)
            await self._lease.decline(newer)
            self._newer_until[partition] = time.monotonic() + NEWER_PAUSE_S

    async def _begin_all(self, claims: Sequence[Claim]) -> list[UnreadableClaim]:
        """Begin jobs; returns those whose logs are of a newer version. Raises Unavailable."""
        fresh = [claim for claim in claims if not claim.earlier_runs]
        refusals = [await self._starter.refusal(claim) for claim in fresh]
        for claim, refusal in zip(fresh, refusals, strict=True):
            self._begin(claim, NOTHING, refusal)
        continued = [claim for claim in claims if claim.earlier_runs]
        return await self._begin_continued(continued) if continued else []

    async def _with_media(self, claim: Claim) -> Claim | None:
        """The claim with the media of its job, once there is room for them. None: they are lost, and the job fails; or
        the worker drains, and the job is put back. Raises Unavailable."""
        job, size = claim.job, sum([media.size for media in claim.job.media])
        while (held := self._held.media_bytes()) and held + size > MAX_MEDIA_BYTES:
            if any(isinstance(control, Cancel) for control in self.early(job.id)):
                break  # it ends as soon as it is begun
            if self._ending:
                await self._lease.release(job.id, claim.run_number)
                return None
            await asyncio.sleep(MEDIA_INTERVAL_S)
        try:
            return replace(claim, job=await self._media.restored(job))
        except MediaLost as error:
            log.warning("a job fails: %s", error, extra={"job": job.id})
            self._begin(claim, NOTHING, MEDIA_LOST)
            return None

    async def _begin_continued(self, claims: Sequence[Claim]) -> list[UnreadableClaim]:
        """Begin jobs that other workers had begun, reading each log once for all of them.

        Returns: jobs whose logs are of a newer version. Raises Unavailable.
        """
        newer: list[UnreadableClaim] = []
        records = await self._reader.records([claim.job.id for claim in claims], bodies=False)
        histories = await asyncio.gather(
            *(self._reader.history(claim.job.id, claim.earlier_runs) for claim in claims), return_exceptions=True
        )
        for claim, record, history in zip(claims, records, histories, strict=True):
            if record is None or record.state.final:
                log.warning("a claimed job has ended, or the store has lost it", extra={"job": claim.job.id})
            elif isinstance(history, NewerMessage):
                newer.append(UnreadableClaim(claim.job.id, claim.run_number, str(history), newer=True))
            elif isinstance(history, BaseException):
                raise history
            else:
                past = await self._continuable(claim, history)
                about = {"job": claim.job.id, "worker": self._lease.name, "attempt": claim.attempt}
                events.write("a job is continued", **about, tokens=sum(past.tokens))
                earlier = tuple([attempt for attempt in record.attempts if attempt.outcome])
                known = replace(claim, started_us=record.stamps.started, earlier_attempts=earlier)
                self._begin(known, past, None)
                await asyncio.sleep(0)  # a long history takes a while: let the engine's next step through
        return newer

    async def _continuable(self, claim: Claim, history: History) -> History:
        """The history to continue from; one without deltas after restarting a job that cannot be continued. A reader of
        a response is told of the text that is given up, if any of it was shown."""
        reason = "" if history.whole else "the store has lost a part of what was logged"
        reason = reason or job_restart_reason(claim.job, self._starter.card.capabilities, history.rows)
        reason = reason or self._starter.engine_restart_reason(Attempt(claim, history))
        if not reason:
            return history
        log.warning("a job begins anew: %s", reason, extra={"job": claim.job.id})
        rows = tuple(history.intact.rows)
        shown = claim.job.response is not None and any(row.text or row.logprobs for row in rows)
        await self._lease.restart(claim.job.id, claim.run_number, Draft(rows) if shown else None)
        return History(first_ms=history.first_ms)  # what its readers saw first

    def _wanted(self, partition: int) -> tuple[int, int]:
        """How many jobs to claim, and how many of them find a slot without a preemption. When suspects wait in a
        partition, the worker first finishes what it runs and then runs them one at a time."""
        if self._is_held(partition) or time.monotonic() < self._newer_until[partition]:
            return 0, 0
        if self._suspects and (self._held.attempts or self._claims or partition not in self._suspects):
            return 0, 0
        free = self._starter.room()
        if free is None:
            return 0, 0
        return free + (0 if self._suspects else self._starter.chat_room() + self._preemption.freeable_slots()), free

    def _is_held(self, partition: int) -> bool:
        """Whether new jobs there are left to another shape. Not while this worker runs the partition's suspects, or may
        have been chosen to (its last claim has no reply): no other worker would run them."""
        if time.monotonic() >= self._held_until:
            return False
        return partition not in self._suspects and partition not in self._unanswered
