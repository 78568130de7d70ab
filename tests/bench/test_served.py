"""`bench gpu`: the slots and the words of its server, whose answers are those of each text alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from random import Random

from bench.gpu.server import text_of, tokens_of
from bench.gpu.slots import SlotTable, SlotText

VOCAB, SLOTS = 4000, 4


class ChainedSteps:
    """Steps of a model that knows only the token and its place, but looks whether the cache has all before it."""

    def __init__(self) -> None:
        self._cache: dict[tuple[int, int], int] = {}

    def run(self, tokens: Sequence[int], slots: Sequence[int], places: Sequence[int]) -> list[int]:
        rows = list(zip(tokens, slots, places, strict=True))
        assert len({(slot, place) for _, slot, place in rows}) == len(rows)
        for token, slot, place in rows:
            if place == 0:
                for key in [key for key in self._cache if key[0] == slot]:
                    del self._cache[key]
            self._cache[slot, place] = token
        for _, slot, place in rows:
            assert all((slot, at) in self._cache for at in range(place)), "a token before this one is missing"
        return [chained(token, place) for token, _, place in rows]


def chained(token: int, place: int) -> int:
    return (31 * token + place) % VOCAB


def answer_of(prompt: Sequence[int], tokens: int) -> list[int]:
    found, token = [], prompt[-1]
    for place in range(len(prompt) - 1, len(prompt) - 1 + tokens):
        token = chained(token, place)
        found.append(token)
    return found


def test_every_text_has_its_answer_whatever_runs_beside_it() -> None:
    """More texts than slots, with prompts longer than a step, some of which are left."""
    random, table, steps = Random(3), SlotTable(SLOTS, 40, 32), ChainedSteps()
    texts = [SlotText([random.randrange(VOCAB) for _ in range(random.randint(1, 90))], random.randint(1, 30))
             for _ in range(40)]  # fmt: skip
    answers: dict[SlotText, list[int]] = {text: [] for text in texts}
    coming = iter(texts)
    for number in count():
        for text in [next(coming, None) for _ in range(number % 3)]:
            if text is not None:
                table.submit(text)
        step = table.next_step()
        if step is None and number > 60:
            break
        if step is not None:
            for text, token, is_last in table.took(step, steps.run(step.tokens, step.slots, step.places)):
                answers[text].append(token)
                assert is_last == (len(answers[text]) == text.limit)
        texts[7].has_left = number > 12
    for text in texts[:7] + texts[8:]:
        assert answers[text] == answer_of(text.prompt, text.limit)
    assert len(answers[texts[7]]) < texts[7].limit and texts[7].slot == -1


def test_a_text_continues_where_it_was_cut() -> None:
    """The answer so far behind the prompt is read as the tokens that it was written of."""
    prompt, answer = "7 2b3c river 99999 ² stone", [0, 5, VOCAB - 1]
    begun = prompt + "".join(map(text_of, answer))
    assert tokens_of(begun, VOCAB) == [*tokens_of(prompt, VOCAB), *answer]
    assert tokens_of(prompt, VOCAB)[0] == 7 and max(tokens_of(prompt, VOCAB)) < VOCAB
