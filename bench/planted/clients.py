"""Planted bugs of penstock.client and of the commands that use it: what is sent again, and where a stream goes on."""

from __future__ import annotations

from bench.planted.bug import Edit, bug

PROTOCOL = "tests/penstock/test_client_protocol.py::test_"
CLIENT = "tests/system/test_client.py::test_"
COMMAND = "tests/cli/test_client.py::test_"

CLIENTS = (
    bug(
        "a submit without a key",
        "The answer to a request is lost, the client sends it again, and the job is computed twice.",
        Edit("penstock/client_protocol.py", '{"Idempotency-Key": idempotency_key}', "{}"),
        PROTOCOL + "a_submit_is_sent_again_under_its_key_at_the_next_server",
    ),
    bug(
        "a stream from its start",
        "A connection breaks, and the reader gets every token a second time.",
        Edit("penstock/client_protocol.py", '({"Last-Event-ID": after} if after else {})', "{}"),
        PROTOCOL + "a_stream_goes_on_behind_its_last_whole_event",
    ),
    bug(
        "the end of a connection is the end of a stream",
        "An API process drains, and its readers take half an answer for the whole one.",
        Edit(
            "penstock/client_protocol.py",
            'return Broken("the server ended the stream", reached=True, at=got.at), after',
            "return None, after",
        ),
        PROTOCOL + "a_stream_goes_on_behind_its_last_whole_event",
    ),
    bug(
        "a reset is an event like any other",
        "The store loses tokens, and a reader joins two texts.",
        Edit("penstock/client_protocol.py", 'sent.name == "stream.reset"', 'sent.name == "reset"'),
        PROTOCOL + "each_end_of_a_stream_is_told_as_what_it_is",
    ),
    bug(
        "streams that flee from each other",
        "Two streams lose their server: the second moves the client back to it.",
        Edit("penstock/client_protocol.py", "        if url == self.url:\n", "        if url:\n"),
        PROTOCOL + "two_calls_that_lose_a_server_go_to_the_same_next_one",
    ),
    bug(
        "an answer of nothing is progress",
        "A process that dies at each reader is asked again at once, for ever.",
        Edit(
            "penstock/client_protocol.py",
            "        parser = EventParser()\n        while True:\n",
            "        parser = EventParser()\n        retry.progress()\n        while True:\n",
        ),
        PROTOCOL + "a_connection_that_brings_nothing_is_no_progress",
    ),
    bug(
        "event streams end at SIGTERM",
        "A reader of events on the only API process is cut off, though the process waits for chats.",
        Edit(
            "api/events.py",
            "shutdown_grace_period=max(0.0, services.settings.drain_s - DRAIN_MARGIN_S)",
            "shutdown_grace_period=0.0",
        ),
        CLIENT + "a_process_that_drains_ends_its_streams_or_sends_them_elsewhere",
    ),
    bug(
        "two texts in one pipe",
        "A job begins again, and `penstock chat` writes its second text behind half of the first.",
        Edit("cli/job.py", "if self.text and not sys.stdout.isatty():", "if self.text and sys.stdout.isatty():"),
        COMMAND + "chat_that_fails",
    ),
    bug(
        "a chat that nobody reads goes on",
        "Ctrl-C stops the text on the screen, and the job keeps its slot to the end.",
        Edit("cli/chat_answer.py", "except (KeyboardInterrupt, BrokenPipeError):", "except BrokenPipeError:"),
        COMMAND + "leaving_a_chat_cancels_its_job",
    ),
)
