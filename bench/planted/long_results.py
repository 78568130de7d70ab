"""Planted bugs of results with very many rows, and of clients who leave while they wait for one."""

from __future__ import annotations

from bench.planted.bug import Edit, bug

RESULTS = "tests/api/test_long_results.py::test_"

LONG_RESULTS = (
    bug(
        "a long result decoded in one piece",
        "Whoever looks at a job of very many tokens holds up every stream of the process.",
        Edit("streaming/jobs/records.py", "if len(data) < LONG_BYTES:", "if data:"),
        RESULTS + "a_long_result_is_decoded_in_slices",
    ),
    bug(
        "a long answer rendered in one piece",
        "The same while the answer is put together.",
        Edit("api/openai/rendering.py", "        if first:\n            yield\n", ""),
        RESULTS + "a_long_answer_is_rendered_in_slices",
    ),
    bug(
        "all slices at once",
        "Many who look at long results at the same time hold up every stream together.",
        Edit("runtime/turns.py", "await self._one.acquire()", "self._one = asyncio.Lock(); await self._one.acquire()"),
        RESULTS + "one_slice_is_done_in_a_turn_of_the_loop",
    ),
    bug(
        "the events of a long answer in one piece",
        "A reader of a long log of events holds up every stream of the process for seconds.",
        Edit("api/events.py", "if len(part) < ROWS_PER_WRITE:", "if part:"),
        RESULTS + "the_events_of_a_long_answer_are_told_in_slices",
    ),
    bug(
        "another tenant's result is read to refuse it",
        "Whoever knows the id of a long result of another tenant's has it read with every request.",
        Edit("streaming/lua/record.lua", "if tenant ~= '' and", "if false and"),
        RESULTS + "a_result_is_fetched_for_nobody_but_its_owner",
    ),
    bug(
        "a result is read for those who want none",
        "The cancelling of a job that has ended, and each step of a reader of events, fetches all of its rows.",
        Edit("streaming/lua/record.lua", "size >= long and", "false and"),
        RESULTS + "a_result_is_fetched_for_nobody_but_its_owner",
    ),
    bug(
        "who waits for a job waits on alone",
        "Clients who leave while they wait leave their requests behind, beyond every limit of connections.",
        Edit(
            "api/jobs.py",
            "with Watched(request.scope, request.receive, buffer.hang_up) as client:",
            "with Watched(request.scope, request.receive) as client:",
        ),
        RESULTS + "who_leaves_while_waiting_leaves_nothing_behind",
    ),
)
