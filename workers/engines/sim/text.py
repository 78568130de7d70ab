"""Text of the simulated engine: each token is a function of the prompt and of its index."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from penstock.engine import CHARACTERS_PER_TOKEN, ChatTurn, Sampling

WORDS = tuple(
    "amber brook cedar delta ember fjord grove haven inlet jetty kelp lagoon mill north ocean pier quarry river sluice "  # noqa: SIM905
    "tide upland valve weir xylem yarrow zephyr basin canal drift eddy ford gate".split()
)
INNER = tuple(f" {word}" for word in WORDS)
"""The words as they follow another token."""


def prompt_text(prompt: Sequence[ChatTurn] | str | Sequence[int]) -> str:
    """Render a prompt as text."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(_line(item) if isinstance(item, ChatTurn) else str(item) for item in prompt)


def _line(turn: ChatTurn) -> str:
    calls = "".join([f" {call.name}({call.arguments})" for call in turn.calls])
    return f"{turn.role}: {turn.content}{calls}"


def sampling_text(sampling: Sampling) -> str:
    """The sampling fields that change the answer, as a text that counts like an end of the prompt; "" if none is set.

    So a test sees from the answer whether the fields have reached the engine."""
    asked = {name: getattr(sampling, name) for name in ("top_k", "min_p", "repetition_penalty")}
    asked["logit_bias"] = dict(sorted(sampling.logit_bias.items())) or None
    return "".join([f"\n{name}={value}" for name, value in asked.items() if value is not None])


def token_text(prompt: str, index: int) -> str:
    """The text of token `index` (from 0) of the answer to `prompt`."""
    number = zlib.crc32(f"{prompt}{index}".encode())
    return f"{(INNER if index else WORDS)[number % len(WORDS)]}{index}"


def count_tokens(prompt: str) -> int:
    """At least one, by the estimate."""
    return max(1, len(prompt) // CHARACTERS_PER_TOKEN)
