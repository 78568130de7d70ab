"""Planted bugs: of the engine `upstream`, which continues what servers leave unfinished."""

from __future__ import annotations

from bench.planted.bug import Edit, bug

ENGINE = "workers/engines/upstream/"
TESTS = "tests/workers/engines/upstream/"
FAILOVER, FAKES, FALLBACK = (f"{TESTS}test_{name}.py::test_" for name in ("failover", "engine", "fallback"))
BUDGET = f"{TESTS}places/test_budget.py::test_"
CONNECTION = f"{TESTS}http/test_connection.py::test_"

REATTACH = f"{TESTS}test_reattach.py::test_"

UPSTREAM = (
    bug(
        "the middle of an answer under the name of the whole",
        "A server keeps a continuation under the answer's name, so its middle is taken for the beginning.",
        Edit(ENGINE + "continuation/reattach.py", " or rung not in FROM_BEGINNING:", ":"),
        f"{REATTACH}a_part_of_an_answer_is_kept_under_no_name",
    ),
    bug(
        "a second generation beside the first",
        "After the death of its worker, an answer is begun again although the server still generates it.",
        Edit(ENGINE + "continuation/ladder.py", "if facts.reattach and request.text_id and", "if False and"),
        f"{REATTACH}the_next_worker_reads_the_same_generation",
    ),
    bug(
        "a generation that nobody stops",
        "The job is cancelled, and its generation goes on at the server, which is read by nobody.",
        Edit(
            ENGINE + "detached.py",
            "self._spawn(client.ask(method, client.address.base",
            "(client.ask(method, client.address.base",
        ),
        f"{REATTACH}a_cancelled_request_is_stopped_at_its_server",
    ),
    bug(
        "a worker that takes the answer with it",
        "A worker that shuts down stops the generation that the next one would have read on.",
        Edit(ENGINE + "detached.py", "if (goes_on or generation.left) and (", "if False and ("),
        f"{REATTACH}a_worker_that_leaves_stops_nothing",
    ),
    bug(
        "an answer that begins again as the old one",
        "A job that begins again gets the job that failed before at another Penstock, each time.",
        Edit(ENGINE + "continuation/reattach.py", "\\n{request.begun_by}", ""),
        f"{REATTACH}an_answer_that_begins_again_is_another_job_of_a_penstock",
    ),
    bug(
        "a job that nobody reads",
        "A job that is cancelled before its first token stays in the queue of another Penstock.",
        Edit(ENGINE + "exchange.py", 'unseen = facts.reattach == "key" and', "unseen = False and"),
        "tests/system/test_upstream_penstock.py::test_a_job_that_is_cancelled_before_its_first_token_is_cancelled_there",
    ),
    bug(
        "a job that is begun twice",
        "A worker that shuts down leaves jobs at another Penstock that no other worker can find.",
        Edit(ENGINE + "detached.py", "(generation.rows or method == reattach.BY_NAME)", "True"),
        f"{REATTACH}a_worker_that_leaves_stops_a_job_that_nobody_can_find",
    ),
    bug(
        "an answer that a busy server loses",
        "A server that has no room for its reader at the moment is told to stop the generation.",
        Edit(ENGINE + "detached.py", "if outcome.end in (End.BUSY, End.KEY):", "if False:"),
        f"{REATTACH}a_server_that_has_no_room_for_its_reader_is_left_alone_for_as_long_as_it_says",
    ),
    bug(
        "a server asked without a pause",
        "A generation that goes on at one of several servers is asked for again and again, whatever they say to wait.",
        Edit(ENGINE + "pool.py", "if (wait_s := home.wait_s(cost, now)) <= 0:", "if (wait_s := 0.0) <= 0:"),
        f"{REATTACH}a_server_that_has_no_room_for_its_reader_is_left_alone_for_as_long_as_it_says",
    ),
    bug(
        "cancelled jobs that close a server",
        "The jobs that a worker preempted count as failures of the other Penstock when they are continued.",
        Edit(ENGINE + "detached.py", "if rung is Rung.REATTACH and outcome.told:", "if False:"),
        f"{REATTACH}jobs_that_ended_at_a_penstock_are_continued_and_no_fault_of_it",
    ),
    bug(
        "a failed job for each try",
        "A job that failed at another Penstock before its first token is the answer to every further try.",
        Edit(ENGINE + "continuation/reattach.py", " and Rung.REATTACH not in tried", ""),
        f"{REATTACH}a_job_that_failed_at_a_penstock_is_no_answer_to_a_second_try",
    ),
    bug(
        "tokens that count twice in a repeated reply",
        "Tokens without text, such as hidden reasoning, are counted again when a reply is read from its beginning.",
        Edit(
            ENGINE + "reply/generation.py",
            "if self._expected or (self._rung in REPEATED and self.received - count < self.out):",
            "if self._expected:",
        ),
        f"{FAKES}hidden_reasoning_of_a_replay_counts_once",
    ),
    bug(
        "an interim reply that ends its request",
        "A 103 counts as the reply, so the next request, of any tenant, gets the answer of this one.",
        Edit(ENGINE + "http/connection.py", "if self._parser.get_status_code() >= FIRST_FINAL_STATUS:", "if True:"),
        f"{CONNECTION}an_interim_reply_ends_nothing",
    ),
    bug(
        "two replies to one request",
        "A connection goes back into the pool although more than its reply has come.",
        Edit(ENGINE + "http/connection.py", 'raise ValueError("a second reply to one request")', "return"),
        f"{CONNECTION}a_connection_on_which_more_than_the_reply_came_is_closed",
    ),
    bug(
        "a number as large as a server likes",
        "A server's count of tokens goes unchecked into the log and onto bills, or stops the writer of all tenants.",
        Edit(ENGINE + "reply/chunks.py", "MAX_COUNT = 1 << 24", "MAX_COUNT = (1 << 63) - 2"),
        f"{TESTS}reply/test_chunks.py::test_a_number_that_cannot_be_true_makes_a_chunk_malformed",
    ),
    bug(
        "a finished answer that is begun again",
        "A count that cannot be read behind the finish reason discards a whole answer, which is computed again.",
        Edit(ENGINE + "reply/generation.py", "finished or by_malformed(", "by_malformed("),
        f"{FAILOVER}a_finished_answer_counts_whatever_follows",
    ),
    bug(
        "half a call that counts as finished",
        "A finish reason in the chunk whose call cannot be read completes the answer without that call.",
        Edit(ENGINE + "reply/generation.py", "finished or by_malformed(", "self.outcome or by_malformed("),
        f"{FAILOVER}calls_that_end_malformed_are_no_finished_answer",
    ),
    bug(
        "a count of vectors as large as a server likes",
        "A server's count of an embedding's tokens goes unchecked onto bills, and its job ends with 500.",
        Edit(ENGINE + "task_calls.py", "prompt_tokens: Count | None", "prompt_tokens: int | None"),
        f"{TESTS}test_task_calls.py::test_an_answer_whose_count_cannot_be_true_counts_none",
    ),
    bug(
        "a probe that is the last one",
        "A page that cannot be read leaves its probe running for ever, and the server gets no request again.",
        Edit(ENGINE + "places/endpoint.py", "except Exception as error:", "except ProbeFailed as error:"),
        f"{FAKES}a_probe_that_breaks_is_a_failed_probe",
    ),
    bug(
        "the operator's key in an error",
        "A server repeats the key that it was sent, and the tenant whose request it refuses reads it.",
        Edit(ENGINE + "exchange.py", ".without(endpoint.keys.secrets)", ""),
        f"{FAKES}the_key_reaches_nobody",
    ),
    bug(
        "text that counts no token",
        "An answer whose chunks name no tokens is read without end, whatever max_tokens says.",
        Edit(ENGINE + "reply/generation.py", "count = int(self._uncounted > MAX_UNCOUNTED)", "pass"),
        Edit(ENGINE + "reply/generation.py", " or self._characters > self._max_characters", ""),
        f"{FAKES}text_without_tokens_is_bounded",
    ),
    bug(
        "a poison that begins anew",
        "How often servers broke a request is forgotten when it goes back to the queue, so it never ends.",
        Edit(ENGINE + "engine.py", "self._broken.keep(generation.request.text_id, generation.counts)", "pass"),
        f"{TESTS}test_poison.py::test_a_request_that_one_server_always_fails_ends",
    ),
    bug(
        "one tenant's poison for all",
        "Requests that a server fails take it away from others, to whom it gives tokens meanwhile.",
        Edit(ENGINE + "places/breaker.py", "if answered_at > min(self._failing_since, now - ANSWERS_S):", "if False:"),
        f"{TESTS}test_poison.py::test_requests_of_another_tenant_are_served_beside_it",
    ),
    bug(
        "bytes that nobody has read yet",
        "An idle connection is used again while bytes that nobody asked for wait on it.",
        Edit(ENGINE + "http/client.py", " and connection.quiet", ""),
        f"{CONNECTION}a_byte_that_nobody_has_read_yet_closes_an_idle_connection",
    ),
    bug(
        "an end without a reason",
        "A stream that ends with [DONE] alone counts as complete, so a cut answer does.",
        Edit(
            ENGINE + "reply/generation.py",
            'self.outcome = finished or by_cut("[DONE] without a finish reason")',
            'self.outcome = finished or by_finish("stop")',
        ),
        f"{FAKES}an_end_without_a_finish_reason_completes_nothing",
    ),
    bug(
        "a JSON text inside another",
        "JSON is continued like text, though the grammar begins at its root.",
        Edit(ENGINE + "continuation/ladder.py", "if sampling.json_schema is not None:", "if False:"),
        f"{FAKES}json_begins_again",
    ),
    bug(
        "reasoning that is forgotten",
        "An answer with hidden reasoning is continued as if there had been none.",
        Edit(ENGINE + "continuation/ladder.py", " or any(count and not text for text, _, count in rows):", ":"),
        f"{FAKES}hidden_reasoning_is_counted_and_never_spliced",
    ),
    bug(
        "an id ahead of its text",
        "A token is logged whose text has not come, so that a continuation leaves it out.",
        Edit(
            ENGINE + "reply/generation.py",
            "self._held.append(piece)\n            return None",
            "return self._passed(piece)",
        ),
        f"{FAKES}no_id_is_logged_before_its_text",
    ),
    bug(
        "max_tokens from the cut on",
        "A continued answer may be as long again as the whole.",
        Edit(
            ENGINE + "reply/generation.py",
            "return limit if rung in FROM_BEGINNING else max(0, limit - self.out)",
            "return limit",
        ),
        f"{FAILOVER}each_kind_is_continued_by_its_best_way",
    ),
    bug(
        "a queue inside the server",
        "Requests are sent as they come, and wait where no lane orders them.",
        Edit(ENGINE + "places/places.py", "each.budget.has_room(each.in_flight) and", ""),
        f"{FAKES}no_more_runs_there_than_the_server_runs_at_once",
    ),
    bug(
        "a server tried with ever more",
        "Though nobody asks for more: a burst then waits inside the server.",
        Edit(ENGINE + "places/budget.py", " and in_flight >= self.limit:", ":"),
        f"{BUDGET}a_server_that_lets_none_wait_is_tried_with_twice_as_many",
    ),
    bug(
        "a cut by a tenth",
        "A server that was tried with too many keeps a queue for many seconds.",
        Edit(ENGINE + "places/budget.py", "min(WAITING_FACTOR, runs)", "WAITING_FACTOR"),
        f"{BUDGET}a_server_that_lets_none_wait_is_tried_with_twice_as_many",
    ),
    bug(
        "a server's words in the log",
        "It repeats the prompt in its error, and the log keeps it.",
        Edit(ENGINE + "pool.py", "endpoint.url, outcome.reason, extra=", "endpoint.url, outcome.words, extra="),
        f"{FAKES}no_log_repeats_what_a_server_says",
    ),
    bug(
        "two models in one answer",
        "An answer that a fallback began goes on with the model that was asked for, once that is back.",
        Edit(
            ENGINE + "fallback.py",
            "number = number_of(began, [pool.model for pool in pools])",
            "number = next((number for number, pool in enumerate(pools) if pool.ready), 0)",
        ),
        f"{FALLBACK}an_answer_waits_for_the_model_that_began_it",
    ),
    bug(
        "a fallback that the log forgets",
        "A worker that takes over does not know that a fallback began the answer.",
        Edit(
            "streaming/jobs/codec.py", "    if delta.served_by:\n", "    if delta.served_by and delta.prompt is None:\n"
        ),
        "tests/api/test_served_by.py::test_a_lost_workers_answer_is_continued_by_the_model_that_began_it",
    ),
    bug(
        "tokens of a fallback on the wrong bill",
        "What another model generated counts for the model that was asked for.",
        Edit("workers/attempt.py", "name = self._servers.get(index, self.job.model)", "name = self.job.model"),
        "tests/api/test_served_by.py::test_every_form_of_an_answer_says_who_gave_it",
    ),
    bug(
        "vectors of another model",
        "A fallback makes the vectors of a request, and nobody can compare them with those of its own model.",
        Edit(ENGINE + "fallback.py", 'of another model": request.task is not None,', 'of another model": False,'),
        f"{TESTS}test_task_calls.py::test_no_other_model_makes_the_vectors",
    ),
    bug(
        "vectors of two lengths",
        "Two servers make the vectors of one request, and nobody can compare them.",
        Edit(ENGINE + "server/card.py", 'least["embed"] and len(sizes) <= 1', 'least["embed"]'),
        f"{TESTS}test_task_calls.py::test_servers_with_vectors_of_different_lengths_make_none_together",
    ),
    bug(
        "vectors in the order of the reply",
        "A server that answers out of order gives each text the vector of another one.",
        Edit(ENGINE + "task_calls.py", "[scores[index] for index in range(len(scores))]", "list(scores.values())"),
        f"{TESTS}test_task_calls.py::test_vectors_and_scores_come_through",
    ),
    bug(
        "a limit that holds a request for ever",
        "A request that is always refused with 429 is sent again and again, and no reader hears why.",
        Edit(ENGINE + "engine.py", "is not None and left_s <= 0:", "is not None and left_s < -MAX_HELD:"),
        f"{TESTS}test_poison.py::test_a_request_that_is_always_refused_because_of_a_limit_ends",
    ),
    bug(
        "a return that is seen late",
        "A server that was away for a minute is asked again only after many seconds.",
        Edit(ENGINE + "places/breaker.py", "PROBE_INTERVAL_S * (0.75", "MAX_OPEN_S * (0.75"),
        f"{TESTS}places/test_breaker.py::test_a_server_that_is_away_is_probed_every_second_however_long",
    ),
    bug(
        "a given back job that ends",
        "What the engine gives back counts as finished.",
        Edit(
            "workers/worker.py",
            "if finish and finish == RETURNED and self._preemption.hand_back(attempt):",
            "if False:",
        ),
        "tests/workers/test_returned.py::test_a_job_that_is_given_back_is_claimed_again",
    ),
    bug(
        "a window that is over",
        "A server that says what remained of a window that ends now is asked too seldom in the next one.",
        Edit("workers/engines/upstream/places/limits.py", " and not (remaining > 0 and reset == 0)", ""),
        "tests/workers/engines/upstream/places/test_limits.py::test_a_window_that_is_over_does_not_empty_a_bucket",
    ),
)
