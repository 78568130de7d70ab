"""What a client may prefer about how its answer comes."""

from __future__ import annotations

import pytest

from api.chat import prefers_async


@pytest.mark.parametrize(
    ("prefer", "wanted"),
    [
        ("", False),
        ("respond-async", True),
        ("Respond-Async", True),
        ("wait=10, respond-async;foo=1", True),
        ("wait=10", False),
        ("return=minimal, handling=lenient", False),
        ("respond-asynchronously", False),
        ("handling=respond-async", False),
    ],
)
def test_only_who_asks_for_it_gets_a_job_instead_of_an_answer(prefer: str, wanted: bool) -> None:
    """Prefer (RFC 7240) has other uses, and browsers and libraries send them."""
    assert prefers_async(prefer) is wanted
