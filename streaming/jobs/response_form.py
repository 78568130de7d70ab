"""Response form: what a job of the Responses API keeps of its request beside prompt and sampling.

Every process renders the same response object and the same events from it, from the log and from the terminal record.
"""

from __future__ import annotations

from typing import Any

import msgspec


class ResponseForm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Part of a job's body; the rules for changing a message hold for its fields."""

    background: bool = False
    """The client does not wait: the job outlives every connection."""
    store: bool = True
    """Whether it can be retrieved after its answer."""
    previous: str = ""
    """Id of the job whose conversation it continues, or ""."""
    instructed: bool = False
    """The first turn of the prompt holds `instructions`, which a response that continues this one does not inherit."""
    own_turns: int = 0
    """How many turns at the prompt's end are this request's own input; those before it are of earlier responses."""
    format: dict[str, Any] = {}
    """`text.format` as it was sent; {}: plain text."""
    top_logprobs: int = 0
    max_tool_calls: int | None = None
    parallel_tool_calls: bool = True
    metadata: dict[str, str] | None = None
    """The labels that it shows; None: those of the job. A line of a batch has others as a job."""
    tools: tuple[dict[str, Any], ...] = ()
    """As they were sent."""
    tool_choice: Any = "auto"
    conversation: str = ""
    """The conversation that its input and its answer belong to, or ""."""
    developer: tuple[int, ...] = ()
    """Places of those of its own turns that were sent with the role `developer`; engines take them as system."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
