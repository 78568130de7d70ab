"""The splitter of server-sent events."""

from __future__ import annotations

import pytest

from workers.engines.upstream.http import MAX_LINE_BYTES, EventSplitter, LineTooLongError

STREAMS = {
    b': ping\r\ndata: {"a": 1}\r\n\r\nevent: x\nid: 3\ndata:{"b":2}\n\n\ndata: [DONE]\n\n':
        [b'{"a": 1}', b'{"b":2}', b"[DONE]"],
    b'\xef\xbb\xbfdata: {"a":1}\r\rdata: {"b":2}\r\rdata: [DONE] \r\r': [b'{"a":1}', b'{"b":2}', b"[DONE]"],
    b'\xef\xbb\xbf\r\n: x\r\n\r\ndata: {"a":1}\r\n\r\n': [b'{"a":1}'],
    b'data\n\ndata:\n\ndata: \n\nretry: 5\n\nid\n\ndata: {"a":1}\n\n': [b'{"a":1}'],
    b'data: {"a":\ndata: "\xc3\xa4"}\n\n': [b'{"a":\n"\xc3\xa4"}'],
    b'data: {"a":1}\ndata: {"b":2}\ndata: [DONE]\n': [b'{"a":1}', b'{"b":2}', b"[DONE]"],
    b'event: ping\ndata: {"type": "ping"}\n\nevent: heartbeat\ndata: x\n\ndata: {"a":1}\n\n': [b'{"a":1}'],
    b'event: ping\n\ndata: {"a":1}': [b'{"a":1}'],
}  # fmt: skip


@pytest.mark.parametrize("stream", STREAMS, ids=repr)
def test_events_are_the_same_however_they_are_cut(stream: bytes) -> None:
    for size in range(1, len(stream) + 1):
        splitter = EventSplitter()
        found = [each for at in range(0, len(stream), size) for each in splitter.feed(stream[at : at + size])]
        assert [*found, *splitter.flush()] == STREAMS[stream]


@pytest.mark.parametrize("data", [b"x", b"data: x\n"])
def test_a_line_or_an_event_without_an_end_is_refused(data: bytes) -> None:
    splitter = EventSplitter()
    with pytest.raises(LineTooLongError):
        for _ in range(100):
            splitter.feed(data * (MAX_LINE_BYTES // 50))
