"""An attempt's record: every delta once, in order, whatever earlier attempts logged, as the frames have them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from streaming.lease import Claim
from streaming.messages import Chat, Delta, Generated, Job, Logprob, Priority, Sampling, Turn, decode_terminal, encode
from workers.attempt import Attempt
from workers.engine import Piece

STREAM = 7
LOGPROB = Logprob("a", -0.5, (("b", -1.5),))

texts = st.text(max_size=6)
ids = st.lists(st.integers(0, 2**31), max_size=3).map(tuple)
pieces = st.builds(
    Piece, id=st.just("j/0"), text=texts, ids=ids, n=st.integers(1, 3), logprobs=st.sampled_from([(), (LOGPROB,)])
)


@st.composite
def histories(draw: st.DrawFn) -> list[Delta]:
    """What earlier attempts logged, under other numbers; one of them may be lost."""
    rows = [
        Delta(draw(st.integers(0, 2**40)), seq, 0, draw(texts), draw(ids), draw(st.integers(0, 3)))
        for seq in range(1, draw(st.integers(1, 20)))
    ]
    if len(rows) > 1 and draw(st.booleans()):
        del rows[draw(st.integers(0, len(rows) - 2))]
    return rows


def attempt_with(history: list[Delta]) -> Attempt:
    job = Job(
        id="0-job",
        model="m",
        tenant="t",
        priority=Priority.STANDARD,
        prompt=Chat((Turn("user", "hello"),)),
        sampling=Sampling(),
        stream=True,
    )
    claim = Claim(
        job=job,
        partition=0,
        attempt=2,
        created_ms=1,
        claimed_ms=2,
        deadline_ms=None,
        reply=("penstock:api:a",),
        past=(),
        first_frame=1,
    )
    attempt = Attempt(claim, STREAM, history)
    attempt.requests()
    return attempt


@given(histories(), st.lists(pieces, max_size=20))
def test_the_record_holds_what_was_logged_before_and_what_was_given_out(
    history: list[Delta], given_out: list[Piece]
) -> None:
    attempt = attempt_with(history)
    taken = [attempt.take(0, piece, 1.0) for piece in given_out]
    last = history[-1].seq if history else 0
    expected = [replace(row, stream=STREAM) for row in history] + [
        Delta(STREAM, last + number, 0, piece.text, piece.ids, piece.n, "", piece.logprobs)
        for number, piece in enumerate(given_out, 1)
    ]
    end = decode_terminal(encode(attempt.terminal("w", Generated())))
    assert list(end.rows) == expected
    assert (end.seq, end.usage.completion) == (last + len(given_out), sum(row.n for row in expected))
    assert attempt.logged() == [encode(row) for row in expected]
    assert [row for row in taken if row is not None] == [encode(row) for row in expected[len(history) :]]


def test_a_record_of_many_deltas_is_read_like_any_other() -> None:
    """More than a short array's head can count."""
    attempt = attempt_with([])
    for _ in range(70_000):
        attempt.take(0, Piece("j/0", "x", (1,), 1), 1.0)
    end = decode_terminal(encode(attempt.terminal("w", Generated())))
    assert [row.seq for row in end.rows] == list(range(1, 70_001))
    assert end.rows[-1] == Delta(STREAM, 70_000, 0, "x", (1,), 1)
