"""Turns of stored items, made in slices, so that a long conversation stalls no other reader."""

from __future__ import annotations

import msgspec
import pytest

from api.openai.responses.items import ITEMS_PER_SLICE, shown_turn, turns_of
from penstock.engine import ChatTurn
from penstock.loops import at_once
from penstock.tools import ToolCall
from streaming.errors import DecodeError
from streaming.jobs.conversations import ConversationItem

CALL = ChatTurn("assistant", "", (ToolCall("call_1", "f", "{}"),))
REFUSED = ChatTurn("assistant", "No.", extras={"content": None, "refusal": "No."})
OUTPUT = ChatTurn("tool", "42", call_id="call_1")


def stored(turn: ChatTurn, answer: str = "", *, developer: bool = False) -> ConversationItem:
    return ConversationItem("x", msgspec.Raw(msgspec.json.encode(shown_turn("x", turn, developer=developer))), answer)


def test_items_are_turns_and_those_of_one_answer_are_one() -> None:
    items = [
        stored(ChatTurn("system", "Be brief."), developer=True),
        stored(ChatTurn("user", "q")),
        stored(ChatTurn("assistant", "Let me see."), "job_1"),
        stored(CALL, "job_1"),
        stored(OUTPUT),
        stored(ChatTurn("assistant", "It is 42."), "job_2"),
        stored(ChatTurn("assistant", "Really."), "job_3"),
        stored(REFUSED),
        stored(ChatTurn("assistant", "Well. "), "job_4"),
        stored(REFUSED, "job_4"),
    ]
    assert at_once(turns_of(items)) == (
        ChatTurn("system", "Be brief."),
        ChatTurn("user", "q"),
        ChatTurn("assistant", "Let me see.", CALL.calls),
        OUTPUT,
        ChatTurn("assistant", "It is 42."),
        ChatTurn("assistant", "Really."),
        REFUSED,
        ChatTurn("assistant", "Well. No."),
    )


def test_a_long_conversation_is_made_in_slices() -> None:
    """Others run in between."""
    items = [stored(ChatTurn("user", str(number))) for number in range(5 * ITEMS_PER_SLICE)]
    assert len(list(turns_of(items))) == 5
    assert [turn.content for turn in at_once(turns_of(items))] == [str(number) for number in range(len(items))]


@pytest.mark.parametrize(
    "data",
    [b"{}", b"[]", b'{"type": "song"}', b'{"type": "message", "role": "user"}', b"\xff",
     b'{"type": "message", "role": "king", "content": []}', b'{"type": "message", "role": "user", "content": "x"}',
     b'{"type": "message", "role": "user", "content": [{"type": "image"}]}',
     b'{"type": "function_call", "call_id": 5, "name": "f", "arguments": "{}"}',
     *(b'{"type": "message", "role": "user", "content": [{"text": %b}]}' % text for text in (b"0", b'"\xff"'))],
)  # fmt: skip
def test_an_item_that_is_none_is_corrupt(data: bytes) -> None:
    with pytest.raises(DecodeError):
        at_once(turns_of([ConversationItem("x", msgspec.Raw(data))]))
