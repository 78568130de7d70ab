"""Planted bugs of the Responses API: numbers of events, texts that were given up, and what is stored."""

from __future__ import annotations

from bench.planted.bug import Edit, bug, lua

SEQUENCE = "tests/api/openai/responses/test_event_sequence.py::test_"
LIFECYCLE = "tests/api/responses/test_lifecycle.py::test_"
STREAMS = "tests/api/responses/test_streams.py::test_"
LOSSES = "tests/system/test_responses.py::test_"
EVENTS = "api/openai/responses/events.py"

RESPONSES = (
    bug(
        "input tokens without the tools",
        "The tokenizer counts the input of a request with tools without them: too few.",
        Edit("api/openai/responses/request.py", "if able and self.tools_asked is None and", "if able and"),
        "tests/api/responses/test_lifecycle.py::test_input_tokens_are_counted_without_a_step_of_the_engine",
        "tests/api/openai/tasks/test_count.py::test_ids_are_counted_without_parsing_them",
    ),
    bug(
        "an item counts once however often it is named",
        "A body of 25 KB becomes a job of 250 MB.",
        Edit("api/responses/stored.py", "left -= uses * len(", "left -= len("),
        LIFECYCLE + "what_a_request_refers_to_counts_each_time",
    ),
    bug(
        "numbers that begin anew with the item",
        "After an answer began again, a reader who resumes gets events twice, or others in their place.",
        Edit(EVENTS, "        self.output_index += 1\n", "        self.output_index += 1\n        self.number = 0\n"),
        SEQUENCE + "every_cut_gives_the_rest_byte_for_byte",
    ),
    bug(
        "a percent sign in a token",
        "The number of an event is written into a token that looks like a format.",
        Edit(
            EVENTS,
            "text + DELTA_END % (logprobs, number)",
            "text + DELTA_END.replace(b'%b', logprobs).replace(b'%d', b'%d' % number, 1)",
        ),
        SEQUENCE + "every_cut_gives_the_rest_byte_for_byte",
    ),
    bug(
        "a fast path that forgets the text",
        "The last events of a stream, and the response in them, have only its first token.",
        Edit("api/stream/flow.py", "        sequence.text += text[1:-1]\n", ""),
        SEQUENCE + "the_fast_path_writes_the_same_bytes",
    ),
    bug(
        "an event of our own",
        "Helpers of the official clients raise at the end of a cancelled response.",
        Edit(EVENTS, '"cancelled": "response.incomplete",', '"cancelled": "response.cancelled",'),
        SEQUENCE + "a_stream_ends_with_one_of_three_events",
    ),
    bug(
        "a draft that nobody keeps",
        "After an answer began again, a replay lacks the events of the text that was given up.",
        lua("restart", "    if draft ~= '' then redis.call('HSET', job_key(id), 'draft:' .. epoch, draft) end\n", ""),
        LOSSES + "an_answer_that_begins_again_is_a_new_item",
    ),
    bug(
        "a drain that calls a response failed",
        "Clients give up a response that goes on.",
        Edit(
            "api/responses/replies.py",
            "        self._writer.cut_off()\n",
            "        await send(body_message(self._events.fail(error), more=False))\n",
        ),
        LOSSES + "a_draining_api_process_breaks_the_connection",
    ),
    bug(
        "stored against the wish",
        "A response with store: false can be read by its id.",
        Edit("api/responses/stored.py", " and record.job.response.store:", ":"),
        LIFECYCLE + "a_response_that_is_not_stored_is_not_retrievable",
    ),
    bug(
        "inherited instructions",
        "A response follows the instructions of the one that it continues.",
        Edit("api/responses/stored.py", "turns[1 if form_of(record).instructed else 0 :]", "turns[0:]"),
        LIFECYCLE + "a_response_continues_another_without_its_instructions",
    ),
    bug(
        "a cursor of before the loss",
        "After the store lost data, a resumed reader gets one text joined to another.",
        Edit("api/responses/endpoints.py", "        if record.has_lost:\n", "        if False:\n"),
        STREAMS + "a_cursor_of_before_a_loss_of_data_is_refused",
    ),
    bug(
        "a time for each sending of a put",
        "The stream of a response whose put was sent twice differs from its replays.",
        lua("put", "math.floor(parse_number(created) or now)", "now"),
        "tests/streaming/test_regressions.py::test_a_put_that_is_repeated_has_the_time_of_the_first",
    ),
    bug(
        "a cut answer told as complete",
        "The webhook of a response that the token limit ended is response.completed.",
        Edit("offline/webhooks/response_events.py", "replace(event, type=PREFIX + status,", "replace(event,"),
        "tests/offline/webhooks/test_dispatcher.py::test_the_end_of_a_response_is_told_as_one",
    ),
)
