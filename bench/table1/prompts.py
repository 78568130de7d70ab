"""Prompts in the shape of OpenOrca's: a system prompt and a question, of which most are short and a few are long.

From a file of that dataset's form, or made up: then only the lengths mean anything.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

SYSTEM = (
    "You are a careful assistant. Answer in full sentences and say how you came to your answer.",
    "You help people understand difficult texts. Explain step by step, as to somebody who is new to the matter.",
    "",
    "Given a passage and a question about it, find what the passage says about the question and answer with it alone.",
)
WORDS = (  # noqa: SIM905 - a list of one a line would fill the screen
    "water river stone light garden morning engine paper window story question answer reason market winter summer "
    "bridge letter number people animal weather mountain machine history language picture kitchen doctor teacher "
    "because however although between under after before during about against toward small large early late often"
).split()

TYPICAL_WORDS, SPREAD, MAX_WORDS = 90, 0.9, 900
"""Of a made-up question: median, sigma of the logarithm, limit."""


class DatasetEntry(msgspec.Struct, frozen=True):
    """One line of the dataset; other fields are not looked at."""

    question: str
    system_prompt: str = ""

    @property
    def messages(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": self.question}]


def read(path: Path) -> list[DatasetEntry]:
    """A JSONL file of {system_prompt, question, response}. Raises OSError, ValueError with the line's number."""
    entries = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                entries.append(msgspec.json.decode(line, type=DatasetEntry))
            except msgspec.DecodeError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not entries:
        raise ValueError(f"{path} is empty")
    return entries


def made_up(seed: int = 1) -> Iterator[DatasetEntry]:
    """The same ones for the same seed, without end."""
    draw = random.Random(seed)  # noqa: S311 - draws words
    while True:
        count = min(MAX_WORDS, max(4, round(draw.lognormvariate(0, SPREAD) * TYPICAL_WORDS)))
        yield DatasetEntry(" ".join(draw.choices(WORDS, k=count)) + "?", draw.choice(SYSTEM))
