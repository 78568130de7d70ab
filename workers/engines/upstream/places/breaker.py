"""Circuit breaker of one server: no requests while it is down, and one probe at a time to see whether it is back. Pure.

It opens at once when no connection can be opened, and otherwise after failures of MAX_FAILURES requests in a row. While
the server does not answer probes, one is due about every second: each costs it one connection, and its return is seen
soon. If a probe succeeds, the breaker is half-open: requests are sent, and the first that fails opens it again, for
twice as long each time until an answer is completed. So a server that answers probes and fails requests is left alone.

One request counts once, however often it fails, and failures while the server gives tokens to other requests are not
in a row: they may be the requests' own fault, and bad requests must not keep a server from the others.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

MAX_FAILURES = 3
MIN_OPEN_S, MAX_OPEN_S = 0.5, 15.0
ANSWERS_S = 1.0
"""So long after its last token a server counts as one that answers, also if it fails several requests at once."""
PROBE_INTERVAL_S = 1.0
"""Between two probes of a server that does not answer them, give or take a quarter: workers do not ask together."""


class Breaker:
    """`now` in monotonic seconds throughout."""

    def __init__(self, draw: Callable[[], float] = random.random) -> None:
        """`draw`: a random number from 0 to 1."""
        self.reason = ""
        """Why it is open; "" while it is closed."""
        self._draw = draw
        self._failures = 0
        """Requests that have failed in a row."""
        self._failed: set[str] = set()
        """Their names."""
        self._failing_since = -math.inf
        self._delay_s = self._lasting_delay_s = MIN_OPEN_S
        self._probe_at = 0.0
        self._probing = False

    @property
    def closed(self) -> bool:
        """Whether requests may be sent."""
        return not self.reason

    def succeed(self) -> None:
        """An answer was completed."""
        self._forget()
        self.reason, self._probing = "", False
        self._delay_s = self._lasting_delay_s = MIN_OPEN_S

    def half_open(self) -> None:
        """A probe found the server there."""
        if not self.closed:
            self._failures = MAX_FAILURES - 1
        self.reason, self._probing, self._lasting_delay_s = "", False, MIN_OPEN_S

    def fail(
        self, reason: str, now: float, *, request: str = "", down: bool = False, answered_at: float = -math.inf
    ) -> None:
        """A request failed by the server's fault.

        Args:
            request: its name, the same each time it is sent; "": it has none, and counts each time.
            down: the server took no connection.
            answered_at: when another request last got a token.
        """
        if answered_at > min(self._failing_since, now - ANSWERS_S):
            self._forget()
        self._failing_since = self._failing_since if self._failures else now
        if request not in self._failed:
            self._failures += 1
            self._failed |= {request} - {""}
        if self.closed and (down or self._failures >= MAX_FAILURES):
            self.reason, self._probe_at = reason, now + self._delay_s
            self._delay_s = min(2 * self._delay_s, MAX_OPEN_S)

    def _forget(self) -> None:
        self._failures, self._failed = 0, set()

    def fail_probe(self, reason: str, now: float, *, lasting: bool = False) -> None:
        """A probe failed. `lasting`: by what only other settings change, so the next ones are made ever later."""
        delay_s = PROBE_INTERVAL_S * (0.75 + self._draw() / 2)
        if lasting:
            self._lasting_delay_s = min(2 * self._lasting_delay_s, MAX_OPEN_S)
            delay_s = max(delay_s, self._lasting_delay_s)
        self.reason, self._probe_at, self._probing = reason, now + delay_s, False

    def may_probe(self, now: float) -> bool:
        """Whether a probe is due; if so, it counts as begun, and `half_open` or `fail_probe` must follow."""
        if self.closed or self._probing or now < self._probe_at:
            return False
        self._probing = True
        return True
