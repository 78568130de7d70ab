"""When the lease of a worker process is ended: once it has exited, and neither before nor for another one."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

import pytest
from msgspec.structs import replace

from cli.instance import ProcessEntry
from cli.supervisor import Child, LeaseRelease, Program
from streaming.errors import Unavailable
from streaming.fleet.processes import Fleet, this_process
from streaming.jobs.reaper import Lapse, Reaper, Swept
from streaming.redis.client import RedisClient

HERE = f"worker-1@{socket.gethostname()}"


class Ends(Reaper):
    """Notes the leases that it is to end; Redis is away where `away` is set."""

    def __init__(self, wire: RedisClient, *, away: bool = False) -> None:
        super().__init__(wire)
        self.away, self.ended = away, list[str]()

    async def sweep(self, *, ended: str = "") -> Swept:
        self.ended.append(ended)
        if self.away:
            raise Unavailable("Redis does not answer")
        mine, other = (
            Lapse(f"worker-1@{socket.gethostname()}", ("job_1",), (("job_2", "poison"),)),
            Lapse("worker-1@elsewhere", ("job_3",)),
        )
        return Swept(lapsed_workers=2, requeued=2, lapses=(mine, other))


def a_worker(name: str = "worker-1") -> Child:
    return Child(Program(role="worker", id=name, argv=(), log=Path("log"), env={}), lambda _: None)


def status(state: str, detail: str = "", pid: int | None = None, cause: str = "") -> ProcessEntry:
    return ProcessEntry(role="worker", id="worker-1", pid=pid, state=state, since=1.0, detail=detail, cause=cause)


def goes_through(release: LeaseRelease, child: Child, *states: ProcessEntry) -> None:
    for each in states:
        child.status = each
        release.noticed(child)


READY = status("ready", "lease-1", 7)
DRAINING = status("draining", "1 jobs", 7)


@pytest.mark.parametrize("before", [(READY,), (READY, DRAINING), (READY, status("failed", "engine dead", 7))])
@pytest.mark.parametrize("after", [status("restarting", "killed by SIGKILL"), status("stopped")])
async def test_an_exit_ends_the_lease_once(
    wire: RedisClient, before: tuple[ProcessEntry, ...], after: ProcessEntry
) -> None:
    """Whatever the process said last; nothing is ended while it lives, or by the start of its successor."""
    reaper = Ends(wire)
    release, child = LeaseRelease(reaper, Fleet(wire)), a_worker()
    goes_through(release, child, status("starting"), status("starting", "weights", 7), *before)
    await asyncio.sleep(0)
    assert reaper.ended == []
    goes_through(release, child, after, status("starting"), status("starting", pid=8))
    await release.close(60)
    assert reaper.ended == ["lease-1"]


async def test_an_exited_worker_is_listed_no_longer(wire: RedisClient) -> None:
    """Its slots and its tokens would count until its last report expires. Its successor stays."""
    fleet = Fleet(wire)
    for lease in ("lease-1", "lease-2"):
        entry = replace(this_process("worker", "worker-1"), lease=lease, running=3, tokens_per_s=90.0)
        await fleet.report(entry)
    release = LeaseRelease(Ends(wire), fleet)
    goes_through(release, a_worker(), READY, status("restarting", "killed by SIGKILL"))
    await release.close(60)
    assert [each.lease for each in await fleet.processes("worker")] == ["lease-2"]


async def test_the_log_of_a_job_has_the_last_words_of_its_worker(
    wire: RedisClient, caplog: pytest.LogCaptureFixture
) -> None:
    """One line has them both: `penstock logs --job` shows the lines that name the job."""
    release = LeaseRelease(Ends(wire), Fleet(wire))
    with caplog.at_level(logging.INFO):
        goes_through(release, a_worker(), READY, status("restarting", cause="killed by SIGABRT: no memory"))
        await release.close(60)
    (record,) = [each for each in caplog.records if "has exited" in each.message]
    assert "worker-1 has exited (killed by SIGABRT: no memory): lease lease-1 ends" in record.message
    assert vars(record)["jobs"] == ["job_1", "job_2"]


async def test_each_worker_has_its_own_lease(wire: RedisClient) -> None:
    """The second life's exit ends the second lease; the neighbour keeps its own."""
    reaper = Ends(wire)
    release, child, other = LeaseRelease(reaper, Fleet(wire)), a_worker(), a_worker("worker-2")
    goes_through(release, other, status("ready", "theirs", 9))
    goes_through(release, child, READY, status("restarting"), status("ready", "lease-2", 8), status("restarting"))
    await release.close(60)
    assert reaper.ended == ["lease-1", "lease-2"]


async def test_a_redis_that_hangs_does_not_hold_up_the_end(wire: RedisClient) -> None:
    """What has not ended by then is dropped."""

    class Hangs(Ends):
        async def sweep(self, *, ended: str = "") -> Swept:
            return await asyncio.get_running_loop().create_future()

    release = LeaseRelease(Hangs(wire), Fleet(wire))
    goes_through(release, a_worker(), READY, status("stopped"))
    async with asyncio.timeout(60):
        await release.close(0.01)
