"""Reading a batch's input: every line checked, counted, grouped and compared, in one pass, without keeping it.

Blocks: call it from a thread. It does not know Redis, nor who asked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from api.openai.batch_lines import BadLine, Envelope, envelope, refusal, request_of, traits
from api.openai.errors import ApiError
from streaming.batches.batch import LineFault
from streaming.batches.ledger import InputPlan, LineOutcome, Segment, lines_of
from streaming.jobs.cards import ModelCard

MAX_FAULTS = 100
MAX_LINE = 2 * 1024 * 1024
LOOK_EVERY = 64


class SurveyInterrupted(Exception):
    """Raised when the reading was to stop before its end."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What lines are held against."""

    endpoint: str
    models: Collection[str]
    max_lines: int
    max_choices: int | None = None
    """Of one line; None: any number."""
    cards: Mapping[str, ModelCard] = field(default_factory=dict)
    """What is known of the models, by name."""
    longest: int = MAX_LINE


@dataclass(slots=True)
class Survey:
    """What an input was found to be. With faults, nothing of it is run."""

    plan: InputPlan = field(default_factory=InputPlan)
    faults: list[LineFault] = field(default_factory=list)
    models: set[str] = field(default_factory=set)
    tokens: int = 0
    refused: int = 0
    """Lines whose request is an error; their answers are in the segment."""


def survey(source: Path, terms: Terms, segment: Segment, go_on: Callable[[], bool] = lambda: True) -> Survey:
    """Read the input. Lines that are requests of this batch, but wrong ones, get their answer at once.

    Raises OSError, Interrupted (once `go_on` says no).
    """
    found, names, grouping = Survey(), _Names(), _Grouping()
    with source.open("rb") as file:
        for number, offset, data in lines_of(file, terms.longest):
            if number % LOOK_EVERY == 0 and not go_on():
                raise SurveyInterrupted
            if len(found.plan) >= terms.max_lines:
                message = f"The file has more than {terms.max_lines} lines, the most one batch may have."
                found.faults.append(LineFault(number, "too_many_lines", message))
                break
            place = found.plan.add(number, offset, len(data))
            try:
                line = _checked(data, number, terms, names)
            except BadLine as bad:
                found.faults.append(LineFault(number, bad.code, str(bad), bad.param))
                if len(found.faults) >= MAX_FAULTS:
                    break
                continue
            if not found.faults:
                _take(line, place, terms, found, grouping, segment)
    if not len(found.plan):
        found.faults.append(LineFault(0, "empty_file", "The file has no lines."))
    found.plan.order.extend(grouping.order())
    return found


def _checked(data: bytes, number: int, terms: Terms, names: _Names) -> Envelope:
    """Raises BadLine."""
    if len(data) > terms.longest:
        raise BadLine("line_too_long", f"This line has more than {terms.longest} bytes.")
    line = envelope(data, terms.endpoint)
    if earlier := names.taken(line.custom_id, number):
        raise BadLine("duplicate_custom_id", f"Line {earlier} has the same custom_id.", "custom_id")
    return line


def _take(line: Envelope, place: int, terms: Terms, found: Survey, grouping: _Grouping, segment: Segment) -> None:
    try:
        request = request_of(line, terms.models, terms.max_choices)
    except ApiError as error:
        segment.add(place, LineOutcome.FAILED, answer=refusal(error))
        found.refused += 1
        return
    seen = traits(request, terms.cards.get(request.model))
    found.models.add(seen.model)
    found.plan.twins[place] = grouping.twin(seen.twin, place)
    if found.plan.twins[place] == place:
        grouping.add(place, seen.groups)
        found.plan.tokens[place] = seen.tokens
        found.tokens += seen.tokens


class _Names:
    """Which line had a custom_id first."""

    def __init__(self) -> None:
        self._lines: dict[bytes, int] = {}

    def taken(self, name: str, number: int) -> int:
        """The line that has it already, or 0."""
        digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=16).digest()
        earlier = self._lines.setdefault(digest, number)
        return earlier if earlier != number else 0


class _Grouping:
    """Lines that begin alike after each other: groups stand where their first line stood, so a file without common
    beginnings keeps its order."""

    def __init__(self) -> None:
        self._firsts: dict[int, int] = {}
        self._keys: list[tuple[int, ...]] = []
        self._twins: dict[bytes, int] = {}

    def twin(self, digest: bytes, place: int) -> int:
        """The first line with an equal request."""
        return self._twins.setdefault(digest, place) if digest else place

    def add(self, place: int, groups: tuple[int, ...]) -> None:
        firsts = (self._firsts.setdefault(group, place) for group in groups)
        self._keys.append((*firsts, place))

    def order(self) -> list[int]:
        """The places, sorted."""
        return [key[-1] for key in sorted(self._keys)]
