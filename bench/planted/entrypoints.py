"""Planted bugs of whole answers, as clients of OpenAI's API and of vLLM's read them: counts, stops and order."""

from __future__ import annotations

from bench.planted.bug import Edit, bug

ROWS = "tests/bench/test_entrypoints.py::test_a_request_has_the_answer_of_its_row"

ENTRYPOINTS = (
    bug(
        "a total that is no sum",
        "Whoever bills by total_tokens bills something else than what prompt and answer have.",
        Edit(
            "api/openai/rendering.py",
            '"total_tokens": usage.prompt + usage.completion',
            '"total_tokens": usage.prompt - usage.completion',
        ),
        ROWS,
    ),
    bug(
        "a stop that is not obeyed",
        "A client that asks for the text before a stop gets the stop and what follows it.",
        Edit("api/openai/schemas.py", "stop=tuple(stop for stop in stops if stop),", "stop=(),"),
        ROWS,
    ),
    bug(
        "documents with the worst first",
        "A search that takes the first documents of /v1/rerank takes those that fit least.",
        Edit(
            "api/openai/tasks/answers.py",
            "key=lambda index: (-scores[index], index)",
            "key=lambda index: (scores[index], index)",
        ),
        ROWS,
    ),
)
