"""Ids of the Responses API: each follows from a job's id and a number, so that every replay has the same ones."""

from __future__ import annotations

import re

RESPONSE = "resp_"
MESSAGE, CALL, OUTPUT, REASONING = "msg", "fc", "fco", "rs"
"""What ids of items begin with: of a message, a call, the output of a call, and reasoning."""
_ITEM = re.compile(r"(?:msg|fc|fco|rs)_(job_[0-9a-f]{32})_(in|out)([0-9]{1,4})")


def response_id(job_id: str) -> str:
    return RESPONSE + job_id


def job_of(response: str) -> str:
    """Return the job of a response; "" if this is no id of a response. The job's id itself is not checked."""
    return response.removeprefix(RESPONSE) if response.startswith(RESPONSE) else ""


def input_item_id(job_id: str, place: int, kind: str = MESSAGE) -> str:
    """Return the id of an input item, counted from 0 in the order of the request."""
    return f"{kind}_{job_id}_in{place}"


def output_item_id(job_id: str, output_index: int, kind: str = MESSAGE) -> str:
    return f"{kind}_{job_id}_out{output_index}"


def item_of(item: str) -> tuple[str, bool, int] | None:
    """Return the job of an item, whether the item is output, and its place; None if this is no id of an item."""
    match = _ITEM.fullmatch(item)
    return (match[1], match[2] == "out", int(match[3])) if match else None
