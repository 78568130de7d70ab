"""The circuit breaker of one server."""

from __future__ import annotations

import pytest

from workers.engines.upstream.places.breaker import MAX_OPEN_S, MIN_OPEN_S, Breaker


def test_a_breaker_opens_at_once_when_nothing_answers() -> None:
    breaker = Breaker()
    breaker.fail("refused", 0.0, down=True)
    assert not breaker.closed and breaker.reason == "refused"


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
    breaker.fail("down", now, down=True)
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
    breaker.fail("down", now, down=True)
    assert breaker.may_probe(now + MIN_OPEN_S)


def test_a_probe_that_fails_doubles_the_delay() -> None:
    breaker = Breaker()
    breaker.fail("down", 0.0, down=True)
    assert breaker.may_probe(MIN_OPEN_S)
    breaker.fail("still down", MIN_OPEN_S, down=True)
    assert not breaker.may_probe(MIN_OPEN_S * 2.9) and breaker.may_probe(MIN_OPEN_S * 3)
