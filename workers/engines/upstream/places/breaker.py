"""Circuit breaker of one server: no requests while it is down, and one probe at a time to see whether it is back. Pure.

It opens at once when no connection can be opened, and otherwise after MAX_FAILURES failures in a row. A probe is due
after a delay. If it succeeds, the breaker is half-open: requests are sent, and the first that fails opens it again. The
delay doubles each time, until an answer is completed.
"""

from __future__ import annotations

MAX_FAILURES = 3
MIN_OPEN_S, MAX_OPEN_S = 0.5, 15.0


class Breaker:
    """`now` in monotonic seconds throughout."""

    def __init__(self) -> None:
        self.reason = ""
        """Why it is open; "" while it is closed."""
        self._failures = 0
        self._delay_s = MIN_OPEN_S
        self._probe_at = 0.0
        self._probing = False

    @property
    def closed(self) -> bool:
        """Whether requests may be sent."""
        return not self.reason

    def succeed(self) -> None:
        """An answer was completed."""
        self._failures, self.reason, self._delay_s, self._probing = 0, "", MIN_OPEN_S, False

    def half_open(self) -> None:
        """A probe found the server there."""
        if not self.closed:
            self._failures = MAX_FAILURES - 1
        self.reason, self._probing = "", False

    def fail(self, reason: str, now: float, *, down: bool = False) -> None:
        """A request or a probe failed by the server's fault. `down`: it took no connection, or it was a probe."""
        self._failures += 1
        if self._probing or (self.closed and (down or self._failures >= MAX_FAILURES)):
            self.reason, self._probe_at, self._probing = reason, now + self._delay_s, False
            self._delay_s = min(2 * self._delay_s, MAX_OPEN_S)

    def may_probe(self, now: float) -> bool:
        """Whether a probe is due; if so, it counts as begun, and `half_open` or `fail` must follow."""
        if self.closed or self._probing or now < self._probe_at:
            return False
        self._probing = True
        return True
