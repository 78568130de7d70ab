"""Transport of responses: what is held back is sent with the next write, and never lost."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from api.stream.connection import AnswerTransport


class Wire:
    """Notes each write, and the end."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def end(self) -> None:
        self.written.append(b"end")


END = None
"""In place of data: the connection is closed."""


@pytest.mark.parametrize(
    ("told", "written"),
    [
        ([b"head", b"first", b"second"], [b"headfirst", b"second"]),
        ([b"head", END], [b"head", b"end"]),
        ([END, b"late"], [b"end", b"late"]),
    ],
    ids=["a head goes with the first chunk alone", "a head without a body", "an end without a head"],
)
def test_what_is_held_back_is_sent_with_the_next_write_or_before_the_end(
    told: list[bytes | None], written: list[bytes]
) -> None:
    wire = Wire()
    transport = AnswerTransport(cast(asyncio.Transport, wire), wire.end)
    transport.hold()
    for data in told:
        if data is None:
            transport.close()
        else:
            transport.write(data)
    assert wire.written == written
