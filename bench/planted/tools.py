"""Planted bugs: of tools and their calls, which must be the same for every reader, and whole or visibly not."""

from __future__ import annotations

from bench.planted.bug import Edit, bug

CHECKS = "tests/workers/engines/test_call_checks.py::test_"
SYSTEM = "tests/system/test_tools.py::test_"

TOOLS = (
    bug(
        "text beside tools that no schema holds",
        "An answer to a request with tools and a response_format is text of any form, and counts as complete.",
        Edit("workers/checker.py", "if failure is not None or attempt.job.sampling.json_schema is None:", "if True:"),
        "tests/workers/test_answer_checks.py::test_beside_tools_the_text_is_checked_and_calls_need_none",
    ),
    bug(
        "a schema that an engine ignores beside tools",
        "A request with tools and a response_format goes to an engine that honours only one of them.",
        Edit(
            "streaming/jobs/capabilities.py",
            "is not None and not capabilities.tools_with_schema:",
            "is None and False:",
        ),
        "tests/streaming/jobs/test_capabilities.py::test_a_schema_beside_tools_needs_an_engine_that_does_both",
    ),
    bug(
        "half a call at another server",
        "A call is continued like text: its second half follows a prompt that the model never answers so.",
        Edit("workers/engines/upstream/continuation/ladder.py", "if request.tools is not None:", "if False:"),
        "tests/workers/engines/upstream/test_tools.py::test_a_sampled_call_begins_again",
    ),
    bug(
        "a call of anything",
        "A client is told to run a function that it did not offer.",
        Edit("workers/engines/call_checks.py", "if call.name not in names:", "if False:"),
        CHECKS + "calls_that_nobody_can_use_fail_the_job",
    ),
    bug(
        "text where a call was required",
        "An answer without a call completes, although the request forced one.",
        Edit("workers/engines/call_checks.py", "if not calls and tools.forced and not cut:", "if False:"),
        CHECKS + "calls_that_nobody_can_use_fail_the_job",
    ),
    bug(
        "two calls with one id",
        "The calls of two choices have the same id.",
        Edit("api/openai/tool_calls.py", 'f"{job_id}/{choice}/{number}"', 'f"{job_id}/{number}"'),
        SYSTEM + "a_stream_gives_the_same_with_ids_once",
    ),
    bug(
        "events that forget their call",
        "A reader of events that resumes inside a call gets its arguments as text.",
        Edit("api/events.py", "if self._parts is None\n", "if True\n"),
        SYSTEM + "events_go_on_after_each_one_at_another_process",
    ),
    bug(
        "tools that an older worker leaves out",
        "A job with tools looks like any other, so a worker that knows none answers without them.",
        Edit("streaming/jobs/job.py", "return ToolJob if called or tools is not None else Job", "return Job"),
        "tests/streaming/jobs/test_codec.py::test_a_job_with_tools_is_of_a_version_of_its_own",
    ),
    bug(
        "a tool that opens a turn",
        "A control token in a function's description opens a turn of the system.",
        Edit(
            "workers/engines/llamacpp/prompt.py",
            "self._control.mark_values((messages_of(turns), offered))",
            '(messages_of(turns), offered), ""',
        ),
        "tests/workers/engines/llamacpp/test_calls.py::test_a_control_token_in_a_tool_or_a_call_is_plain_text",
    ),
)
