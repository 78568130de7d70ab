"""Sequence: one request in the simulated engine, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass

from workers.engines.stops import TokenGate


@dataclass(slots=True, eq=False)
class SimSequence:
    """`done` counts the tokens of earlier attempts too."""

    id: str
    crc: int
    """Checksum of the prompt, from which a token's checksum is computed with the token's number alone."""
    prompt_tokens: int
    max_tokens: int
    done: int
    gate: TokenGate | None
    """None: there are no stop strings."""
    fault: tuple[str, int] | None
    end: str = "length"
    """Finish reason at its last token: a request without a limit ends by itself."""
    begun: bool = False
    """Whether its first token was sent, and with it the size of its prompt."""
    tenant: str = ""
    prompt: str = ""
    """Kept only if prompts are cached."""
    cached: int = 0
    """Tokens of its prompt that came from the prefix cache."""
    ready_at: float = 0.0
    prompt_left: int = 0
    """Tokens of its prompt that are still to be prefilled; 0 where prefill has no cost per token."""
    scheduled_at: float = 0.0
    cancelled: bool = False
    calls: tuple[str, ...] = ()
    """The tokens of its answer, if that consists of calls."""
    answer: str | None = None
    """The whole answer, if it is that of a task: it has no tokens."""
    reasoned: int = 0
    """Tokens of reasoning before its answer."""

    largest: int = 0
    """Tokens of the largest input of a task, whose inputs are computed one after another; 0: it is no task."""

    @property
    def used(self) -> int:
        """Tokens that it holds in the KV cache."""
        return self.largest or self.prompt_tokens + self.done

    @property
    def peak(self) -> int:
        """The most that it will hold."""
        return self.largest or self.prompt_tokens + self.max_tokens
