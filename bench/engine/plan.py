"""What both sides are asked: the same prompts in the same order, greedily, in a closed loop."""

from __future__ import annotations

import msgspec

SUBJECTS = (
    "a river", "an old bridge", "the sea in winter", "a lost letter", "a garden at night", "two brothers", "a road",
    "the first snow", "a clock", "a small town", "a lighthouse", "an honest thief", "a storm", "a school by the lake",
    "the last train", "a stone that could speak",
)  # fmt: skip


class EnginePlan(msgspec.Struct, frozen=True, kw_only=True):
    """`streams` callers, each asking `requests_per_stream` times."""

    path: str
    """Of the GGUF file."""
    threads: int
    streams: int = 8
    requests_per_stream: int = 4
    tokens: int = 96
    context: int = 1024

    @property
    def prompts(self) -> list[str]:
        """One for each request, all different."""
        count = self.streams * self.requests_per_stream
        return [f"Tell me story number {n + 1} about {SUBJECTS[n % len(SUBJECTS)]}." for n in range(count)]


class EngineSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all answers, from the first request to the last token."""

    tokens: int
    seconds: float
    cpu_s: float
    """Of the process the engine runs in."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu_ms_per_token(self) -> float:
        return 1e3 * self.cpu_s / self.tokens
