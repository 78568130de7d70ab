"""Planted bugs of the connection: limits, deadlines and counts that somebody could get wrong."""

from __future__ import annotations

from bench.planted.bug import Bug, Edit

GUARD = "tests/test_api_connection_guard.py::test_"
BOUNDS = "tests/test_api_bounds.py::test_"
CONNECTION = "api/connection.py"
DROPPED = (
    "            cycle.keep_alive = False\n            self._dropping = True\n            self._leave()\n        elif"
)

CONNECTIONS = (
    Bug(
        "a head without a limit",
        "Header fields of any size are kept in memory before anybody knows who sends them.",
        (Edit(CONNECTION, "if self._in_body or len(data) <= self._head_room:", "if data:"),),
        (GUARD + "a_head_beyond_its_limits_is_refused",),
    ),
    Bug(
        "a second head without a limit",
        "Behind the body of a request in the same read, the next head may be of any size.",
        (Edit(CONNECTION, "        if self._in_body:\n            self._unmeasured = True\n", ""),),
        (GUARD + "a_pipelined_head_is_bounded_too",),
    ),
    Bug(
        "trailers count as headers",
        "A field behind the body, which no proxy looked at, reaches the application as a header field.",
        (Edit(CONNECTION, "        if self._in_body:\n            return\n        headers", "        headers"),),
        (GUARD + "trailers_do_not_become_header_fields",),
    ),
    Bug(
        "requests in advance without end",
        "One connection sends thousands of requests at once, and each is kept with all that belongs to it.",
        (Edit(CONNECTION, "if len(self.pipeline) >= MAX_PIPELINED:", "if len(self.pipeline) >= 10**6:"),),
        (GUARD + "requests_in_advance_are_bounded",),
    ),
    Bug(
        "a head's deadline begins anew with every byte",
        "A client that sends a byte now and then holds its connection for ever.",
        (Edit(CONNECTION, "if self._silent or self._queue is not guard.head:", "if self._begun:"),),
        (GUARD + "a_head_that_does_not_end_is_refused",),
    ),
    Bug(
        "any byte of a body is progress",
        "A body that comes at a byte a second is waited for as long as its client likes.",
        (Edit(CONNECTION, "- self._window_start >= enough:", "- self._window_start >= 1:"),),
        (GUARD + "a_body_that_stops_or_trickles_is_refused",),
    ),
    Bug(
        "a deadline in an open stream",
        "A stream is cut because its client has sent part of a next request.",
        (Edit(CONNECTION, DROPPED, "            self.transport.close()\n        elif"),),
        (GUARD + "neither_a_stream_nor_a_wait_is_cut",),
    ),
    Bug(
        "the silent are told",
        "A client that keeps a connection ready takes the 408 for the answer to its next request.",
        (
            Edit(
                CONNECTION,
                "        if self._begun:\n            self._refuse(errors.request",
                "        if True:\n            self._refuse(errors.request",
            ),
        ),
        (GUARD + "a_connection_that_says_nothing_is_closed",),
    ),
    Bug(
        "probes are refused with the others",
        "Whoever fills the connections has the process restarted by its own health probe.",
        (Edit(CONNECTION, "if not is_probe or not self._guard.admit_probe(self):", "if is_probe or True:"),),
        (GUARD + "beyond_the_cap_requests_are_refused_and_probes_answered",),
    ),
    Bug(
        "the silent keep the probes' places",
        "Connections beyond the cap that say nothing shut the health probes out.",
        (
            Edit(
                "api/connection_guard.py",
                "                oldest.turn_away()\n",
                "                connection.turn_away()\n",
            ),
        ),
        (GUARD + "beyond_the_cap_requests_are_refused_and_probes_answered",),
    ),
    Bug(
        "one address counts for two",
        "A connection that is closed leaves its count behind, and after a day the address is shut out.",
        (Edit("api/connection_guard.py", "left = self._per_client[client] - 1", "left = self._per_client[client]"),),
        (GUARD + "counts_return_to_nothing",),
    ),
    Bug(
        "commas in texts count",
        "A long text with many commas and brackets is refused for what it says.",
        (Edit("api/json_weight.py", "pieces[1 if in_string else 0 :: 2]", "pieces"),),
        (BOUNDS + "what_people_send_is_light_enough",),
    ),
    Bug(
        "a slice that forgets its string",
        "A body is weighed wrongly where a slice ends in a string, and a heavy one passes.",
        (Edit("api/json_weight.py", "return outside, in_string ^ (len(pieces) % 2 == 0)", "return outside, False"),),
        (BOUNDS + "the_weight_is_that_of_what_is_no_text",),
    ),
    Bug(
        "a client that leaves is a fault of ours",
        "Every upload that is broken off is a traceback in the log and a 500 in the metrics.",
        (Edit("api/app.py", "    ClientDisconnect: _client_gone,\n", ""),),
        (BOUNDS + "two_hundred_clients_that_leave_are_no_errors",),
    ),
    Bug(
        "slashes are redirected",
        "An address with a slash too many sends the client to whatever host its request named.",
        (Edit("api/app.py", "app.router.redirect_slashes = False", "app.router.redirect_slashes = True"),),
        (BOUNDS + "no_address_is_redirected",),
    ),
)
