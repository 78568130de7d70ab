"""Room in the store: new jobs are refused before what was accepted can no longer be finished."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from flow import MODEL, a_job, until
from house import redis_process
from redis import Redis

from streaming.errors import Unavailable
from streaming.journal import Journal
from streaming.lease import Claim, Finish, Lease
from streaming.memory import FULL, Headroom, crowded, until_next
from streaming.messages import State, Terminal
from streaming.queue import Queue
from streaming.settings import WireSettings
from streaming.wire import Wire

MIB = 1 << 20


@pytest.mark.parametrize(
    ("memories", "full"),
    [
        ([], False),
        ([(10**12, 0)], False),
        ([(79 * MIB, 100 * MIB)], False),
        ([(80 * MIB, 100 * MIB)], True),
        ([(1, 100 * MIB), (99 * MIB, 100 * MIB), (10**12, 0)], True),
    ],
)
def test_the_fullest_server_decides(memories: list[tuple[int, int]], full: bool) -> None:
    """One without a limit is never full."""
    assert bool(crowded(memories)) is full


@pytest.mark.parametrize(
    ("memories", "seconds"),
    [([], 2.0), ([(10**12, 0)], 2.0), ([(0, 100 * MIB)], 0.8), ([(0, 1000 * MIB), (75 * MIB, 100 * MIB)], 0.2)],
)
def test_the_next_look_comes_before_a_flood_can_have_filled_a_server(
    memories: list[tuple[int, int]], seconds: float
) -> None:
    assert until_next(memories) == pytest.approx(seconds)


async def test_admission_stops_while_running_jobs_can_still_end(tmp_path: Path) -> None:
    """At four fifths of a real server's memory new jobs are to be refused; even when it is full to the brim, and puts
    are Unavailable, a running job is finished. With room again, admission goes on."""
    options = ("--maxmemory", "24mb", "--maxmemory-policy", "noeviction")
    with redis_process(tmp_path, None, *options) as url, Redis.from_url(url) as client:
        wire = Wire.open(WireSettings(url=url))
        queue, lease, headroom = Queue(wire), Lease(wire, MODEL), Headroom(wire)
        looking = asyncio.create_task(headroom.keep_looking())
        job = a_job(queue)
        await queue.put(job)
        await lease.register()
        (claim,) = (await lease.claim(0, 1)).jobs
        assert isinstance(claim, Claim) and not headroom.full

        for number in range(100):
            await headroom.look()
            if headroom.full:
                break
            client.set(f"filler:{number}", b"x" * MIB)
        used, most = (await wire.memory())[0]
        assert FULL <= used / most < 1 and "MiB" in headroom.reason

        client.config_set("maxmemory", used // 2)
        with pytest.raises(Unavailable, match="OOM"):
            await queue.put(a_job(queue))
        end = Terminal(job.id, State.COMPLETED, 0, ("stop",))
        await lease.calls([lease.finish_call(Finish(end, claim.attempt, True))])
        assert (await Journal(wire).record(job.id)).state is State.COMPLETED

        client.config_set("maxmemory", 4 * most)
        await until(lambda: not headroom.full)
        await queue.put(a_job(queue))
        looking.cancel()
        await asyncio.wait([looking])
        await wire.close()
