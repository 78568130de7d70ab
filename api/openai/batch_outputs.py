"""Batch output files: streams a batch's answers or its errors in input order, after its end or while it runs.

Every input line is in exactly one of the two. These functions block: call them from a thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from api.openai.batch_lines import not_run, output_line
from streaming.batches.ledger import AnswerReader, InputPlan, Ledger, LineOutcome


def output_lines(
    batch_id: str, folder: Path, plan: InputPlan, ledger: Ledger, outcome: LineOutcome, reason: str = ""
) -> Iterator[bytes]:
    """Yield the output lines of one outcome. Raises OSError.

    Args:
        reason: why the batch stopped early ("expired", "cancelled"): lines without an answer then count as failed.
            With "" they are left out.
    """
    unanswered = not_run(reason) if reason else b""
    with (folder / "input").open("rb") as source, AnswerReader(folder) as answers:
        for place, original in enumerate(plan.duplicate_of):
            end = ledger.ends[original]
            if end is None and (not reason or outcome is not LineOutcome.FAILED):
                continue
            if end is not None and end.outcome is not outcome:
                continue
            stored = answers.read(end) if end is not None else unanswered
            yield output_line(batch_id, plan.numbers[place], plan.read(source, place), stored)


def blocks(lines: Iterator[bytes], size_bytes: int = 256 * 1024) -> Iterator[bytes]:
    """Join lines into blocks of at least `size_bytes`."""
    buffer = bytearray()
    for line in lines:
        buffer += line
        if len(buffer) >= size_bytes:
            yield bytes(buffer)
            buffer.clear()
    if buffer:
        yield bytes(buffer)


def so_far(batch_id: str, folder: Path, outcome: LineOutcome) -> Iterator[bytes]:
    """Yield the present output of a running batch, in blocks; nothing before its input was validated."""
    try:
        plan = InputPlan.load(folder)
        ledger = Ledger.load(folder, len(plan))
    except FileNotFoundError:
        return
    yield from blocks(output_lines(batch_id, folder, plan, ledger, outcome))
