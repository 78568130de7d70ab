"""Short ids: completes the beginning of an id, as tables show it, to the one id that begins so."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from cli.client import PAGE, Client
from cli.errors import USAGE, Problem
from penstock.text import counted

BEGINNING = re.compile(r"(?:job_|batch_|msg_)[0-9a-f]{4,31}|[0-9]{1,3}-[0-9]{4,15}")
"""At least four digits, because commands that cancel and drop take beginnings, too."""
DIGITS = re.compile(r"[0-9a-f]{1,32}")
"""An id without the word at its front."""
TOO_SHORT = re.compile(r"(?:job_|batch_|msg_)[0-9a-f]{0,3}|[0-9]{1,3}-[0-9]{0,3}")
MAX_NAMED = 5
"""Candidates that an error names."""


class Listing(NamedTuple):
    """The list that has all ids of one kind. `front` is the word that they begin with; `after` and `following` name the
    parameter and the field of its pages; `other` is a field whose ids are taken, too."""

    path: str
    noun: str
    plural: str
    front: str = ""
    after: str = ""
    following: str = ""
    other: str = ""


LISTINGS = {
    "job_id": Listing("/v1/jobs", "job", "jobs", "job_", "cursor", "next_cursor"),
    "batch_id": Listing("/v1/batches", "batch", "batches", "batch_", "after", "last_id"),
    "letter_id": Listing("/admin/dlq", "dead letter", "dead letters", other="job_id"),
    "message_id": Listing("/admin/webhooks", "webhook message", "webhook messages", "msg_"),
}
"""By the name of a command's argument."""


def whole_id(client: Client, argument: str, given: str) -> str:
    """The id that begins with `given`, with or without its front, which is looked up in the whole list. An id, and what
    begins none, is returned as it is: the server then answers. Raises Problem if it is too short, if several ids begin
    so, or if the list is cut off before its end."""
    if LISTINGS[argument].front and DIGITS.fullmatch(given):
        given = LISTINGS[argument].front + given
    if TOO_SHORT.fullmatch(given):
        raise Problem(
            f"{given} is too short to stand for one {LISTINGS[argument].noun}",
            next_step="give more digits: at least four",
            exit_code=USAGE,
            code="ambiguous_id",
        )
    if not BEGINNING.fullmatch(given):
        return given
    listing = LISTINGS[argument]
    ids = (each.get(field) or "" for each in _all(client, listing, given) for field in ("id", listing.other))
    found = [each for each in dict.fromkeys(ids) if each.startswith(given)]
    if len(found) > 1:
        names = ", ".join(found[:MAX_NAMED]) + (f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else "")
        raise Problem(
            f"{given} is the beginning of {counted(len(found), listing.noun, listing.plural)}",
            cause=names,
            next_step="give more digits",
            exit_code=USAGE,
            code="ambiguous_id",
        )
    return found[0] if len(found) == 1 else given


def _all(client: Client, listing: Listing, given: str) -> Iterator[dict[str, Any]]:
    if listing.after:
        yield from client.pages(listing.path, sys.maxsize, listing.after, listing.following)
        return
    found = client.get(listing.path, limit=PAGE)["data"]
    yield from found
    if len(found) == PAGE:
        raise Problem(
            f"{given} cannot be completed",
            cause=f"there are more {listing.plural} than the newest {PAGE}, which the server lists",
            next_step="give the whole id; a pipe or --json of `ls` shows it",
            exit_code=USAGE,
            code="ambiguous_id",
        )
