"""Input validation of a batch: checks every line in one pass, finds duplicates, and orders lines by common prefix.

It blocks (call it from a thread), holds one line at a time in memory, and uses no Redis.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from api.openai.batch_lines import BadLine, Envelope, envelope, refusal, request_of, traits
from api.openai.errors import ApiError
from penstock.engine import ModelCard
from penstock.text import form_of
from streaming.batches.ledger import InputPlan, LineOutcome, Segment, lines_of
from streaming.batches.store import LineFault

MAX_FAULTS = 100
MAX_LINE_BYTES = 2 * 1024 * 1024
STOP_CHECK_LINES = 64
"""Lines between two calls of `should_continue`."""


class ValidationInterrupted(Exception):
    """Raised when the caller stopped the reading before its end."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Conditions that each line of a batch must satisfy."""

    endpoint: str
    models: Collection[str]
    max_lines: int
    max_choices: int | None = None
    """Choices of one line; None: any number."""
    cards: Mapping[str, ModelCard] = field(default_factory=dict)
    """Capabilities of each model, by name."""
    max_line_bytes: int = MAX_LINE_BYTES


@dataclass(slots=True)
class ValidatedInput:
    """Result of reading an input. If it has faults, no line of it is run."""

    plan: InputPlan = field(default_factory=InputPlan)
    faults: list[LineFault] = field(default_factory=list)
    models: set[str] = field(default_factory=set)
    tokens: int = 0
    refused: int = 0
    """Lines whose request was refused; the segment holds their error answers."""


def validate_input(
    source: Path, terms: Terms, segment: Segment, should_continue: Callable[[], bool] = lambda: True
) -> ValidatedInput:
    """Read and check the whole input.

    Args:
        segment: gets an error answer for each well-formed line whose request is refused.
        should_continue: asked now and then; False stops the reading.

    Raises:
        OSError: the file cannot be read.
        ValidationInterrupted: `should_continue` returned False.
    """
    found, names, grouping = ValidatedInput(), dict[bytes, int](), _PrefixOrder()
    with source.open("rb") as file:
        for number, offset, data in lines_of(file, terms.max_line_bytes):
            if number % STOP_CHECK_LINES == 0 and not should_continue():
                raise ValidationInterrupted
            if len(found.plan) >= terms.max_lines:
                message = f"The file has more than {terms.max_lines} lines, the most one batch may have."
                found.faults.append(LineFault(number, "too_many_lines", message))
                break
            place = found.plan.add(number, offset, len(data))
            try:
                line = _parsed(data, number, terms, names)
            except BadLine as bad:
                found.faults.append(LineFault(number, bad.code, str(bad), bad.param))
                if len(found.faults) >= MAX_FAULTS or (place == 0 and form_of(data)):
                    break
                continue
            if not found.faults:
                _add(line, place, terms, found, grouping, segment)
    if not len(found.plan):
        found.faults.append(LineFault(0, "empty_file", "The file has no lines."))
    found.plan.order.extend(grouping.order())
    return found


def _parsed(data: bytes, number: int, terms: Terms, names: dict[bytes, int]) -> Envelope:
    """Parse a line and check its size and custom_id. `names`: by the digest of each custom_id, the line that used it
    first. Raises BadLine."""
    if len(data) > terms.max_line_bytes:
        raise BadLine("line_too_long", f"This line has more than {terms.max_line_bytes} bytes.")
    line = envelope(data, terms.endpoint)
    digest = hashlib.blake2b(line.custom_id.encode(errors="surrogatepass"), digest_size=16).digest()
    if (earlier := names.setdefault(digest, number)) != number:
        raise BadLine("duplicate_custom_id", f"Line {earlier} has the same custom_id.", "custom_id")
    return line


def _add(
    line: Envelope, place: int, terms: Terms, found: ValidatedInput, grouping: _PrefixOrder, segment: Segment
) -> None:
    try:
        request = request_of(line, terms.models, terms.max_choices)
    except ApiError as error:
        segment.add(place, LineOutcome.FAILED, answer=refusal(error))
        found.refused += 1
        return
    seen = traits(request, terms.cards.get(request.model))
    found.models.add(seen.model)
    found.plan.duplicate_of[place] = grouping.duplicate_of(seen.digest, place)
    if found.plan.duplicate_of[place] == place:
        grouping.add(place, seen.groups)
        found.plan.tokens[place] = seen.tokens
        found.tokens += seen.tokens


class _PrefixOrder:
    """Orders lines so that those with a common prompt prefix run after each other and share the engine's KV cache.

    A group takes the place of its first line, so a file without common prefixes keeps its order.
    """

    def __init__(self) -> None:
        self._firsts: dict[int, int] = {}
        self._keys: list[tuple[int, ...]] = []
        self._by_digest: dict[bytes, int] = {}

    def duplicate_of(self, digest: bytes, place: int) -> int:
        """Return the first line with the same request digest; `place` itself if it is the first or has no digest."""
        return self._by_digest.setdefault(digest, place) if digest else place

    def add(self, place: int, groups: tuple[int, ...]) -> None:
        firsts = (self._firsts.setdefault(group, place) for group in groups)
        self._keys.append((*firsts, place))

    def order(self) -> list[int]:
        """Return the lines in the order to compute them."""
        return [key[-1] for key in sorted(self._keys)]
