"""Rate limits of hosted servers, per key."""

from __future__ import annotations

import math

import pytest

from workers.engines.upstream.places import UpstreamKey, choose_key, retry_after_s, told_s


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "2"}, 2.0),
        ({"retry-after-ms": "150", "retry-after": "2"}, 0.15),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:10 GMT"}, 10.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "Mon, 01 Jan 99999999999999999999 00:00:00 GMT"}, None),
        ({"retry-after": "Mon, 01 Jan 2024 00:00:00 +9999999999"}, None),
        ({"retry-after": "-5"}, 0.0),
        ({}, None),
    ],
)
def test_retry_after(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_s(headers, 0.0) == seconds


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("12ms", 0.012),
        ("6m0s", 360.0),
        ("1h2m3.5s", 3600.0),
        ("1.5", 1.5),
        ("1970-01-01T00:00:07Z", 7.0),
        ("x", None),
        ("0001-01-01T00:00:00", None),
    ],
)
def test_reset_times(value: str, seconds: float | None) -> None:
    """Both families' forms; nothing is longer than an hour."""
    assert told_s(value, 0.0) == seconds


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
