"""Co-location: says which texts of lane batch may begin beside chats, from what it learns of one engine. Pure.

It learns from what is not mixed with other work: from steps that compute no prompt, and from first tokens of texts
whose prompts were computed alone. A burst of prompts would otherwise count as the usual cost of one, and hold lane
batch back until many later observations have outweighed it.
"""

from __future__ import annotations

from collections.abc import Collection

from workers.gate.decision import GateDecision
from workers.gate.gate import HeldText
from workers.gate.predictor import LatencyPredictor, may_admit_offline
from workers.gate.smoothed import Smoothed

SAMPLE_INTERVAL_S = 0.1
"""How often the duration of a step is noted for the predictor."""


class Colocation:
    """The latencies of one engine, and the targets that chats keep."""

    def __init__(self, ttft_ms: float | None = None, itl_ms: float | None = None) -> None:
        """Milliseconds that chats may wait for their first token, and between two tokens; None: no target."""
        self._ttft_ms, self._itl_ms = ttft_ms, itl_ms
        self._predictor = LatencyPredictor()
        self._chat = Smoothed()
        """Tokens of the prompts of chats."""
        self._sampled_at = 0.0
        self._began_at: float | None = None
        """When the step began that is being timed."""

    def note_chat(self, prompt: int) -> None:
        """A chat with so many tokens of prompt was claimed."""
        self._chat.note(prompt)

    def begin(self, text: HeldText, held: Collection[HeldText]) -> None:
        """The engine gets a text beside those that it holds."""
        computed = [each for each in held if not each.generated]
        text.is_alone = not computed
        for each in computed:
            each.is_alone = False
        self._began_at = None

    def is_due(self, now: float) -> bool:
        """Whether `note_step` is to be called for a step that has ended now."""
        return self._began_at is not None or now - self._sampled_at >= SAMPLE_INTERVAL_S

    def note_step(self, texts: int, held: Collection[HeldText], now: float) -> None:
        """Learn from a step that gave a token to `texts` texts and ended `now`, if it computed no prompt; or else time
        the next one. `held`: what the engine holds now."""
        self._sampled_at = now
        began_at, self._began_at = self._began_at, None
        if began_at is not None:
            self._predictor.note_step(texts, tokens_of(held), now - began_at)
        elif held and all(each.generated for each in held):
            self._began_at = now

    def note_first(self, text: HeldText, prompt: int, seconds: float) -> None:
        """Learn how long the first token of a text took, with so many tokens of prompt to compute."""
        if text.is_alone:
            self._predictor.note_first(prompt, seconds)

    def admit(self, prompt: int, held: Collection[HeldText], offline: int) -> GateDecision:
        """Decide whether a text of lane batch may begin beside those that the engine holds. `prompt`: its tokens;
        `offline`: how many of the others are of lane batch."""
        return may_admit_offline(
            self._predictor,
            ttft_ms=self._ttft_ms,
            itl_ms=self._itl_ms,
            texts=len(held),
            offline=offline,
            held=tokens_of(held),
            prefills=[each.prompt for each in held if not each.generated],
            prompt=prompt,
            chat_prompt=round(self._chat.value),
        )


def tokens_of(held: Collection[HeldText]) -> int:
    """Tokens that the texts hold in the KV cache."""
    return sum([each.prompt + each.generated for each in held])
