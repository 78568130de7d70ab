"""Planted bugs of the connection: limits, deadlines and counts that somebody could get wrong."""

from __future__ import annotations

from bench.planted.bug import Edit, bug

GUARD = "tests/api/stream/test_connection_guard.py::test_"
ENDS = "tests/api/test_process.py::test_"
BOUNDS = "tests/api/test_bounds.py::test_"
UPLOADS = "tests/api/test_uploads.py::test_"
INPUT_VALIDATION = "tests/offline/batch/test_input_validation.py::test_"
DRAINING = "tests/api/stream/test_draining_server.py::test_"
CONNECTION = "api/stream/bounded_protocol.py"
DROPPED = (
    "            cycle.keep_alive = False\n            self._dropping = True\n            self._leave()\n        elif"
)

CUT_OFF = "tests/system/test_losses.py::test_a_reader_that_takes_nothing_is_cut_off_and_told_of_once"

CONNECTIONS = (
    bug(
        "a listener that closes on its queue",
        "Requests that were sent before an API process stopped accepting end in a reset connection.",
        Edit("api/stream/draining_server.py", "            await _until_quiet(selector)\n", "            pass\n"),
        DRAINING + "a_request_that_was_sent_before_the_end_is_answered",
    ),
    bug(
        "a connection without bytes is closed at the end",
        "A client that had connected, and was about to send its request, ends in a reset connection.",
        Edit(CONNECTION, "(self._silent or (self._begun and not self._in_body))", "False"),
        DRAINING + "a_request_that_its_client_is_about_to_send_is_answered",
    ),
    bug(
        "the last request does not close its connection",
        "A client that asks once more holds up the end of an API process for its whole drain time.",
        Edit(CONNECTION, " or not self._admitted or self._last:", " or not self._admitted:"),
        DRAINING + "a_request_that_its_client_is_about_to_send_is_answered",
    ),
    bug(
        "every IPv6 address is a client",
        "One machine has 2^64 addresses, and the limit of one client for each of them.",
        Edit("api/stream/connection_guard.py", "CLIENT_BITS = 64", "CLIENT_BITS = 128"),
        GUARD + "an_ipv6_network_is_one_client",
    ),
    bug(
        "a head without a limit",
        "Header fields of any size are kept in memory before anybody knows who sends them.",
        Edit(CONNECTION, "if self._in_body or len(data) <= self._head_room:", "if data:"),
        GUARD + "a_head_beyond_its_limits_is_refused",
    ),
    bug(
        "a second head without a limit",
        "Behind the body of a request in the same read, the next head may be of any size.",
        Edit(CONNECTION, "        if self._in_body:\n            self._unmeasured = True\n", ""),
        GUARD + "a_pipelined_head_is_bounded_too",
    ),
    bug(
        "trailers count as headers",
        "A field behind the body, which no proxy looked at, reaches the application as a header field.",
        Edit(CONNECTION, "        if self._in_body:\n            return\n        headers", "        headers"),
        GUARD + "trailers_do_not_become_header_fields",
    ),
    bug(
        "requests in advance without end",
        "One connection sends thousands of requests at once, and each is kept with all that belongs to it.",
        Edit(CONNECTION, "if len(self.pipeline) >= MAX_PIPELINED:", "if len(self.pipeline) >= 10**6:"),
        GUARD + "requests_in_advance_are_bounded",
    ),
    bug(
        "a head's deadline begins anew with every byte",
        "A client that sends a byte now and then holds its connection for ever.",
        Edit(CONNECTION, "if self._silent or self._queue is not guard.head:", "if self._begun:"),
        GUARD + "a_head_that_does_not_end_is_refused",
    ),
    bug(
        "any byte of a body is progress",
        "A body that comes at a byte a second is waited for as long as its client likes.",
        Edit(CONNECTION, "- self._window_start >= enough:", "- self._window_start >= 1:"),
        GUARD + "a_body_that_stops_or_trickles_is_refused",
    ),
    bug(
        "a deadline in an open stream",
        "A stream is cut because its client has sent part of a next request.",
        Edit(CONNECTION, DROPPED, "            self.transport.close()\n        elif"),
        GUARD + "neither_a_stream_nor_a_wait_is_cut",
    ),
    bug(
        "the silent are told",
        "A client that keeps a connection ready takes the 408 for the answer to its next request.",
        Edit(
            CONNECTION,
            "        if self._begun:\n            self._refuse(connection_errors.request",
            "        if True:\n            self._refuse(connection_errors.request",
        ),
        GUARD + "a_connection_that_says_nothing_is_closed",
    ),
    bug(
        "probes are refused with the others",
        "Whoever fills the connections has the process restarted by its own health probe.",
        Edit(CONNECTION, "if not is_probe or not self._guard.admit_probe(self):", "if is_probe or True:"),
        GUARD + "beyond_the_cap_requests_are_refused_and_probes_answered",
    ),
    bug(
        "the silent keep the probes' places",
        "Connections beyond the cap that say nothing shut the health probes out.",
        Edit(
            "api/stream/connection_guard.py",
            "                oldest.turn_away()\n",
            "                connection.turn_away()\n",
        ),
        GUARD + "beyond_the_cap_requests_are_refused_and_probes_answered",
    ),
    bug(
        "one address counts for two",
        "A connection that is closed leaves its count behind, and after a day the address is shut out.",
        Edit(
            "api/stream/connection_guard.py", "left = self._per_client[client] - 1", "left = self._per_client[client]"
        ),
        GUARD + "counts_return_to_nothing",
    ),
    bug(
        "a place that is free again is lost",
        "A connection beyond the limits that got a place later is turned away with those that still wait for one.",
        Edit(
            "api/stream/connection_guard.py",
            "            self._surplus.pop(connection, None)\n            self._admitted",
            "            self._admitted",
        ),
        GUARD + "a_connection_that_got_a_place_later_is_not_turned_away",
    ),
    bug(
        "a health probe's place is taken",
        "A probe that is being answered is turned away by the next connection beyond the limits.",
        Edit(
            "api/stream/connection_guard.py",
            "        self._surplus.pop(connection, None)\n        self._probes.add",
            "        self._probes.add",
        ),
        GUARD + "a_connection_that_got_a_place_later_is_not_turned_away",
    ),
    bug(
        "the refused keep their places",
        "Connections that were refused and go on sending are kept beside those that wait, without a bound.",
        Edit(
            CONNECTION,
            "        if self._dropping:\n            self.transport.abort()\n",
            "        if self._dropping:\n            pass\n",
        ),
        GUARD + "connections_beyond_the_cap_that_were_refused_are_bounded_too",
    ),
    bug(
        "all deadlines at once",
        "Closing thousands of connections in one turn of the loop holds up all streams.",
        Edit("api/stream/connection_guard.py", "queue.sweep(loop.time(), left)", "queue.sweep(loop.time(), 10**9)"),
        GUARD + "many_deadlines_that_pass_at_once_are_handled_in_portions",
    ),
    bug(
        "a second upload is late from the start",
        "On a connection that stays open, what the last body brought is asked of the next one beforehand.",
        Edit(
            CONNECTION,
            "                self._window_start = self._body_bytes\n                self._enter(guard.body)",
            "                self._enter(guard.body)",
        ),
        GUARD + "a_second_long_upload_is_not_cut_either",
    ),
    bug(
        "a body that waits is late",
        "A stream is cut because a body behind it, which nobody asked for yet, brings nothing.",
        Edit(CONNECTION, " or self.pipeline or cycle.waiting_for", " or cycle.waiting_for"),
        GUARD + "a_body_behind_an_open_stream_is_not_late",
    ),
    bug(
        "a body that was answered is read for ever",
        "A client sends a body without end to an answer it has had, and none of our limits ends it.",
        Edit(CONNECTION, "and self._body_bytes > self._max_body_bytes:", "and False:"),
        GUARD + "a_body_without_end_that_nobody_reads_ends_its_connection",
    ),
    bug(
        "an answer that is not taken is kept",
        "A client that reads nothing of its last answer keeps the connection, and the answer in memory, for ever.",
        Edit(CONNECTION, "        if self.transport.get_write_buffer_size():\n            self._watch_writing()\n", ""),
        GUARD + "a_reader_of_a_last_answer_that_takes_nothing_is_cut_off",
    ),
    bug(
        "an idle connection with an unread answer",
        "It is closed politely: its answer stays in memory until its client takes it, which may be never.",
        Edit(CONNECTION, "self.transport.abort()  # the last", "self.transport.close()  # the last"),
        GUARD + "an_idle_client_that_has_not_taken_its_answer_is_cut_off",
    ),
    bug(
        "a body of any size in chunks",
        "A body that announces no length is kept in memory however long it gets.",
        Edit(
            "api/admission.py", "        if len(body) > limit:\n            raise errors.payload_too_large(limit)\n", ""
        ),
        BOUNDS + "a_body_that_announces_no_length_is_refused_once_it_is_too_long",
    ),
    bug(
        "commas in texts count",
        "A long text with many commas and brackets is refused for what it says.",
        Edit("api/openai/json_weight.py", "pieces[1 if in_string else 0 :: 2]", "pieces"),
        BOUNDS + "what_people_send_is_light_enough",
    ),
    bug(
        "a slice that forgets its string",
        "A body is weighed wrongly where a slice ends in a string, and a heavy one passes.",
        Edit(
            "api/openai/json_weight.py", "return outside, in_string ^ (len(pieces) % 2 == 0)", "return outside, False"
        ),
        BOUNDS + "the_weight_is_that_of_what_is_no_text",
    ),
    bug(
        "long numbers weigh nothing",
        "Two megabytes of digits hold up all streams for fifty milliseconds.",
        Edit("api/openai/json_weight.py", "        + LONG_NUMBER_WEIGHT * long_numbers\n", ""),
        BOUNDS + "a_body_of_too_many_values_is_refused",
    ),
    bug(
        "only the door weighs",
        "What is refused at the door comes in by a file or a broker, and holds up all batches.",
        Edit("api/openai/json_body.py", "    check_weight(body)\n", ""),
        BOUNDS + "nothing_is_parsed_that_was_not_weighed",
    ),
    bug(
        "an error for each wrong entry",
        "1 MB of metadata is read in 3 ms and explained in 90.",
        Edit("api/openai/fields.py", "    BeforeValidator(_check_count),\n", ""),
        BOUNDS + "ten_thousand_mistakes_are_a_few_errors",
    ),
    bug(
        "an error for each unknown name",
        "12,000 of them in `queue` hold up all streams.",
        Edit(
            "api/openai/fields.py",
            "return {name: fields[name] for name in (*known, first) if name in fields}",
            "return fields if first else fields",
        ),
        BOUNDS + "ten_thousand_mistakes_are_a_few_errors",
    ),
    bug(
        "a boundary that is a fault of ours",
        "An upload whose boundary is too long is a 500 and a traceback.",
        Edit(
            "api/uploads.py", "except FormParserError as error:  # a bad boundary", "except ZeroDivisionError as error:"
        ),
        UPLOADS + "what_is_wrong_is_refused_and_leaves_nothing",
    ),
    bug(
        "a line as deep as the stack",
        "A line that was read once cannot be read again where the stack is higher, and its batch never ends.",
        Edit("api/openai/batch_lines.py", "if nested_beyond(data, MAX_LINE_DEPTH):", "if False:"),
        INPUT_VALIDATION + "a_line_that_is_nested_too_deeply_is_named",
    ),
    bug(
        "a line that only an older version took",
        "After an upgrade its batch fails at every turn.",
        Edit(
            "offline/batch/lines.py",
            "            except ApiError as error:",
            "            except ZeroDivisionError as error:",
        ),
        "tests/offline/batch/test_lines.py::test_a_line_that_an_older_version_took_ends_with_the_error",
    ),
    bug(
        "a client that leaves is a fault of ours",
        "Every upload that is broken off is a traceback in the log and a 500 in the metrics.",
        Edit("api/app.py", "    ClientDisconnect: _client_gone,\n", ""),
        BOUNDS + "two_hundred_clients_that_leave_are_no_errors",
    ),
    bug(
        "slashes are redirected",
        "An address with a slash too many sends the client to whatever host its request named.",
        Edit("api/app.py", "app.router.redirect_slashes = False", "app.router.redirect_slashes = True"),
        Edit(
            "api/auth/access.py",
            "if (rows := self._fixed.get(path))",
            'if (rows := self._fixed.get(path.rstrip("/") or "/"))',
        ),
        BOUNDS + "no_address_is_redirected",
    ),
    bug(
        "a stalled reader's end is told three times",
        "Two hundred readers who stall write six hundred lines, and every other stream stands still meanwhile.",
        Edit("api/stream/connection.py", "self.cycle.disconnected = True  # else the", "pass  # else the"),
        CUT_OFF,
    ),
    bug(
        "a stalled reader keeps its connection",
        "What it has not taken stays in memory until the operating system gives the connection up.",
        Edit("api/stream/paced_writer.py", "            self.cut_off()\n", "            pass\n"),
        CUT_OFF,
    ),
    bug(
        "a drain ends before its answers",
        "Whoever asked for a whole answer gets a bare 500 after drain_s, and does not learn which job computes it.",
        Edit("api/stream/reply.py", 'if "status" in scope["state"]:', "if True:"),
        ENDS + "whoever_still_waits_when_a_process_ends_is_told_where_the_job_is",
    ),
    bug(
        "a drain ends before its waits",
        "Whoever waits for a job gets a bare 500 after drain_s.",
        Edit("api/jobs.py", "raise job_errors.wait_cut_off(record.job.id, repeatable=True) from None", "raise"),
        ENDS + "whoever_still_waits_when_a_process_ends_is_told_where_the_job_is",
    ),
)
