"""Plugin of pytest for the tests of llama.cpp's server, so that they run against a server with another model.

It runs in the suite's own Python, so it imports only that and the table of cases. What it changes: each server that a
test starts is one that runs already; a regular expression of the text of their tiny model asks for any text, and a
count of their tokenizer for any count above 0. A test that starts its server with a chat template is skipped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from bench.conformance.llama_cases import KEYED_PORT, LEFT_OUT, PORT, TOOLS_PORT

CONSTRAINED = frozenset(
    ("test_completion_with_response_format", "test_completion_with_json_schema", "test_completion_with_grammar")
)
"""Tests whose regular expression says what a schema or a grammar must give, whatever the model is."""
COUNTS = ("n_prompt", "n_tokens")
"""Parameters of tests that hold how many tokens a text has."""


class AnyCount(int):
    """Equal to every count above 0."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and other > 0

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


def any_text(_regex: str, text: object) -> bool:
    """In place of `match_regex`: whether there is a text."""
    return isinstance(text, str) and text != ""


def start(server: Any, timeout_seconds: int = 0) -> None:
    """In place of the start of a server: choose the one that fits among those that run."""
    if server.chat_template is not None:
        pytest.skip("a chat template of the server's command line")
    if server.api_key is not None:
        server.server_port = int(os.environ[KEYED_PORT])
    elif server.server_reranking or server.chat_template_file is not None:
        server.server_port = int(os.environ[TOOLS_PORT])
    else:
        server.server_port = int(os.environ[PORT])


def pytest_sessionstart() -> None:
    """`utils` has been imported by the suite's conftest.py; no test has."""
    utils = sys.modules.get("utils")
    if utils is not None and hasattr(utils, "ServerProcess"):
        utils.ServerProcess.start = start


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    """Skip the files that are left out; elsewhere, let a count of tokens be any."""
    for item in items:
        if Path(item.path).stem in LEFT_OUT:
            item.add_marker(pytest.mark.skip("left out"))
        params = item.callspec.params if hasattr(item, "callspec") else {}
        params.update({name: AnyCount(params[name]) for name in COUNTS if isinstance(params.get(name), int)})


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: Any) -> None:
    """Choose what a regular expression asks for, where the test looks it up."""
    if hasattr(item.module, "match_regex"):
        known = sys.modules["utils"].match_regex
        item.module.match_regex = known if item.originalname in CONSTRAINED else any_text
