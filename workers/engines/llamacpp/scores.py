"""Log-probabilities of a prompt's tokens.

llama.cpp tells those of generated tokens alone, by the model's own logits, whatever a grammar allows. So a grammar that
allows one token at a time makes it generate the prompt, at the price of an answer as long. What no grammar can force,
control tokens and parts of characters, is found among the alternatives of another token in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any

from penstock.engine import Logprob, token_text

RUN_TOKENS = 256
"""Tokens of one call: its grammar stays small, and a cancel waits for no more."""
SEARCHED = 1000
"""Alternatives in which a token is looked for before the whole vocabulary, which takes half a second."""

Complete = Callable[[dict[str, Any], Callable[[Mapping[str, Any]], bool]], object]
"""Runs a call; passes each chunk on, until that returns True."""


class PromptScorer:
    """Finds the log-probabilities of one prompt. Blocks: call it from a thread."""

    def __init__(
        self,
        complete: Complete,
        tokens: Sequence[tuple[int, bytes]],
        unforced: Collection[int],
        plain: int,
        vocabulary: int,
    ) -> None:
        """
        Args:
            tokens: the prompt's, each with its text.
            unforced: tokens that no grammar can force; parts of characters are others.
            plain: a token that one can.
        """
        self._complete, self._tokens, self._unforced = complete, tokens, unforced
        self._plain, self._vocabulary = plain, vocabulary
        self._ids = [number for number, _ in tokens]

    def rows(self, alternatives: int, stopped: Callable[[], bool]) -> list[Logprob]:
        """Those of all tokens; fewer if `stopped` has said so. Raises RuntimeError if llama.cpp does not tell them."""
        rows = [Logprob(token_text(self._tokens[0][1]), math.nan)]
        while len(rows) < len(self._tokens) and not stopped():
            found = self._forced(len(rows), alternatives, stopped)
            rows += found or ([] if stopped() else [self._searched(len(rows), alternatives)])
        return rows

    def _forced(self, begin: int, alternatives: int, stopped: Callable[[], bool]) -> list[Logprob]:
        """Those of the next tokens, up to one that cannot be forced."""
        can_force = [self._can_force(number, data) for number, data in self._tokens[begin : begin + RUN_TOKENS]]
        end = begin + [*can_force, False].index(False)
        told = self._told(begin, self._ids[begin:end], alternatives, stopped) if end > begin else []
        rows = takewhile(lambda pair: pair[0] == pair[1]["id"], zip(self._ids[begin:end], told, strict=False))
        return [Logprob(_named(row)[0], row["logprob"], _top(row, alternatives)) for _, row in rows]

    def _can_force(self, number: int, data: bytes) -> bool:
        return number not in self._unforced and not token_text(data).startswith("bytes:")

    def _searched(self, place: int, alternatives: int) -> Logprob:
        """That of one token, among the alternatives of another one in its place. Raises RuntimeError."""
        number, data = self._tokens[place]
        for count in (SEARCHED, self._vocabulary):
            for row in self._told(place, [self._plain], count):
                values = {each["id"]: each["logprob"] for each in row["top_logprobs"]}
                if number in values:
                    return Logprob(token_text(data), values[number], _top(row, alternatives))
        raise RuntimeError(f"llama.cpp does not tell the log-probability of token {number}")

    def _told(
        self, begin: int, ids: Sequence[int], logprobs: int, stopped: Callable[[], bool] = lambda: False
    ) -> list[Mapping[str, Any]]:
        """What llama.cpp says of each token while it generates `ids` behind the first tokens of the prompt."""
        told = list[Mapping[str, Any]]()

        def take(chunk: Mapping[str, Any]) -> bool:
            for choice in chunk.get("choices", ()):
                told.extend((choice["logprobs"] or {}).get("content", ()))
            return stopped()

        grammar = "root ::= " + " ".join([f"<[{number}]>" for number in ids])
        asked = {"prompt": self._ids[:begin], "grammar": grammar, "n_predict": len(ids), "temperature": 0}
        self._complete(asked | {"logprobs": max(1, logprobs), "stream": True, "return_progress": True}, take)
        return told


def _top(row: Mapping[str, Any], alternatives: int) -> tuple[tuple[str, float], ...]:
    return tuple([_named(each) for each in row["top_logprobs"][:alternatives]])


def _named(row: Mapping[str, Any]) -> tuple[str, float]:
    """The text of a token and its log-probability."""
    return token_text(bytes(row["bytes"])), row["logprob"]
