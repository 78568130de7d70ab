"""Planted bugs of tokens: the log of a run, what a reader is shown of it, and how a job is continued."""

from __future__ import annotations

from bench.planted.bug import Edit, bug, lua

PROTOCOL = "tests/streaming/jobs/test_protocol.py::test_"
REGRESSIONS = "tests/streaming/test_regressions.py::test_"
RELAY = "tests/streaming/jobs/test_relay.py::test_"
EVENTS = "tests/api/test_events.py::test_"
ANSWER_CHECKS_TESTS = "tests/workers/test_answer_checks.py::test_"
DRAIN_TESTS = "tests/workers/test_drain.py::test_"
RUNS_TESTS = "tests/workers/test_runs.py::test_"
WRITER = "tests/workers/test_writer.py::test_"
ATTEMPT = "tests/workers/test_attempt.py::test_"
WALK = "tests/system/test_walk.py::test_"
LINE = "tests/streaming/redis/test_connection.py::test_"

TOKENS = (
    bug(
        "a prompt that is shown again",
        "The worker that takes over puts the echoed prompt into the middle of the text.",
        Edit("workers/past_texts.py", "begun = {row.index for row in rows} if job.echo else ()", "begun = set[int]()"),
        "tests/workers/test_echo.py::test_the_next_worker_shows_it_no_second_time",
    ),
    bug(
        "a line that gets the answer of another",
        "Two lines of a batch that differ only in their echo or their reasoning share one answer.",
        Edit("api/openai/batch_lines.py", ", task, reasoning_of(request, card), request.echoes", ", task"),
        "tests/api/openai/test_batch_lines.py::test_a_line_asks_for_what_its_request_would",
    ),
    bug(
        "an echo that the store has no room for",
        "Short answers with long echoed prompts are accepted until the store is full.",
        Edit("streaming/jobs/work.py", " + 2 * _echo_bytes(job)", ""),
        "tests/streaming/jobs/test_work.py::test_an_echo_is_written_twice_for_each_choice",
    ),
    bug(
        "a prompt that is continued twice",
        "An engine that takes over gets the echoed prompt as a part of the answer.",
        Edit("workers/past_texts.py", "text = text[len(_prompt(job, row.index)) :]", "pass"),
        "tests/workers/test_past_texts.py::test_an_engine_does_not_see_an_echo",
    ),
    bug(
        "a frame that does not know its repetition",
        "An append whose answer was lost, sent again, stands in the log twice.",
        lua("append", "if number <= last then return 0 end", "if number <= last then number = last + 1 end"),
        PROTOCOL + "repeated_writes_change_nothing",
    ),
    bug(
        "a store that was set back goes unnoticed by writers",
        "New frames are written behind a hole in the log.",
        lua("append", "if number > last + 1 and not forced then return -1 end\n", ""),
        PROTOCOL + "frames_behind_lost_ones_are_refused_until_the_loss_is_made_good",
    ),
    bug(
        "a store that was set back goes unnoticed by readers",
        "Event ids of tokens that are gone stay valid: a resumed stream is spliced from two texts.",
        Edit("streaming/jobs/reaper.py", "if tick <= seen:", "if tick < 0:"),
        PROTOCOL + "a_store_that_was_set_back_begins_a_new_epoch_once",
    ),
    bug(
        "a gap that is not seen",
        "Frames that pub/sub has lost are missing from the stream.",
        Edit(
            "streaming/jobs/reorder_buffer.py",
            "elif row.seq == self.seq + 1 and not",
            "elif row.seq > self.seq and not",
        ),
        RELAY + "a_buffer_puts_what_comes_in_order_and_takes_each_once",
    ),
    bug(
        "a spliced stream",
        "Where the store has lost what was shown, another text goes on in its place.",
        Edit(
            "streaming/jobs/reorder_buffer.py",
            "self.rewound, self.flow = True, None",
            "self.rewound, self.flow = False, None",
        ),
        RELAY + "a_run_that_contradicts_what_was_given_is_never_spliced_to_it",
    ),
    bug(
        "a run behind any other",
        "After a failover a second worker's text is put behind the first one's, whatever it goes on from.",
        Edit(
            "streaming/jobs/reorder_buffer.py",
            "return opening.parent in self._parents if self.seq else opening.parent is None",
            "return True",
        ),
        RELAY + "a_run_that_contradicts_what_was_given_is_never_spliced_to_it",
    ),
    bug(
        "an end by anybody",
        "A reader who saw one worker's text is given the end of another's as its own.",
        Edit("streaming/jobs/reorder_buffer.py", "if not self._agrees(terminal):", "if False:"),
        RELAY + "an_end_that_does_not_begin_with_what_was_given_is_no_end_of_it",
    ),
    bug(
        "a reader who listens to a worker that has lost the job",
        "Deltas that the record does not know reset readers who had seen nothing wrong.",
        Edit(
            "streaming/jobs/reorder_buffer.py",
            "if valid.issuperset(held.runs) and not valid & held.disputed:",
            "if False:",
        ),
        RELAY + "a_run_that_contradicts_what_was_given_is_never_spliced_to_it",
    ),
    bug(
        "an end in pieces",
        "Of a long answer in one piece only the first deltas are taken from its record.",
        Edit(
            "streaming/jobs/reorder_buffer.py",
            "rest = [row for row in terminal.rows if row.seq > self.seq]",
            "rest = [row for row in terminal.rows if row.seq > self.seq][:MAX_ROWS]",
        ),
        RELAY + "the_end_hands_over_every_delta_at_once",
    ),
    bug(
        "a checkpoint that nobody is told of",
        "The log is trimmed to a copy of a long job's tokens, and readers still look for them before it.",
        lua("checkpoint", "redis.call('HSET', job_key(id), 'runs',", "tostring("),
        PROTOCOL + "a_checkpoint_counts_only_for_its_run_and_once_it_is_in_the_log",
    ),
    bug(
        "a checkpoint without the latest tokens",
        "What a step gave while the checkpoint waited to be written is trimmed with the steps before it.",
        Edit(
            "workers/writer.py",
            "self._checkpoints.append(checkpoint)\n",
            "rows = checkpoint.rows()\n        checkpoint.rows = lambda: rows\n"
            "        self._checkpoints.append(checkpoint)\n",
        ),
        "tests/workers/test_writer.py::test_a_checkpoint_holds_all_that_came_before_it_is_written",
    ),
    bug(
        "a log that one long job keeps",
        "As long as one job runs, every step of all its neighbours stays in the store.",
        Edit("workers/heartbeat.py", "            self._checkpoint(partition)\n", ""),
        RUNS_TESTS + "a_long_job_does_not_keep_the_whole_log",
    ),
    bug(
        "a job with a hole in its log goes on",
        "What the store lost is missing from the result, or the job never ends.",
        Edit("workers/claimer.py", "if history.whole else", "if history.rows else"),
        RUNS_TESTS + "a_job_whose_log_has_a_hole_begins_anew",
    ),
    bug(
        "JSON that goes on at its grammar's root",
        "After the loss of a worker a second JSON text begins inside the first one, and the job completes.",
        Edit(
            "workers/claimer.py",
            "        reason = reason or restart_reason(claim.job, self._starter.card.capabilities, history.rows)\n",
            "",
        ),
        ANSWER_CHECKS_TESTS + "json_that_another_worker_began_is_computed_from_its_first_token",
    ),
    bug(
        "a check that holds its job for ever",
        "A job whose answer waits to be checked can neither be cancelled nor run out of time.",
        Edit("workers/worker.py", "elif not attempt.over or attempt.is_checked:", "elif not attempt.over:"),
        ANSWER_CHECKS_TESTS + "a_job_whose_answer_is_being_checked_ends_whatever_the_check_does",
    ),
    bug(
        "JSON that nobody looks at",
        "An engine drops a constraint in the middle of an answer, and the job completes with any text.",
        Edit(
            "workers/worker.py",
            "            if attempt.constrained:\n                attempt.check",
            "            if False:\n                attempt.check",
        ),
        ANSWER_CHECKS_TESTS + "an_answer_that_is_not_the_json_asked_for_fails",
    ),
    bug(
        "a grammar that is dropped after its first token",
        "llama.cpp generates text outside the schema, and its requester is not told before it ends.",
        Edit("workers/engines/llamacpp/engine.py", "TRIAL_TOKENS = 3", "TRIAL_TOKENS = 1"),
        "tests/workers/engines/llamacpp/test_engine.py::test_a_schema_whose_grammar_is_dropped_after_its_first_token_is_refused",
    ),
    bug(
        "two prompts out of one",
        "A request goes on from text alone, and llama.cpp answers prompt and past each by itself.",
        Edit(
            "workers/engines/llamacpp/prompt.py",
            "parts[-1], generated = last + first, generated[1:]",
            "parts, generated = [*parts, first], generated[1:]",
        ),
        "tests/workers/engines/llamacpp/test_engine.py::test_a_past_without_token_ids_is_continued_as_one_prompt",
    ),
    bug(
        "an engine that takes two runs for one",
        "The same worker is given a job that it still runs: the end of the old run ends the new one.",
        Edit("workers/attempt.py", 'f"{self.job.id}/{self.number}/{index}"', 'f"{self.job.id}/{index}"'),
        RUNS_TESTS + "a_worker_that_is_given_a_job_it_still_runs_lets_the_old_run_go",
    ),
    bug(
        "a log of runs that the store has forgotten",
        "A reader is given what a void run of its job wrote, told so, begins again and is given it again, for ever.",
        Edit("streaming/jobs/relay.py", "self._dispatch_rows(frame, runs)", "self._dispatch_rows(frame)"),
        EVENTS + "what_a_run_wrote_that_the_store_forgot_is_shown_to_nobody",
    ),
    bug(
        "a newer worker's job is told anew without end",
        "Each reader of a job that a newer worker runs has its epoch changed as fast as it can ask.",
        Edit("api/events.py", "if terminal is not None and terminal.failure is NEWER:", "if False:"),
        EVENTS + "the_reader_of_a_newer_workers_job_is_told_once",
    ),
    bug(
        "one number for two runs",
        "A job that fails in its claim uses up no place but a number: another job of the worker gets it too.",
        lua(
            "claims",
            "  fail_malformed(id, why, c.now, holder, lane, entry)\n",
            "  c.begun = c.begun + 1\n  fail_malformed(id, why, c.now, holder, lane, entry)\n",
        ),
        REGRESSIONS + "a_run_has_a_number_of_its_own_whatever_fails_beside_it",
    ),
    bug(
        "a job of nobody that keeps its worker",
        "A worker that drains waits for ever for a job that the store has lost.",
        lua("fences", "  buffer_write(buffered_releases, worker, id)\n  return false\n", "  return false\n"),
        REGRESSIONS + "a_worker_leaves_though_the_store_has_lost_its_job",
    ),
    bug(
        "an event's id twice",
        "The end of a job has the id of its last delta: who drops what it has seen never hears of the end.",
        Edit("api/openai/cursor.py", "+ len(runs) + 2, str(runs[-1]))", "+ len(runs) + 1, str(runs[-1]))"),
        "tests/api/openai/test_cursor.py::test_ids_grow_and_each_leads_back_to_its_place",
    ),
    bug(
        "a reset within its epoch",
        "After a loss the ids that a reader has seen stand for other deltas.",
        Edit("api/events.py", "(_new_epoch if shown else _read_again)", "_read_again"),
        EVENTS + "a_store_that_lost_what_was_shown_resets_its_readers",
    ),
    bug(
        "a started that is told twice",
        "Who comes back to a running job hears again of the workers that it has heard of.",
        Edit("api/events.py", "self._started = len(place.runs)", "self._started = 0"),
        EVENTS + "a_running_job_is_taken_up_behind_any_id",
    ),
    bug(
        "a running job resumed one too early",
        "A reader that comes back gets its last token again.",
        Edit("streaming/jobs/reorder_buffer.py", "self.seq = after\n", "self.seq = max(after - 1, 0)\n"),
        RELAY + "a_late_follower_gets_everything_and_then_the_rest",
    ),
    bug(
        "a started with the id of its first delta",
        "Whoever comes back behind `started` misses the first token after it.",
        Edit(
            "api/openai/cursor.py",
            "return Cursor(epoch, first + place, str(run))",
            "return Cursor(epoch, first + place + 1, str(run))",
        ),
        WALK + "events_can_be_taken_up_behind_any_of_them",
    ),
    bug(
        "a finished job resumed one too early",
        "The same, read from the record.",
        Edit(
            "streaming/jobs/reorder_buffer.py",
            "for row in terminal.rows if row.seq > self.seq]",
            "for row in terminal.rows if row.seq >= self.seq]",
        ),
        WALK + "events_can_be_taken_up_behind_any_of_them",
    ),
    bug(
        "a log trimmed too early",
        "The last write of a drain deletes tokens of the jobs that were handed back.",
        Edit(
            "workers/held_jobs.py", "in chain(self.handed_back, self.attempts.values()):", "in self.attempts.values():"
        ),
        DRAIN_TESTS + "the_last_write_of_a_drain_keeps_what_is_handed_back",
    ),
    bug(
        "a step behind the end",
        "A worker that was given up goes on writing its steps, and renews its lease with them: nobody takes its jobs.",
        Edit("workers/writer.py", "self._stopped = True", "self._stopped = False"),
        WRITER + "nothing_is_written_once_its_run_is_over",
    ),
    bug(
        "prompts counted by the last worker alone",
        "A choice that ended before its worker was lost is not run again, and its prompt counts nothing.",
        Edit(
            "workers/attempt.py",
            "                self._prompts.setdefault(row.index, row.prompt)\n",
            "                pass\n",
        ),
        ATTEMPT + "a_prompt_is_counted_once_whatever_ran_it",
        "tests/system/test_losses.py::test_a_prompt_whose_answer_had_ended_is_counted_after_its_worker_was_killed",
    ),
    bug(
        "prompts that no log holds",
        "What the engine says of a prompt's size is known to its worker alone, and lost with it.",
        Edit("workers/attempt.py", "piece.logprobs, prompt, model)", "piece.logprobs, None, model)"),
        ATTEMPT + "a_prompt_is_counted_once_whatever_ran_it",
    ),
    bug(
        "a log written anew without its prompts",
        "After a failover the rewritten log has lost how large the prompts were.",
        Edit("streaming/jobs/codec.py", "    if prompt is not None:\n", "    if not delta:\n"),
        ATTEMPT + "a_prompt_is_counted_once_whatever_ran_it",
    ),
    bug(
        "copies that pass for one's own",
        "After a failover, what earlier attempts said is logged as the last one's, and resets its readers.",
        Edit("workers/attempt.py", "replace(row, stream=-self.number)", "row"),
        ATTEMPT + "the_record_holds_what_was_logged_before_and_what_was_given_out",
    ),
    bug(
        "a worker that forgets what was said",
        "It begins a lost job anew, and its readers see other tokens under the same numbers.",
        Edit("workers/claimer.py", "past = await self._continuable(claim, history)", "past = NOTHING"),
        RUNS_TESTS + "the_next_worker_numbers_on_where_the_log_ends",
    ),
    bug(
        "a task that dies with its connection",
        "A shared connection closed while it opens cancels all who wait for it: readers hear nothing any more.",
        Edit("streaming/redis/connection.py", "await asyncio.wait({opening})", "await asyncio.shield(opening)"),
        LINE + "who_waits_while_it_is_closed_goes_on",
    ),
)
