"""Transport of responses: what is held back is sent with the next write, and never lost."""

from __future__ import annotations

import asyncio
from typing import cast

from api.stream.connection import AnswerTransport


class Wire:
    """Notes each write, and the end."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def end(self) -> None:
        self.written.append(b"end")


def transport_to(wire: Wire) -> AnswerTransport:
    return AnswerTransport(cast(asyncio.Transport, wire), wire.end)


def test_a_held_head_is_sent_with_the_first_chunk_in_one_write() -> None:
    wire = Wire()
    transport = transport_to(wire)
    transport.hold()
    for data in (b"head", b"first", b"second"):
        transport.write(data)
    assert wire.written == [b"headfirst", b"second"]


def test_the_next_response_of_the_connection_is_not_held() -> None:
    wire = Wire()
    transport = transport_to(wire)
    transport.hold()
    for data in (b"head", b"body", b"next head"):
        transport.write(data)
    assert wire.written[-1] == b"next head"


def test_a_head_without_a_body_is_sent_before_the_end() -> None:
    wire = Wire()
    transport = transport_to(wire)
    transport.hold()
    transport.write(b"head")
    transport.close()
    assert wire.written == [b"head", b"end"]


def test_an_end_without_a_head_writes_nothing() -> None:
    wire = Wire()
    transport = transport_to(wire)
    transport.hold()
    transport.close()
    transport.write(b"late")
    assert wire.written == [b"end", b"late"]
