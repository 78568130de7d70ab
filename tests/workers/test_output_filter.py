"""Content rules on answers: what a reader sees is what the log holds, whoever generates it and however it is split."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace
from sim_worker import FAST, LONG, Workshop, a_job, expected, failure_of, text_of, until

from penstock.content import Cleaner, ContentSettings, Hit, TenantRules, marker, rules_of
from penstock.engine import RETURNED, Failure, Logprob, ModelCard, Piece, Sampling, Step
from penstock.patterns import Patterns
from streaming.jobs.job import JobState
from workers.engines.sim.engine import SimEngine
from workers.engines.text import joined
from workers.output_filter import OutputFilter

CARD = "4111 1111 1111 1111"
PII = Patterns({"pii": ContentSettings(detect=("card", "email"), deny=("so secret",), action="redact")})
STRICT = Patterns({"no": ContentSettings(detect=("card",)), "pii": ContentSettings(detect=("email",), action="redact")})


def cleaned(patterns: Patterns, text: str) -> tuple[str, list[Hit]]:
    """A whole text as it may be shown, and what was found in it."""
    cleaner = Cleaner(patterns)
    return cleaner.text(text), cleaner.hits


def tokens(*texts: str, finish: str = "stop") -> list[Piece]:
    """One token for each text, with its id and its log-probability; the last one ends."""
    made = [Piece("r", text, (at,), 1, logprobs=(Logprob(text, -1.0),)) for at, text in enumerate(texts)]
    return [*made[:-1], replace(made[-1], finish=finish)]


def passed(patterns: Patterns, pieces: list[Piece], shown: str = "") -> list[Piece]:
    """What a reader gets, up to the last piece."""
    output, found = OutputFilter(patterns, shown), list[Piece]()
    for piece in pieces:
        found.append(output.feed(piece, []))
        if found[-1].last:
            break
    return found


def text_in(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


TEXTS = st.lists(
    st.sampled_from(
        [f" {CARD}.", CARD, "4111 ", "1111", "a@b.co", "so ", "secret", "x", " ", "é", "1", "机密", "\x1e", "\n"]
    ),
    max_size=12,
).map("".join)


@given(TEXTS, st.lists(st.integers(0, 6), min_size=1).filter(any), st.integers(0, 30))
@example(f" {CARD}. {CARD}.a@b.co", [1, 1, 6], 17)
def test_an_answer_is_the_filter_of_the_whole(text: str, sizes: list[int], death: int) -> None:
    """However its tokens are cut, and if another worker goes on after what was logged. Each token counts once; one that
    was changed has neither id nor log-probability, and every other one has both."""
    cuts, at = list[str](), 0
    while at < len(text) or not cuts:
        size = sizes[len(cuts) % len(sizes)]
        cuts.append(text[at : at + size])
        at += size
    pieces = tokens(*cuts)
    got = passed(PII, pieces)
    assert text_in(got) == cleaned(PII, text)[0] and got[-1].finish == "stop"
    assert sum(piece.n for piece in got) == len(cuts)
    kept = [number for piece in got for number in piece.ids]
    assert kept == sorted(kept) and len(kept) == sum(len(piece.logprobs) for piece in got)
    assert all(cuts[number] in text_in(got) for number in kept)
    first = passed(PII, pieces[: min(death, len(pieces) - 1)])
    logged = sum(piece.n for piece in first)
    rest = passed(PII, pieces[logged:], text_in(first))
    assert text_in(first) + text_in(rest) == text_in(got)


@given(TEXTS, st.integers(1, 5))
@example(f"{CARD} x", 1)
def test_a_blocked_answer_ends_before_what_blocks_it(text: str, size: int) -> None:
    pieces = tokens(*[text[at : at + size] for at in range(0, len(text) or 1, size)])
    got, (whole, hits) = passed(STRICT, pieces), cleaned(STRICT, text)
    blocked = any(hit.action == "block" for hit in hits)
    assert (text_in(got), got[-1].finish) == (whole, "content_filter" if blocked else "stop")


def test_text_waits_only_while_it_may_be_a_match() -> None:
    """A number is held back until it is none; other words pass at once."""
    output = OutputFilter(PII)
    given_out = [output.feed(piece, []).text for piece in tokens("The ", "41", "11 11", "11", ". ", "So", " far")]
    assert given_out == ["The ", "", "", "", "4111 1111. ", "", "So far"]


def test_what_came_back_is_generated_again() -> None:
    """A request that its engine gives back, and one that failed: what is held back is not logged, or told as it is."""
    for finish, text, count in ((RETURNED, "", 0), ("cancelled", "4111 1", 2)):
        *_, last = passed(PII, tokens("ok ", "4111 ", "1", finish=finish))
        assert (last.text, last.n, last.finish) == (text, count, finish)
    failed = Piece("r", failure=Failure("engine_error", "x"))
    assert passed(PII, [*tokens("ok ", "4111", "")[:2], failed])[-1] == replace(failed, text="4111", ids=(1,), n=1,
        logprobs=(Logprob("4111", -1.0),))  # fmt: skip


def test_a_match_that_began_before_is_not_completed() -> None:
    """Another worker's engine generates something else than the first one would have: the rest is not shown."""
    assert text_in(passed(PII, tokens("1111 1111", " 1111", " ok"), "It is 4111 ")) == f"{marker('pii')} ok"
    (only,) = passed(STRICT, tokens("1111 1111 1111.", " ok"), "It is 4111 ")
    assert (only.text, only.finish) == ("", "content_filter")
    assert text_in(passed(STRICT, tokens("More"), f"It was {CARD}, ")) == "More", "what was shown is no new match"


def test_further_fields_are_looked_at() -> None:
    """Each text in what the model's server says beside the answer."""
    hits = list[Hit]()
    extras = {"delta": {"refusal": f"No {CARD}", "notes": [{"to": "a@b.co"}, 3]}}
    piece = Piece("r", "hi ", n=1, finish="stop", extras=extras)
    clean = {"delta": {"refusal": f"No {marker('pii')}", "notes": [{"to": marker("pii")}, 3]}}
    assert OutputFilter(PII).feed(piece, hits).extras == clean and len(hits) == 2
    assert OutputFilter(STRICT).feed(piece, []).finish == "content_filter"


def test_tokens_without_text_at_a_match_tell_nothing() -> None:
    """They are parts of its characters. Others keep id and row, and so do tokens far from a match."""
    card = ("hi ", "", "4111 1111", "", " 1111 1111", "", " x", "", " y")
    none = ("", "so ", "", "4111", "", "12", "", "x")
    for patterns, cuts, kept in (
        (PII, card, [0, 6, 7, 8]), (STRICT, card, [0]), (PII, none, [*range(8)]), (STRICT, none, [*range(8)]),
    ):  # fmt: skip
        got = passed(patterns, tokens(*cuts))
        assert [number for piece in got for number in piece.ids] == kept
        assert [row.token for piece in got for row in piece.logprobs] == [cuts[number] for number in kept]


def test_what_is_redacted_beside_a_token_is_not_in_its_row() -> None:
    """Nor in its id: tokens of reasoning that a server tells apart have log-probabilities too."""
    for text, kept in (("a@b.co", 0), ("plain", 1)):
        piece = replace(tokens("hi ")[0], extras={"delta": {"note": text}})
        got = OutputFilter(PII).feed(piece, [])
        assert (len(got.ids), len(got.logprobs)) == (kept, kept)


def test_keys_are_looked_at() -> None:
    """Those that the model's server has chosen; the others say what is where."""
    patterns = Patterns({"no": ContentSettings(deny=("a@b.co", "delta", "calls", "refusal", "0"), action="redact")})
    extras = {"delta": {"refusal": "x", "notes": {"a@b.co": 1, "c": 2}}, "calls": {"0": {"x": 1}}}
    clean = {"delta": {"refusal": "x", "notes": {marker("no"): 1, "c": 2}}, "calls": {"0": {"x": 1}}}
    assert OutputFilter(patterns).feed(Piece("r", extras=extras, finish="stop"), []).extras == clean


@given(TEXTS, st.integers(1, 6), st.booleans())
@example(f"It is {CARD}", 3, False)
def test_a_field_that_goes_on_is_the_filter_of_the_whole(text: str, size: int, answered: bool) -> None:
    """However a server cuts its reasoning or its refusal; and what waits comes before the text of the answer."""
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    said = [Piece("r", n=1, extras={"delta": {"reasoning": each, "refusal": each}}) for each in parts]
    rest = [Piece("r", "And ", (1,), 1), Piece("r", finish="stop")][not answered :]
    for patterns in (PII, STRICT):
        got, (whole, hits) = passed(patterns, [*said, *rest]), cleaned(patterns, text)
        blocked = any(hit.action == "block" for hit in hits)
        assert got[-1].finish == ("content_filter" if blocked else "stop")
        found = joined("r", got)
        for name in ("reasoning", "refusal"):
            shown = (found.extras or {}).get("delta", {}).get(name, "")
            assert shown == whole or (blocked and whole.startswith(shown))
        assert found.text == ("And " if answered and not blocked else "")
        if answered and not blocked:
            before = joined("r", got[:-1])
            assert (before.extras or {}).get("delta", {}).get("reasoning", "") == whole


def test_a_field_that_goes_on_behind_text_completes_no_match() -> None:
    """What has come out of it stays; the rest of a match is not shown."""
    first, second = ({"delta": {"reasoning": each}} for each in ("It is 4111 1111", " 1111 1111 then"))
    pieces = [Piece("r", n=1, extras=first), *tokens("So ", "x")[:1], Piece("r", n=1, extras=second)]
    found = joined("r", passed(PII, [*pieces, Piece("r", finish="stop")]))
    assert found.extras == {"delta": {"reasoning": f"It is 4111 1111{marker('pii')} then"}}


def test_a_block_beside_an_answer_keeps_back_what_was_held() -> None:
    """What waits may be the begin of a match: it is not shown, and what was found before is redacted."""
    beside = Piece("r", n=1, extras={"delta": {"note": f"No {CARD}"}})
    for held in ("4111 1111 1111 111", "a@b.c"):
        *_, last = got = passed(STRICT, [*tokens("to c@d.ef ", "or ", held, "")[:3], beside])
        assert text_in(got) == f"to {marker('pii')} or " and last.finish == "content_filter"
        assert sum(piece.n for piece in got) == 4 and last.extras == {"delta": {"note": "No "}}


def test_the_places_of_an_answer_are_bounded() -> None:
    """One that is written to take long ends, wherever it is: a chunk of a hundred kilobytes would keep the worker's
    loop for seconds. Tables of numbers do not end."""
    text = "AA00 " * 26_000
    patterns = Patterns({"pii": ContentSettings(detect=("iban", "email"), action="redact")})
    chunk = Piece("r", text, n=30_000)
    beside = Piece("r", "x", n=30_000, extras={"delta": {"note": text}})
    many = [Piece("r", "AA00 " * 10, n=1) for _ in range(1000)]
    for pieces, most in (([chunk], 1), ([beside], 1), (many, 200)):
        *_, last = got = passed(patterns, [*tokens("to a@b.co ", "x")[:1], *pieces])
        assert last.finish == "content_filter" and len(got) <= 1 + most and last.extras is None
        assert text.startswith(text_in(got).removeprefix(f"to {marker('pii')} ")), "what is shown was looked at"
    table = tokens(*(["45", "12 "] * 3000))
    assert passed(PII, table)[-1].finish == "stop"


# --- workers ---------------------------------------------------------------------------------------------------------


def rules(*deny: str, action: str = "redact") -> TenantRules:
    found = rules_of({"r": ContentSettings(deny=deny, action=action)}, {"t": ("r",)}, ["output"])  # type: ignore[arg-type]
    assert found is not None
    return found


def phrase_in(text: str, first: int, count: int = 2) -> str:
    """So many words of an answer, which are as many tokens."""
    return " ".join(text.split()[first : first + count])


async def test_the_next_worker_shows_the_same_text(shop: Workshop) -> None:
    """A worker dies while it holds tokens back, and after a redaction; the record has what it would have had."""
    whole = expected("hello", 400)
    denied = [phrase_in(whole, at) for at in range(3, 390, 20)]
    content = rules(*denied)
    first = await shop.start(replace(LONG, step_ms=3), content=content)
    job = await shop.put("hello", 400, stream=True)
    await until(lambda: shop.has_deltas(job, 60))
    first.task.cancel()
    await asyncio.gather(first.task, return_exceptions=True)
    await shop.start(content=content)
    record = await shop.ended(job)
    assert [each.outcome for each in record.attempts] == ["lost", "completed"]
    shown = whole
    for each in denied:
        shown = shown.replace(each, marker("r"))
    assert text_of(record) == shown and shown.count(marker("r")) == len(denied)
    assert record.terminal is not None and record.terminal.usage.completion == 400


async def test_a_blocked_choice_ends_alone(shop: Workshop) -> None:
    """Its engine stops it and its slot is free; the other choices, and other tenants' jobs, are whole."""
    whole = {index: expected("hello", 400) for index in range(2)}
    running = await shop.start(
        replace(LONG, step_ms=1), content=rules(phrase_in(expected("hello", 400), 5), action="block")
    )
    job = await shop.put("hello", 400, sampling=Sampling(max_tokens=400, n=2))
    other = await shop.put("hello", 50, tenant="u", id=shop.queue.new_id("u"))
    record = await shop.ended(job)
    assert record.state is JobState.COMPLETED and record.terminal is not None
    assert record.terminal.finishes == ("content_filter", "content_filter")
    for index, text in whole.items():
        assert text_of(record, index) == text[: text.index(phrase_in(text, 5))]
    assert 10 <= record.terminal.usage.completion < 100, "the tokens up to there, and no others"
    await shop.completed(other, "hello", 50)
    await until(lambda: not running.engine.stats().running)


class Deep(SimEngine):
    """Gives fields of very many levels for the jobs in `bad`."""

    async def start(self, on_step: Step, on_phase: Callable[[str], None]) -> ModelCard:
        self.bad, self.deep = set[str](), list[Any]()
        for _ in range(5000):
            self.deep = [self.deep]
        return await super().start(lambda pieces: on_step([self._spoiled(each) for each in pieces]), on_phase)

    def _spoiled(self, piece: Piece) -> Piece:
        bad = piece.id.partition("/")[0] in self.bad
        return replace(piece, extras={"delta": {"x": self.deep}}) if bad else piece


async def test_what_cannot_be_looked_through_fails_its_own_job(shop: Workshop) -> None:
    """Those beside it go on, and so does the worker."""
    running = await shop.start(FAST, engine=Deep, content=rules("nothing of the sort"))
    bad = a_job(shop.queue, "bad", 20)
    running.engine.bad.add(bad.id)
    await shop.queue.put(bad)
    beside = await shop.put("beside", 50)
    assert failure_of(await shop.ended(bad)).code == "engine_error"
    for job, text in ((beside, "beside"), (await shop.put("after", 50), "after")):
        await shop.completed(job, text, 50)


@pytest.mark.parametrize("deny", ["nothing of the sort"])
async def test_an_answer_without_a_match_is_as_it_was(shop: Workshop, deny: str) -> None:
    await shop.start(FAST, content=rules(deny, action="block"))
    await shop.completed(await shop.put("hello", 100), "hello", 100)
