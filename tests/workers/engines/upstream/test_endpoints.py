"""One server: its circuit breaker, how many requests it gets at once, and the rate limits of its keys."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from unittest.mock import AsyncMock

import pytest

from workers.engines.upstream.endpoints import (
    MAX_OPEN_S,
    MIN_OPEN_S,
    START,
    Breaker,
    InFlightBudget,
    ServerEndpoint,
    UpstreamKey,
    UpstreamModel,
    choose_key,
    retry_after_s,
    told_s,
)
from workers.engines.upstream.server import ProbeFailed
from workers.engines.upstream.settings import UpstreamSettings


def test_a_breaker_opens_after_three_failures_in_a_row() -> None:
    """A success between them begins the count anew."""
    breaker = Breaker()
    for fails in (True, True, False, True, True):
        breaker.fail("500", 0.0) if fails else breaker.succeed()
    assert breaker.closed
    breaker.fail("500", 0.0)
    assert not breaker.closed


def test_a_half_open_breaker_lets_one_probe_pass_and_opens_longer_each_time() -> None:
    """Only a completed answer brings the first delay back, so a server that answers probes alone is left alone."""
    breaker, now, delays = Breaker(), 0.0, []
    breaker.fail("down", now, "down")
    for _ in range(7):
        opened = now
        while not breaker.may_probe(now):
            now += 0.05
        delays.append(now - opened)
        assert not breaker.may_probe(now), "one probe at a time"
        breaker.half_open()
        assert breaker.closed
        breaker.fail("500", now)
        assert not breaker.closed, "the first failure after a probe is enough"
    assert delays[0] == pytest.approx(MIN_OPEN_S, abs=0.1) and delays[1] == pytest.approx(2 * MIN_OPEN_S, abs=0.1)
    assert delays[-1] == pytest.approx(MAX_OPEN_S, abs=0.1)
    breaker.succeed()
    breaker.fail("down", now, "down")
    assert breaker.may_probe(now + MIN_OPEN_S)


@pytest.mark.parametrize("drawn", [0.0, 0.5, 1.0])
def test_a_server_that_is_away_is_probed_every_second_however_long(drawn: float) -> None:
    """Its return after any outage is seen within a second and a quarter; nor is it asked more often than that."""
    breaker, now, probes = Breaker(lambda: drawn), 0.0, []
    breaker.fail("down", now, "down")
    while now < 600:
        now += 0.05
        if breaker.may_probe(now):
            probes.append(now)
            breaker.fail_probe("still down", now)
    gaps = [later - earlier for earlier, later in itertools.pairwise(probes)]
    assert probes[0] <= 0.55 and max(gaps) <= 1.25 + 0.1 and min(gaps) >= 0.75 - 1e-6
    assert breaker.may_probe(now + 1.3)
    breaker.half_open()
    assert breaker.closed


async def test_a_probe_whose_error_has_no_words_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    away = AsyncMock(side_effect=ConnectionResetError())
    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", away)
    endpoint = ServerEndpoint("http://gpu-1:8000/v1", UpstreamModel("m", UpstreamSettings(), ()))
    for _ in range(2):
        with pytest.raises(ProbeFailed, match="ConnectionResetError"):
            await endpoint.probe(None)
        assert not endpoint.ready and endpoint.breaker.may_probe(time.monotonic() + 10)


def test_a_failure_that_lasts_is_probed_ever_later() -> None:
    """Such as a key that is not taken: each probe could count against a limit."""
    breaker, now = Breaker(lambda: 0.0), 0.0
    breaker.fail("down", now, "down")
    for _ in range(10):
        while not breaker.may_probe(now):
            now += 0.05
        breaker.fail_probe("no such key", now, lasting=True)
    assert not breaker.may_probe(now + MAX_OPEN_S - 0.1) and breaker.may_probe(now + MAX_OPEN_S)
    breaker.succeed()
    assert not breaker.closed, "what was sent before does not tell what has changed since"
    breaker.half_open()
    assert breaker.closed


def test_a_budget_grows_by_one_a_window_and_halves_when_the_server_is_busy() -> None:
    budget = InFlightBudget(100)
    assert budget.limit == START
    for _ in range(START):
        budget.note_success()
    assert budget.limit == START + 1
    budget.note_busy(10.0)
    assert budget.limit == (START + 1) // 2
    budget.note_busy(10.5)
    assert budget.limit == (START + 1) // 2, "one cut for what was sent before it"
    budget.note_gauges(0, 0.1, budget.limit, 20.0)
    assert budget.limit == (START + 1) // 2, "a refusal ends the search for more"
    assert InFlightBudget(100, slots=4).limit == 4 and InFlightBudget(3, slots=40).limit == 3
    shared = InFlightBudget(100, slots=40)
    for workers, limit in ((3, 13), (100, 1)):
        shared.workers = workers
        assert shared.limit == limit


def test_waiting_requests_and_a_full_cache_hold_a_budget_back() -> None:
    budget = InFlightBudget(100, slots=40)
    budget.note_gauges(0, 0.9, 5, 0.0)
    assert not budget.has_room(5) and budget.has_room(0) and budget.limit == 40
    budget.note_gauges(3, 0.1, 40, 10.0)
    assert budget.limit == 36 and not budget.has_room(5)
    budget.note_gauges(0, 0.1, 36, 20.0)
    assert budget.has_room(5) and not budget.has_room(36)
    budget.note_gauges(500, 0.1, 36, 30.0)
    assert budget.limit == 18, "the requests of others wait, and half of ours stay"


def test_a_server_that_lets_none_wait_is_tried_with_twice_as_many() -> None:
    """Only while all that may run there does; once requests wait there, as many as ran, and one more a round."""
    budget = InFlightBudget(200)
    budget.note_gauges(0, 0.1, START - 1, 0.0)
    assert budget.limit == START, "nobody asked for more"
    budget.note_gauges(0, 0.9, START, 1.0)
    assert budget.limit == START, "its cache is nearly full"
    for second, limit in enumerate((2 * START, 4 * START, 8 * START, 200, 200), 2):
        budget.note_gauges(0, 0.1, budget.limit, second)
        assert budget.limit == limit
    budget.note_gauges(72, 0.1, 200, 20.0)
    assert budget.limit == 128 and not budget.has_room(127)
    budget.note_gauges(0, 0.1, 128, 21.0)
    assert budget.limit == 128 and budget.has_room(127)
    for _ in range(128):
        budget.note_success()
    assert budget.limit == 129


RETRIES: list[tuple[dict[str, str], float | None]] = [
    ({"retry-after": "2"}, 2.0), ({"retry-after-ms": "150", "retry-after": "2"}, 0.15), ({"retry-after": "-5"}, 0.0),
    ({"retry-after": "Thu, 01 Jan 1970 00:00:10 GMT"}, 10.0), ({"retry-after": "soon"}, None), ({}, None),
    ({"retry-after": "nan"}, None), ({"retry-after": "Mon, 01 Jan 99999999999999999999 00:00:00 GMT"}, None),
    ({"retry-after": "Mon, 01 Jan 2024 00:00:00 +9999999999"}, None),
]  # fmt: skip
RESETS = {
    "12ms": 0.012, "6m0s": 360.0, "1h2m3.5s": 3600.0, "1.5": 1.5, "1970-01-01T00:00:07Z": 7.0, "x": None,
    "0001-01-01T00:00:00": None,
}  # fmt: skip


@pytest.mark.parametrize(("headers", "seconds"), RETRIES)
def test_retry_after(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_s(headers, 0.0) == seconds


@pytest.mark.parametrize("value", RESETS)
def test_reset_times(value: str) -> None:
    """Both families' forms; nothing is longer than an hour."""
    assert told_s(value, 0.0) == RESETS[value]


def limit_headers(family: str, limit: int, remaining: int) -> dict[str, str]:
    if family == "openai":
        return {"x-ratelimit-limit-requests": str(limit), "x-ratelimit-remaining-requests": str(remaining)}
    name = "anthropic-ratelimit-requests"
    return {f"{name}-limit": str(limit), f"{name}-remaining": str(remaining)}


@pytest.mark.parametrize("family", ["openai", "anthropic"])
def test_a_key_is_paced_by_its_limit(family: str) -> None:
    """A server of 60 requests a minute, which counts a sliding minute: after the first minute it refuses none."""
    key, sent, now, refused_late = UpstreamKey("K", "secret"), list[float](), 0.0, 0
    while now < 600:
        wait = key.wait_s(10, now)
        now += wait if wait > 0 else 0.01
        if wait > 0:
            continue
        key.reserve(10, now)
        used = sum(1 for at in sent if at > now - 60)
        if used >= 60:
            refused_late += now > 60
            key.block(1.0, now)
            key.note(limit_headers(family, 60, 0), now, 0.0)
        else:
            sent.append(now)
            key.note(limit_headers(family, 60, 60 - used - 1), now, 0.0)
    assert refused_late == 0
    assert len(sent) > 0.9 * 600, "and the limit is used"


def test_tokens_are_reserved_and_given_back() -> None:
    key = UpstreamKey("K", "s")
    key.note({"x-ratelimit-limit-tokens": "1000", "x-ratelimit-remaining-tokens": "1000"}, 0.0, 0.0)
    key.reserve(900, 0.0)
    assert key.wait_s(500, 0.0) == pytest.approx(400 * 60 / 1000)
    key.tokens.take(100 - 900, 0.0)
    assert key.wait_s(500, 0.0) == 0


def test_workers_share_the_limits_of_a_key() -> None:
    key = UpstreamKey("K", "s")
    key.workers = 3
    key.note(limit_headers("openai", 60, 60), 0.0, 0.0)
    for _ in range(20):
        assert key.wait_s(1, 0.0) == 0
        key.reserve(1, 0.0)
    assert key.wait_s(1, 0.0) == pytest.approx(3.0)


@pytest.mark.parametrize("limit", ["-1", "0", "nan", "many"])
def test_limits_that_are_none_are_ignored(limit: str) -> None:
    key = UpstreamKey("K", "s")
    key.note({"x-ratelimit-limit-requests": limit, "x-ratelimit-remaining-requests": "0"}, 0.0, 0.0)
    key.reserve(5, 0.0)
    assert key.wait_s(5, 0.0) == 0 and key.requests.limit == math.inf


def test_a_window_that_is_over_does_not_empty_a_bucket() -> None:
    """A server that says what remained of a window, and that the window ends now, has the whole limit again: the level
    stays. With time to go, or nothing left, what it says counts."""
    for remaining, reset, level in (("2", "0s", 60), ("2", "30s", 2), ("0", "0s", 0)):
        key = UpstreamKey("K", "s")
        said = {"limit": "60", "remaining": remaining, "reset": reset}
        key.note({f"x-ratelimit-{name}-requests": value for name, value in said.items()}, 0.0, 0.0)
        assert key.requests.level == level, (remaining, reset)


def test_keys_are_pooled() -> None:
    """The one that is blocked waits, and the other works; a key's secret is in no repr."""
    first, second = UpstreamKey("A", "sk-one"), UpstreamKey("B", "sk-two")
    keys = [first, second]
    first.block(10, 0.0)
    assert choose_key(keys, 1, 0.0) == (second, 0.0)
    second.block(5, 0.0)
    assert choose_key(keys, 1, 0.0) == (second, 5.0)
    assert "sk-" not in repr(keys)
