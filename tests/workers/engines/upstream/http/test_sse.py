"""The splitter of server-sent events."""

from __future__ import annotations

import pytest

from workers.engines.upstream.http.sse import MAX_LINE_BYTES, EventSplitter, LineTooLongError


def test_events_are_the_same_however_they_are_cut() -> None:
    stream = b': ping\r\ndata: {"a": 1}\r\n\r\nevent: x\nid: 3\ndata:{"b":2}\n\n\ndata: [DONE]\n\n'
    for size in range(1, len(stream)):
        splitter = EventSplitter()
        found = [each for at in range(0, len(stream), size) for each in splitter.feed(stream[at : at + size])]
        assert found == [b'{"a": 1}', b'{"b":2}', b"[DONE]"]


def test_a_line_without_an_end_is_refused() -> None:
    splitter = EventSplitter()
    with pytest.raises(LineTooLongError):
        for _ in range(100):
            splitter.feed(b"x" * (MAX_LINE_BYTES // 50))
