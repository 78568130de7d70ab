"""When one answer came from its worker and was handed to the network: four moments per request, none per token."""

from __future__ import annotations

import time

from api.admission import Admitted
from api.services import Services
from streaming.jobs.deliveries import Delivered


class Delivery:
    """Of one reply. Each moment is set by one call when it comes; `note` passes them on for the job's timing."""

    __slots__ = ("_first_got", "_first_sent", "_last_got", "_last_sent")

    def __init__(self) -> None:
        self._first_got = self._first_sent = self._last_got = self._last_sent = 0.0

    def first_got(self) -> None:
        """The first token is here."""
        self._first_got = time.monotonic()

    def first_sent(self) -> None:
        """It is with the network; called again it changes nothing."""
        self._first_sent = self._first_sent or time.monotonic()

    def last_got(self) -> None:
        """The job's end is here."""
        self._last_got = time.monotonic()

    def last_sent(self) -> None:
        """The end of the answer is with the network."""
        self._last_sent = time.monotonic()

    def note(self, services: Services, admitted: Admitted) -> None:
        """The answer is over. A job that another request made has that one's answer in its timing."""
        if admitted.accepted.joined or not (self._first_got or self._last_got):
            return
        clock, partition, whole = services.clock, admitted.partition, not admitted.request.stream
        services.deliveries.note(
            admitted.job.id,
            Delivered(
                first_got=0 if whole else clock.at(self._first_got, partition),
                first_sent=0 if whole else clock.at(self._first_sent, partition),
                last_got=clock.at(self._last_got, partition),
                last_sent=clock.at(self._last_sent, partition),
                clock_us=clock.error_us(partition),
                whole=whole,
            ),
        )
