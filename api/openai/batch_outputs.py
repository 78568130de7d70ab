"""What a batch gives: its answers and its errors in the order of its input, when it has ended and while it runs.

Every line of the input is in one of the two, once. Blocks: call it from a thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from api.openai.batch_lines import not_run, output_line
from streaming.batches.ledger import AnswerReader, InputPlan, Ledger, LineOutcome


def output_lines(
    batch_id: str, folder: Path, plan: InputPlan, ledger: Ledger, outcome: LineOutcome, why: str = ""
) -> Iterator[bytes]:
    """The lines that ended so. With `why` (expired, cancelled) those without an answer count as failed; without it
    they are left out. Raises OSError."""
    nothing = not_run(why) if why else b""
    with (folder / "input").open("rb") as source, AnswerReader(folder) as answers:
        for place, twin in enumerate(plan.twins):
            end = ledger.ends[twin]
            if end is None and (not why or outcome is not LineOutcome.FAILED):
                continue
            if end is not None and end.outcome is not outcome:
                continue
            kept = answers.read(end) if end is not None else nothing
            yield output_line(batch_id, plan.numbers[place], plan.read(source, place), kept)


def blocks(lines: Iterator[bytes], size: int = 256 * 1024) -> Iterator[bytes]:
    """The same bytes in larger pieces."""
    buffer = bytearray()
    for line in lines:
        buffer += line
        if len(buffer) >= size:
            yield bytes(buffer)
            buffer.clear()
    if buffer:
        yield bytes(buffer)


def so_far(batch_id: str, folder: Path, outcome: LineOutcome) -> Iterator[bytes]:
    """What a batch has given until now, in blocks; nothing before its input was read."""
    try:
        plan = InputPlan.load(folder)
        ledger = Ledger.load(folder, len(plan))
    except FileNotFoundError:
        return
    yield from blocks(output_lines(batch_id, folder, plan, ledger, outcome))
