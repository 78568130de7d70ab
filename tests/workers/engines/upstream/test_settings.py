"""Settings of the engine `upstream`."""

from __future__ import annotations

import pytest

from workers.engines.upstream.settings import url_problem


@pytest.mark.parametrize(
    "url",
    ["", "gpu-1:8000", "ftp://gpu-1", "http://", "http://u:p@h/v1", "http://h/v1?x=1", "http://h:0/v1", "http://h:x/"],
)
def test_addresses_that_cannot_be_used_are_refused(url: str) -> None:
    assert url_problem(url) and "p@" not in url_problem(url)
