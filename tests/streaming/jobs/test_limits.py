"""Limits of keys and tenants on a real server: what a job reserves, what its end gives back, and what is refused."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace as changed
from datetime import UTC, datetime
from typing import Any

import pytest
from flow import a_job, a_lease, append, claim_one, delta, lapse
from msgspec.structs import replace

from penstock.engine import Sampling
from streaming.errors import LimitReached
from streaming.jobs.codec import Terminal, Usage
from streaming.jobs.job import JobState
from streaming.jobs.lease import Claim, Finish, Lease
from streaming.jobs.queue import Accepted, Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.reaper import Reaper
from streaming.jobs.settings import Limits, LimitSettings
from streaming.jobs.waiting import Cost, cost_of
from streaming.keys import partition_key
from streaming.redis import client as client_module
from streaming.redis.client import RedisClient
from streaming.redis.scripts import LIBRARIES, load_library

pytestmark = pytest.mark.slow

MINUTE_MS = 60_000
HERE = "penstock:api:here"


def a_cost(prompt: int, output: int) -> Cost:
    return Cost(prompt, output, 1000, 1000)


async def put(
    queue: Queue,
    prompt: int = 1,
    output: int = 0,
    *,
    part: bool = False,
    key: LimitSettings | None = None,
    **changes: Any,
) -> Accepted:
    job = a_job(queue, id=queue.new_id("t"), **changes)
    return await queue.put(job, cost=a_cost(prompt, output), part=part, caller="k", key_limits=key)


def limited(wire: RedisClient, price: tuple[float, float] = (0.0, 0.0), /, **limits: Any) -> Queue:
    """A queue in which tenant `t` has these limits."""
    return Queue(wire, limits=Limits({"t": LimitSettings(**limits)}, {"m": price}))


async def refusal(queue: Queue, *args: Any, **changes: Any) -> LimitReached:
    with pytest.raises(LimitReached) as caught:
        await put(queue, *args, **changes)
    return caught.value


async def end_next(wire: RedisClient, prompt: int, generated: int) -> None:
    """Claim the next job and end it with this usage."""
    lease = await a_lease(wire)
    await end(lease, await claim_one(lease), prompt, generated)


async def end(lease: Lease, claim: Claim, prompt: int, generated: int) -> None:
    """End a claimed job with this usage."""
    terminal = Terminal(claim.job.id, JobState.COMPLETED, 0, ("stop",), Usage(prompt, generated))
    await lease.calls([lease.finish_call(Finish(terminal, claim.run_number, True))])


async def left_of_day(queue: Queue, limit: int) -> int:
    """What is left of `tokens_per_day`: what a request that never fits is told is used."""
    return limit - int((await refusal(queue, limit + 1)).used)


async def test_a_minutes_worth_of_requests_comes_at_once_and_then_one_by_one(wire: RedisClient) -> None:
    queue = limited(wire, requests_per_minute=4)
    left = [(await put(queue)).rates[:2] for _ in range(4)]
    assert left == [(4, 3), (4, 2), (4, 1), (4, 0)]
    reached = await refusal(queue)
    assert (reached.account, reached.name, reached.limit) == ("tenant:t", "requests_per_minute", 4)
    assert 0 < reached.retry_ms <= MINUTE_MS / 4
    assert MINUTE_MS - 5_000 < reached.rates[2] <= MINUTE_MS


async def test_a_job_reserves_its_longest_answer_and_gives_back_at_its_end_what_it_did_not_use(
    wire: RedisClient,
) -> None:
    queue = limited(wire, tokens_per_day=100, tokens_per_month=100)
    await put(queue, 20, 40)
    assert await left_of_day(queue, 100) == 40
    await end_next(wire, 15, 5)
    assert await left_of_day(queue, 100) == 80
    await put(queue, 40, 40)  # exactly
    assert (await refusal(queue, 1)).used == 100


async def test_a_job_that_used_more_than_it_reserved_is_charged_for_it(wire: RedisClient) -> None:
    queue = limited(wire, tokens_per_day=100)
    await put(queue, 10, 10)
    await end_next(wire, 60, 10)
    assert await left_of_day(queue, 100) == 30


async def test_a_rate_of_tokens_gets_back_what_was_not_used(wire: RedisClient) -> None:
    queue = limited(wire, tokens_per_minute=1_000)
    await put(queue, 500, 500)
    assert (await refusal(queue, 400)).name == "tokens_per_minute"
    await end_next(wire, 100, 100)
    assert 800 <= (await put(queue, 1)).rates[4] + 1 <= 810


async def test_a_late_end_gives_back_nothing_that_time_has_given_back(wire: RedisClient) -> None:
    """The rate of the first job has flowed off before it ends; a second one then holds what it used."""
    queue = limited(wire, tokens_per_minute=6_000)  # one each 10 ms
    await put(queue, 10, 20)
    await asyncio.sleep(0.4)
    await put(queue, 3_000)
    await end_next(wire, 1, 1)
    assert (await put(queue, 1)).rates[4] < 6_000 - 2_900


@pytest.mark.parametrize("waits", [True, False])
async def test_unfinished_jobs_are_counted_until_their_end(wire: RedisClient, waits: bool) -> None:
    name = "concurrent" if waits else "queued"
    queue, reply_to = limited(wire, **{name: 2}), HERE if waits else ""
    await put(queue, reply_to=reply_to)
    second = await put(queue, reply_to=reply_to)
    assert (await refusal(queue, reply_to=reply_to)).name == name
    if waits:
        await put(queue)  # nobody waits for it
    await end_next(wire, 1, 1)
    await put(queue, reply_to=reply_to)
    await queue.cancel(second.id)
    await put(queue, reply_to=reply_to)
    assert (await refusal(queue, reply_to=reply_to)).used == 2


async def test_money_is_counted_by_the_models_prices(wire: RedisClient) -> None:
    queue = limited(wire, (2.0, 10.0), cost_per_day=0.1, cost_per_month=1.0)
    await put(queue, 1_000, 5_000)  # 0.002 and 0.05
    assert (await refusal(queue, 0, 5_000)).used == pytest.approx(0.052)
    await end_next(wire, 1_000, 100)  # 0.003
    await put(queue, 0, 9_700)
    reached = await refusal(queue, 1)
    assert (reached.name, reached.used) == ("cost_per_day", pytest.approx(0.1))


async def test_a_request_greater_than_the_whole_limit_never_fits(wire: RedisClient) -> None:
    for name in ("tokens_per_minute", "tokens_per_day", "tokens_per_month"):
        assert (await refusal(limited(wire, **{name: 100}), 60, 41)).retry_ms == -1


async def test_a_key_and_its_tenant_both_hold(wire: RedisClient) -> None:
    queue, mine = limited(wire, requests_per_minute=3), LimitSettings(requests_per_minute=2)
    await put(queue, key=mine)
    assert (await put(queue, key=mine)).rates[:2] == (2, 0)
    assert (await refusal(queue, key=mine)).account == "key:k"
    await put(queue)
    assert (await refusal(queue)).account == "tenant:t"


async def test_what_is_refused_or_found_again_counts_nothing(wire: RedisClient) -> None:
    queue = limited(wire, requests_per_minute=10, queued=2)
    job = a_job(queue, id=queue.new_id("t"))
    for _ in range(2):  # the second is a retry of the same put
        await queue.put(job, cost=a_cost(1, 1))
    first = a_job(queue, id=queue.new_id("t", "i"))
    await queue.put(first, idempotency_key="i", digest="d", cost=a_cost(1, 1))
    again = await queue.put(replace(first, id=queue.new_id("t", "i")), idempotency_key="i", digest="d")
    assert again.joined
    for _ in range(3):
        assert (await refusal(queue)).name == "queued"
    await queue.cancel(job.id)
    assert (await put(queue)).rates[1] == 10 - 3


async def test_lines_of_batches_leave_half_of_a_rate_to_other_requests(wire: RedisClient) -> None:
    queue = limited(wire, requests_per_minute=10)
    for _ in range(5):
        await put(queue, part=True)
    assert (await refusal(queue, part=True)).name == "requests_per_minute"
    for _ in range(5):
        await put(queue)


async def test_a_line_that_needs_more_than_half_of_a_rate_waits_until_all_of_it_is_there(wire: RedisClient) -> None:
    queue = limited(wire, tokens_per_minute=600_000)
    await put(queue, 400_000, part=True)
    assert (await refusal(queue, 400_000, part=True)).retry_ms > 0


@pytest.mark.parametrize("state", ["waiting", "running", "lost"])
async def test_a_job_that_no_worker_ends_gives_back_all_but_the_tokens_it_has(
    opened: Callable[..., RedisClient], redis_url: str, state: str
) -> None:
    wire = opened(redis_url, lease_ms=1_000, max_attempts=1)
    queue, reader = limited(wire, tokens_per_day=100, queued=9), JobReader(wire)
    job_id, lease = (await put(queue, 20, 40)).id, await a_lease(wire)
    if state == "waiting":
        await queue.cancel(job_id)
    else:
        claim = await claim_one(lease)
        await lease.calls([append(lease, {"-": [delta(claim, 1), delta(claim, 2)]}, claim)])
        if state == "running":
            await queue.cancel(job_id)
        await lapse(wire, lease)
        await Reaper(wire, salvager=reader).sweep()
    record = await reader.record(job_id)
    assert record.state.final and record.terminal is not None
    used = record.terminal.usage.prompt + record.terminal.usage.completion
    assert used == (0 if state == "waiting" else 2)
    assert await left_of_day(queue, 100) == 100 - used


async def test_every_partition_counts_in_the_one_of_the_tenant(wide: RedisClient) -> None:
    queue = limited(wide, requests_per_minute=5)
    for _ in range(5):
        await put(queue)
    assert (await refusal(queue)).name == "requests_per_minute"
    ids = {Queue(wide).new_id("t", limited=True)[:6] for _ in range(20)}
    assert ids == {queue.new_id("t", str(number))[:6] for number in range(20)}


async def test_an_account_that_cannot_be_read_begins_anew(wire: RedisClient) -> None:
    queue = limited(wire, requests_per_minute=1)
    await put(queue)
    (name,) = [key for key in await wire.redis.keys("*") if b":account:" in key]
    for spoil in (lambda: wire.redis.set(name, b"\xc1garbage"), lambda: wire.redis.lpush(name, "x")):
        await wire.redis.delete(name)
        await spoil()
        await put(queue)
        assert (await refusal(queue)).name == "requests_per_minute"


async def test_an_idempotency_key_leads_to_its_job_before_and_after_the_first_limit(wide: RedisClient) -> None:
    free, queue = Queue(wide), limited(wide, requests_per_minute=100)
    for number in range(10):
        one, other = (free, queue) if number % 2 else (queue, free)
        job = a_job(one, id=one.new_id("t", str(number)))
        await one.put(job, idempotency_key=str(number), digest="d")
        again = replace(job, id=other.new_id("t", str(number)))
        assert (await other.put(again, idempotency_key=str(number), digest="d")).id == job.id


async def test_a_guess_of_the_longest_answer_refuses_nothing_for_good(wire: RedisClient) -> None:
    """While no worker has loaded the model, a request without max_tokens is estimated; it comes in if nothing else is
    used, and gives back the rest."""
    queue = limited(wire, (0.0, 1.0), tokens_per_minute=1_000, tokens_per_day=2_000, cost_per_day=0.0005)
    guess = replace(a_cost(10, 4_096), guessed=True)
    assert (await refusal(queue, 10, 4_096)).retry_ms == -1
    await queue.put(a_job(queue, id=queue.new_id("t")), cost=guess)
    with pytest.raises(LimitReached) as caught:
        await queue.put(a_job(queue, id=queue.new_id("t")), cost=guess)
    assert caught.value.retry_ms > 0
    await end_next(wire, 10, 40)
    assert await left_of_day(limited(wire, tokens_per_day=2_000), 2_000) == 2_000 - 50
    assert cost_of(a_job(queue)).guessed and not cost_of(a_job(queue, sampling=Sampling(max_tokens=5))).guessed


async def test_jobs_that_nothing_ends_any_more_are_counted_no_longer(wire: RedisClient) -> None:
    """Their records are gone, no hashes, or were ended by a version that knows no limits."""
    queue = limited(wire, queued=3)
    ids = [(await put(queue)).id for _ in range(3)]
    gone, foreign, ended = [partition_key(0, "job", each) for each in ids]
    await wire.redis.delete(gone, foreign)
    await wire.redis.set(foreign, "no hash")
    await wire.redis.hset(ended, "state", "completed")
    for _ in range(3):
        await put(queue)
    assert (await refusal(queue)).used == 3


CLOCK = "penstock:{0}:clock"


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch, opened: Callable[..., RedisClient], redis_url: str) -> RedisClient:
    """A wire whose scripts read the time from a key."""
    library, name = load_library(), f"{LIBRARIES}{1:08x}"
    text = library.text.replace("redis.call('TIME')", f"{{0, 1000 * redis.call('GET', '{CLOCK}')}}")
    own = changed(library, name=name, text=text.replace(library.name, name))
    monkeypatch.setattr(client_module, "load_library", lambda: own)
    return opened(redis_url, lease_ms=10**9)


@pytest.mark.parametrize("seed", range(6))
async def test_no_window_has_more_than_the_rate_and_a_minutes_worth(clocked: RedisClient, seed: int) -> None:
    """Whatever is asked, ended early or late, and used of what was reserved."""
    rng, rate = random.Random(seed), 600
    queue, now_ms = limited(clocked, tokens_per_minute=rate), 10**12
    await clocked.redis.set(CLOCK, now_ms)
    lease, used, running = await a_lease(clocked), list[tuple[int, int]](), list[tuple[int, int, int, Claim]]()
    refused = 0
    for _ in range(250):
        step = rng.random()
        if step < 0.4:
            now_ms += rng.choice((0, 50, 1_000, 20_000, 90_000))
            await clocked.redis.set(CLOCK, now_ms)
        elif step < 0.75 or not running:
            prompt, output = rng.randrange(1, 100), rng.randrange(200)
            try:
                await put(queue, prompt, output)
                running.append((now_ms, prompt, output, await claim_one(lease)))
            except LimitReached:
                refused += 1
        else:
            accepted_ms, prompt, output, claim = running.pop(rng.randrange(len(running)))
            generated = rng.randrange(output + 1)
            await end(lease, claim, prompt, generated)
            used.append((accepted_ms, prompt + generated))
    used += [(accepted_ms, prompt + output) for accepted_ms, prompt, output, _ in running]
    assert refused > 5 and len(used) > 50
    used.sort()
    for first, (began_ms, _) in enumerate(used):
        spent = 0
        for at_ms, tokens in used[first:]:
            spent += tokens
            assert spent <= rate + rate * (at_ms - began_ms) / MINUTE_MS + 1


async def test_a_rate_comes_back_evenly_and_a_budget_with_its_day(clocked: RedisClient) -> None:
    midnight_ms = 86_400_000 * 20_000
    await clocked.redis.set(CLOCK, midnight_ms - 30_000)
    queue = limited(clocked, requests_per_minute=6, tokens_per_day=9)
    for _ in range(6):
        await put(queue)
    assert (await refusal(queue)).retry_ms == 10_000
    await clocked.redis.set(CLOCK, midnight_ms - 20_001)
    assert (await refusal(queue)).retry_ms == 1
    await clocked.redis.set(CLOCK, midnight_ms - 20_000)
    assert (await put(queue)).rates[1] == 0
    await clocked.redis.set(CLOCK, midnight_ms - 1)
    assert (await refusal(queue, 3)).retry_ms == 1
    await clocked.redis.set(CLOCK, midnight_ms)
    await put(queue, 9)
    await end_next(clocked, 1, 0)  # of the day before: what it gives back is not of this one
    assert (await refusal(queue, 1)).name == "tokens_per_day"


async def test_a_job_for_later_counts_when_it_is_accepted(clocked: RedisClient) -> None:
    """While its client is there to be refused; its time counts nothing once more."""
    await clocked.redis.set(CLOCK, 10**12)
    queue = limited(clocked, requests_per_minute=1, tokens_per_day=10)
    await put(queue, 6, delay_ms=60 * MINUTE_MS)
    assert (await refusal(queue)).name == "requests_per_minute"
    await clocked.redis.set(CLOCK, 10**12 + MINUTE_MS)
    assert (await refusal(queue, 6, delay_ms=1)).name == "tokens_per_day"
    await clocked.redis.set(CLOCK, 10**12 + 61 * MINUTE_MS)
    await Reaper(clocked).sweep()
    await put(queue, 4)
    lease = await a_lease(clocked)
    assert len((await lease.claim(0, 2)).jobs) == 2


async def test_another_limit_acts_on_what_was_used_before(clocked: RedisClient) -> None:
    await clocked.redis.set(CLOCK, 10**12)
    await put(limited(clocked, tokens_per_minute=100), 60)
    await end_next(clocked, 160, 0)  # a debt of a minute's worth and more
    assert (await refusal(limited(clocked, tokens_per_minute=100), 40)).retry_ms == 60_000
    queue = limited(clocked, tokens_per_minute=100_000)
    assert (await put(queue, 40)).rates[4] == 100_000 - 200
    assert (await refusal(limited(clocked, tokens_per_minute=250), 100)).retry_ms == 12_000


async def test_a_debt_is_paid_off_within_two_minutes(clocked: RedisClient) -> None:
    await clocked.redis.set(CLOCK, 10**12)
    queue = limited(clocked, tokens_per_minute=1_000)
    await put(queue, 10)
    await end_next(clocked, 1 << 24, 0)
    assert (await refusal(queue, 1_000)).retry_ms == 120_000


async def test_a_store_whose_time_is_set_back_refuses_and_gives_nothing_for_it(clocked: RedisClient) -> None:
    midnight_ms = 86_400_000 * 20_000
    await clocked.redis.set(CLOCK, midnight_ms + 1_000)
    queue = limited(clocked, requests_per_minute=60, tokens_per_day=10)
    await put(queue, 6)
    await clocked.redis.set(CLOCK, midnight_ms - 3_600_000)
    assert (await put(queue, 4)).rates[:2] == (60, 58)
    assert (await refusal(queue, 1)).name == "tokens_per_day"
    await clocked.redis.set(CLOCK, midnight_ms + 2_000)
    assert (await refusal(queue, 1)).name == "tokens_per_day"


async def test_what_an_end_gives_back_moves_later_reservations_forward(clocked: RedisClient) -> None:
    """Else time and the end would give the same tokens back twice."""
    await clocked.redis.set(CLOCK, 10**12)
    queue, lease = limited(clocked, tokens_per_minute=600), await a_lease(clocked)
    claims = []
    for _ in range(2):
        await put(queue, 300)
        claims.append(await claim_one(lease))
    await clocked.redis.set(CLOCK, 10**12 + 5_000)
    await end(lease, claims[0], 0, 0)
    await clocked.redis.set(CLOCK, 10**12 + 35_000)
    await put(queue, 600)
    await end(lease, claims[1], 0, 0)
    assert (await refusal(queue, 600)).retry_ms == MINUTE_MS


@pytest.mark.parametrize(
    ("now", "ends"),
    [
        ("2028-02-15", "2028-03-01"), ("2028-02-29", "2028-03-01"), ("2027-02-28", "2027-03-01"),
        ("2026-12-31", "2027-01-01"), ("2026-11-30", "2026-12-01"), ("2026-08-01", "2026-09-01"),
        ("2100-02-28", "2100-03-01"), ("2027-04-30", "2027-05-01"),
    ],
)  # fmt: skip
async def test_a_months_budget_begins_anew_with_the_month_of_utc(clocked: RedisClient, now: str, ends: str) -> None:
    at_ms, end_ms = (1000 * int(datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()) for day in (now, ends))
    await clocked.redis.set(CLOCK, at_ms)
    queue = limited(clocked, tokens_per_month=10)
    await put(queue, 10)
    assert (await refusal(queue, 1)).retry_ms == end_ms - at_ms
    await clocked.redis.set(CLOCK, end_ms - 1)
    assert (await refusal(queue, 1)).retry_ms == 1
    await clocked.redis.set(CLOCK, end_ms)
    await put(queue, 9)
    await end_next(clocked, 0, 0)  # of the month before: what it gives back is not of this one
    assert (await refusal(queue, 2)).used == 9


async def test_hundreds_of_callers_at_two_processes_never_get_more_than_the_limit(
    clocked: RedisClient, opened: Callable[..., RedisClient], redis_url: str
) -> None:
    await clocked.redis.set(CLOCK, 10**12)
    wires = clocked, opened(redis_url, lease_ms=10**9)
    queues = [limited(wire, requests_per_minute=50, tokens_per_minute=3_000) for wire in wires]
    puts = [put(queues[at % 2], 10, 90) for at in range(200)]
    answers = await asyncio.gather(*puts, return_exceptions=True)
    refused = [each for each in answers if isinstance(each, LimitReached)]
    assert len(refused) == 170 and sum(isinstance(each, Accepted) for each in answers) == 30
    assert {each.name for each in refused} == {"tokens_per_minute"}


async def test_an_account_is_kept_beyond_its_month(wire: RedisClient) -> None:
    await put(limited(wire, tokens_per_month=10, queued=3))
    for kind in ("account", "open"):
        assert await wire.redis.ttl(partition_key(0, kind, "tenant:t")) > 32 * 86_400
