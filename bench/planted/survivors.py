"""Planted bugs of an audit that the test suite did not notice: conditions of scripts, workers and offline work."""

from __future__ import annotations

from bench.planted.bug import Edit, bug

LUA = "streaming/lua/"
PROTOCOL = "tests/streaming/jobs/test_protocol.py::test_"
WORKER = "tests/workers/test_worker.py::test_"
ANSWER_CHECKS_TESTS = "tests/workers/test_answer_checks.py::test_"
RUNS_TESTS = "tests/workers/test_runs.py::test_"
TURN = "tests/offline/batch/test_turn.py::test_"
WAITING = "tests/offline/broker/test_events.py::test_a_message_that_has_to_wait_is_rejected_by_no_number_of_tries"
INTAKE = "except (Rejected, LaneFull, StoreFull, Unavailable):"

SURVIVORS = (
    bug(
        "a working worker's log expires",
        "The log of a draining worker is gone after a minute, with the tokens of the jobs that it still runs.",
        Edit(
            LUA + "shared/logs.lua",
            "and redis.call('HGET', worker_key(worker), 'state') ~= 'live' then",
            "and true then",
        ),
        "tests/streaming/test_regressions.py::test_the_log_of_a_worker_that_still_works_does_not_expire",
    ),
    bug(
        "every reader resets anew",
        "Each of many readers that miss the same deltas begins a new epoch, and makes all the others begin anew.",
        Edit(LUA + "reset.lua", "if now == seen then", "if true then"),
        PROTOCOL + "resets_that_know_the_same_epoch_begin_one_new_epoch",
    ),
    bug(
        "a join that pins nothing",
        "A job whose id was given out with a 202 ends when the client that streams it leaves.",
        Edit(LUA + "join.lua", "digest, not waits, epoch)", "digest, false, epoch)"),
        "tests/streaming/store/test_memory.py::test_a_full_store_answers_a_key_whose_job_it_has",
    ),
    bug(
        "the later of two times",
        "A waiting job outlives its deadline because it may wait in the queue for longer.",
        Edit(LUA + "put.lua", "expires = math.min(expires or math.huge, now + queue_ms)", "expires = now + queue_ms"),
        PROTOCOL + "a_job_expires_at_the_earlier_of_its_two_times",
    ),
    bug(
        "two run suspects",
        "A suspect that runs for long is no longer alone: another worker is told to take suspects too.",
        Edit(LUA + "beat.lua", "'PEXPIRE', alone_key(model), 3 * lease", "'PTTL', alone_key(model)"),
        PROTOCOL + "a_heartbeat_renews_the_right_to_run_suspects",
    ),
    bug(
        "a young batch in quarantine",
        "A batch that is being created loses its folder to the quarantine.",
        Edit("offline/batch/batch_runner.py", "if state is None} & set(old_works))", "if state is None})"),
        "tests/offline/batch/test_tidy.py::test_what_is_young_is_left_alone",
    ),
    bug(
        "a newer answer is a failure",
        "During an upgrade the answers of newer workers are written down as errors of their lines.",
        Edit("offline/batch/lines.py", "if record is not None and record.newer:", "if False:"),
        "tests/offline/batch/test_lines.py::test_an_answer_of_a_newer_worker_is_left_to_a_newer_offline_process",
    ),
    bug(
        "a withdrawal that gives up",
        "A job that was refused with 503, and arrived all the same, is computed for nobody.",
        Edit(
            "api/admission.py",
            "await retry(cancel, expected, itertools.repeat(WITHDRAW_RETRY_DELAY_S))",
            "await retry(cancel, expected, ())",
        ),
        "tests/api/test_idempotency.py::test_a_refused_put_is_withdrawn_however_long_the_store_is_away",
    ),
    bug(
        "the end of an old run",
        "A worker forgets a job that it runs because the end of its earlier run was answered late.",
        Edit("workers/worker.py", "held is None or held.number == finish.number", "held is None or held"),
        RUNS_TESTS + "the_late_end_of_an_earlier_run_does_not_end_the_run_held_now",
    ),
    bug(
        "only one run's log is read",
        "A reader that missed two hand-overs sees nothing more until the job ends.",
        Edit(
            "streaming/jobs/subscribers.py",
            "return (LoggedRun(current, first), *record.runs[place + 1 :])",
            "return (LoggedRun(current, first),)",
        ),
        "tests/streaming/jobs/test_relay.py::test_a_reader_behind_two_hand_overs_gets_what_every_run_logged",
    ),
    bug(
        "a schema that fetches",
        "A stranger's schema has the worker open addresses and files.",
        Edit("workers/json_check.py", "offline=True,", "offline=False,"),
        "tests/workers/test_checker.py::test_a_schema_fetches_nothing",
    ),
    bug(
        "an unmarked reset",
        "Processes start on a store of which half was deleted.",
        Edit(LUA + "condemn.lua", "'format', 0, 'partitions', 0, 'deployment', ''", "'marked', 1"),
        "tests/cli/test_store.py::test_a_reset_that_is_cut_off_at_its_first_key_leaves_a_store_nobody_starts_on",
    ),
    bug(
        "a dropped run is ended",
        "A worker that has lost a job ends it, and counts it, once its answer is checked.",
        Edit("workers/checker.py", "if self._held.attempts.get(attempt.job.id) is not attempt:", "if False:"),
        ANSWER_CHECKS_TESTS + "a_job_that_was_dropped_is_not_ended_by_its_check",
    ),
    bug(
        "two runs of one number",
        "A reader is shown the tokens of another's job: both runs are the same number of the same worker.",
        Edit("streaming/jobs/lease.py", "if self._run == before + want:", "if True:"),
        PROTOCOL + "a_run_shares_its_number_with_none_of_another_partition",
    ),
    bug(
        "an outage rejects a message",
        "A message that comes again while the store may be given nothing is put aside for good.",
        Edit("offline/broker/intake.py", INTAKE, INTAKE.replace(", Unavailable", "")),
        WAITING,
    ),
    bug(
        "a full lane rejects a message",
        "A message that comes again while its lane is full is put aside for good.",
        Edit("offline/broker/intake.py", INTAKE, INTAKE.replace(", LaneFull", "")),
        WAITING,
    ),
    bug(
        "a full store rejects a message",
        "A message that comes again while the store, or its tenant's quota, is full is put aside for good.",
        Edit("offline/broker/intake.py", INTAKE, INTAKE.replace(", StoreFull", "")),
        WAITING,
    ),
    bug(
        "a worker judged by what was long ago",
        "The only busy worker is cordoned when its machine becomes slower, with nobody there to compare it with.",
        Edit("scheduler/policy/health.py", " and now - record.window.at <= STALE_S\n", "\n"),
        "tests/scheduler/policy/test_health.py::test_a_peer_that_has_long_been_idle_judges_nobody",
    ),
    bug(
        "an attempt longer than its lease",
        "Two processes deliver one webhook message at the same time.",
        Edit(
            "offline/webhooks/dispatcher.py",
            "int(2000 * self.settings.timeout_s)",
            "int(200 * self.settings.timeout_s)",
        ),
        "tests/offline/webhooks/test_dispatcher.py::test_a_message_is_nobody_elses_for_as_long_as_its_attempt_may_last",
    ),
    bug(
        "a cancelled batch waits its whole time",
        "Cancelling takes half a minute though everything has stopped, and for ever where one worker says nothing.",
        Edit(
            "offline/batch/turn.py", "lines.idle or loop.time() > cancel_by", "lines.idle and loop.time() > cancel_by"
        ),
        TURN + "a_cancelled_batch_ends_once_its_lines_have_stopped_or_had_their_time",
    ),
    bug(
        "files of an overtaken turn",
        "Output that no record names stays on the disk.",
        Edit(
            "offline/batch/turn.py",
            "            for _, file in made:  # the process that has the batch now writes its own\n"
            "                await asyncio.to_thread(self._context.file_store.remove, file.id)\n",
            "",
        ),
        TURN + "a_turn_that_was_overtaken_leaves_no_files",
    ),
)
