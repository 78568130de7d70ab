"""Prompts of given lengths, all different from their first word on, so that no cached prefix answers one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from random import Random

from bench.load.target import TargetServer
from planner.load import RequestLengths

WORDS = (  # noqa: SIM905 - a list of one a line would fill the screen
    "water river stone light garden morning engine paper window story question answer reason market winter summer "
    "bridge letter number people animal weather mountain machine history language picture kitchen doctor teacher "
    "because however although between under after before during about against toward small large early late often"
).split()
TEMPLATE_TOKENS = 12
"""Of a chat template around a prompt, about."""
OWN_WORDS = 4
"""Of the beginning that tells prompts apart, in tokens, about."""


class PromptSource:
    """Streamed chat requests of one workload, ready to send. `lengths` are met about: a word is about one token."""

    def __init__(self, server: TargetServer, lengths: RequestLengths, seed: int = 1) -> None:
        self._server, self._lengths = server, lengths
        self._numbers = itertools.count()
        self._random = Random(seed)  # noqa: S311 - a workload

    def bodies(self, count: int, fields: Mapping[str, object]) -> list[bytes]:
        """So many requests, with `fields`, whose lengths stand for all of the workload."""
        return [self._body(*each, fields) for each in self._lengths.sample(count, self._random)]

    def _body(self, prompt: int, answer: int, fields: Mapping[str, object]) -> bytes:
        words = self._random.choices(WORDS, k=max(1, prompt - OWN_WORDS - TEMPLATE_TOKENS))
        text = f"{next(self._numbers)} {self._random.getrandbits(32):x} {' '.join(words)}"
        return self._server.chat([{"role": "user", "content": text}], answer, **fields)
