"""The table of planted bugs: mistakes that every queue of this kind has made, one at a time.

Each test is chosen to show its bug in seconds; the whole suite has slower ones that would show it too.
"""

from __future__ import annotations

from bench.planted import tenants
from bench.planted.bug import Bug, Edit
from bench.planted.connections import CONNECTIONS
from bench.planted.door import DOORS
from bench.planted.long_results import LONG_RESULTS
from bench.planted.measurements import MEASUREMENTS
from bench.planted.readers import READERS
from bench.planted.room import ROOM_BUGS
from bench.planted.security import SECURITY
from bench.planted.store_access import STORE_ACCESS
from bench.planted.survivors import SURVIVORS
from bench.planted.unreadable import UNREADABLE
from bench.planted.work import WORK

LUA = "streaming/lua/"
PROTOCOL = "tests/streaming/jobs/test_protocol.py::test_"
REGRESSIONS = "tests/streaming/test_regressions.py::test_"
RELAY = "tests/streaming/jobs/test_relay.py::test_"
EVENTS = "tests/api/test_events.py::test_"
WORKER = "tests/workers/test_worker.py::test_"
ANSWER_CHECKS_TESTS = "tests/workers/test_answer_checks.py::test_"
CLAIMER_TESTS = "tests/workers/test_claimer.py::test_"
DRAIN_TESTS = "tests/workers/test_drain.py::test_"
RUNS_TESTS = "tests/workers/test_runs.py::test_"
START_TESTS = "tests/workers/test_start.py::test_"
MEMORY = "tests/streaming/store/test_memory.py::test_"
WRITER = "tests/workers/test_writer.py::test_"
ATTEMPT = "tests/workers/test_attempt.py::test_"
WALK = "tests/system/test_walk.py::test_"
RENDER = "tests/api/openai/test_rendering.py::test_"
KEYS = "tests/api/auth/test_keys.py::test_"
IDEMPOTENCY = "tests/streaming/jobs/test_idempotency.py::test_"
RETRIES = "tests/api/test_idempotency.py::test_"
BATCHES = "tests/streaming/batches/test_store.py::test_"
LEDGER = "tests/streaming/batches/test_ledger.py::test_"
PLANS = "tests/streaming/fleet/test_plans.py::test_"
PODS = "tests/scheduler/pools/test_kubernetes.py::test_"
LINE = "tests/streaming/redis/test_connection.py::test_"
TIDY = "tests/offline/batch/test_tidy.py::test_"
IDENTITY = "tests/streaming/store/test_identity.py::test_"
SURVEY = "tests/offline/batch/test_survey.py::test_"
MALFORMED = "tests/streaming/test_malformed.py::test_"
ERRORS = "tests/api/openai/test_errors.py::test_"
LISTS = "tests/api/test_lists.py::test_"
SUMMARIES = "tests/streaming/jobs/test_summaries.py::test_"
HISTORY = "tests/streaming/jobs/test_history.py::test_"


def _lua(script: str, old: str, new: str) -> Edit:
    return Edit(f"{LUA}{script}.lua", old, new)


FENCING = (
    Bug(
        "append without its fence",
        "A worker that was taken for dead goes on writing tokens beside its successor.",
        (_lua("append", "if mine[1] ~= 'live' then return 'fenced' end\n", ""),),
        (PROTOCOL + "a_fenced_worker_can_write_nothing",),
    ),
    Bug(
        "finish without its fence",
        "A worker that was taken for dead is not told so when it ends a job, and goes on.",
        (_lua("finish", "if not is_live(worker) then return 'fenced' end\n", ""),),
        (PROTOCOL + "a_fenced_worker_can_write_nothing",),
    ),
    Bug(
        "finish without its owner",
        "Any live worker can end a job that another one runs.",
        (_lua("finish", "holds_job(id, worker, run, s[1]", "holds_job(id, s[2], run, s[1]"),),
        (REGRESSIONS + "a_job_is_ended_by_its_holder_and_its_run_only",),
    ),
    Bug(
        "finish without its run",
        "The end of an earlier attempt counts for a later one.",
        (_lua("finish", "holds_job(id, worker, run, s[1]", "holds_job(id, worker, s[3], s[1]"),),
        (REGRESSIONS + "a_job_is_ended_by_its_holder_and_its_run_only",),
    ),
    Bug(
        "release without its run",
        "A hand-back that arrives late takes the job from the worker that has claimed it again and runs it.",
        (_lua("release", "holds_job(id, worker, run, s[1]", "holds_job(id, worker, s[3], s[1]"),),
        (REGRESSIONS + "a_release_that_arrives_late_leaves_the_next_attempt_alone",),
    ),
    Bug(
        "a lease by a client's clock",
        "A process whose clock is fast fences every worker; one whose clock is slow never finds a dead one.",
        (
            Edit(
                "streaming/jobs/reaper.py",
                "LOG_KEEP_S, settings.lease_ms)",
                "LOG_KEEP_S, settings.lease_ms, _now_ms())",
            ),
            Edit(
                "streaming/jobs/reaper.py",
                "class Reaper:",
                "def _now_ms() -> int:\n    import time\n\n    return int(time.time() * 1000)\n\n\nclass Reaper:",
            ),
            _lua("reap", "local now = now_ms()", "local now = tonumber(ARGV[6])"),
        ),
        (REGRESSIONS + "a_clients_clock_decides_nothing",),
    ),
    Bug(
        "a lease ends while the store is away",
        "When it is back every worker is fenced, and what the store had not written yet is made anew by others.",
        (_lua("reap", "if now - before > lease / 2 then", "if false then"),),
        (REGRESSIONS + "the_time_the_store_was_away_ends_no_lease",),
    ),
    Bug(
        "a lease made by a clock that was ahead",
        "The store's clock is set back: whoever dies then holds its jobs for as long as it was set back by.",
        (
            _lua(
                "reap",
                "redis.call('ZADD', leases_key(), now + lease, worker)\nend\n\nlocal lapsed",
                "end\n\nlocal lapsed",
            ),
        ),
        (REGRESSIONS + "a_clock_that_is_set_back_keeps_no_dead_worker",),
    ),
    Bug(
        "a lease that is spared for ever",
        "Where sweeps are rare, a dead worker's jobs wait without end.",
        (_lua("reap", "tonumber(redis.call('HGET', worker_key(held[i]), 'spared')) ~= tonumber(held[i + 1])", "true"),),
        (REGRESSIONS + "the_time_the_store_was_away_ends_no_lease",),
    ),
)

ENDS = (
    Bug(
        "acknowledged before it is one's own",
        "A finish that is refused has already removed the job's entry: the job waits for ever.",
        (
            _lua(
                "finish",
                "  if not holds_job(",
                "  ack_and_delete(s[4], s[5])\n  if not holds_job(",
            ),
        ),
        (REGRESSIONS + "a_finish_behind_the_hand_back_leaves_the_job_in_the_queue",),
    ),
    Bug(
        "ended but not acknowledged",
        "Entries of jobs that have ended fill their lane.",
        (_lua("finish", "ack_and_delete(s[4], s[5])\n", ""),),
        (PROTOCOL + "a_job_is_put_claimed_logged_and_finished",),
    ),
    Bug(
        "a finish reason before the end",
        "A reader takes an answer for complete that is not stored yet.",
        (
            Edit(
                "api/openai/rendering.py",
                "return prefix + to_json(text) + end\n",
                "return prefix + to_json(text) + end + "
                '(self._finish(delta.index, delta.finish) if delta.finish else b"")\n',
            ),
        ),
        (RENDER + "no_block_of_a_delta_has_a_finish",),
    ),
    Bug(
        "an end before its last tokens",
        "A reader is told that all is said while deltas are missing.",
        (Edit("streaming/jobs/reorder_buffer.py", "if self.seq < terminal.seq:", "if self.seq < 0:"),),
        (RELAY + "an_inbox_waits_for_what_is_missing_before_it_ends",),
    ),
    Bug(
        "a cancel that forgets the queue",
        "A waiting job is only marked: a worker runs it all the same.",
        (
            _lua(
                "cancel",
                "end_job(id, 'cancelled', 'cancelled', now_ms())",
                "redis.call('HSET', job_key(id), 'cancel', 1)",
            ),
        ),
        (PROTOCOL + "cancel_ends_a_waiting_job_and_marks_a_running_one",),
    ),
    Bug(
        "a cancel that forgets the worker",
        "A running job is never told of its cancel: it keeps its slot to the end.",
        (_lua("cancel", "    redis.call('HSET', job_key(id), 'cancel', 1)\n    notify_worker(s[2], {'c', id})\n", ""),),
        (PROTOCOL + "cancel_ends_a_waiting_job_and_marks_a_running_one",),
    ),
    Bug(
        "one record that cannot be read deafens all",
        "The readers of a whole API process hear nothing more from the log because of one spoiled job.",
        (
            Edit(
                "streaming/jobs/reader.py",
                "return malformed_record(job_id, fields, await fail_malformed(self._client, job_id, error))",
                "raise",
            ),
        ),
        (MALFORMED + "a_record_that_cannot_be_read_fails_its_job_alone",),
    ),
    Bug(
        "an unreadable job is nobody's",
        "Its reader gets an error, but it is no dead letter and stays running in the store.",
        (
            Edit(
                "streaming/jobs/reader.py",
                '    return int(await client.call("fail_malformed", partition_of(job_id) or 0, job_id, str(error)))\n',
                "    return 0\n",
            ),
        ),
        (MALFORMED + "a_record_that_cannot_be_read_fails_its_job_alone",),
    ),
    Bug(
        "an unreadable job without a time of its end",
        "Who asks for a job until it has an end in time asks for ever: it has failed, and is never said to be over.",
        (
            _lua(
                "fail_malformed",
                "return tonumber(string.match(redis.call('HGET', job, 'done') or '', '^%d+$')) or now",
                "return 0",
            ),
        ),
        (MALFORMED + "a_job_that_cannot_be_read_has_an_end_in_time",),
    ),
    Bug(
        "one record stops every sweep",
        "A dead worker's jobs stay with it because one of them cannot be read.",
        (
            _lua(
                "prelude",
                "local ran, answer = pcall(step, id, worker)",
                "local ran, answer = true, step(id, worker)",
            ),
        ),
        (MALFORMED + "a_sweep_puts_the_other_jobs_back",),
    ),
    Bug(
        "a replay that doubles",
        "Two people replay one dead letter, and its job runs twice.",
        (
            Edit(
                "streaming/jobs/dead_letters.py",
                "replay_job_id(letter_id, letter.job)",
                "self._queue.new_id(record.job.tenant)",
            ),
        ),
        (MALFORMED + "a_dead_letter_replayed_twice_is_one_job",),
    ),
    Bug(
        "a replay of nothing",
        "A dead letter whose body cannot be read becomes a job with an empty prompt.",
        (
            Edit(
                "streaming/jobs/dead_letters.py",
                "        if record.fault:\n            raise MalformedJob(record.fault)\n",
                "",
            ),
        ),
        (MALFORMED + "a_dead_letter_without_a_body_is_not_replayed",),
    ),
    Bug(
        "an expired job is run",
        "Work that nobody waits for any more costs engine steps.",
        (_lua("claim", " or is_past(s[3], now) then", " then"),),
        (REGRESSIONS + "a_job_whose_time_is_over_is_not_claimed",),
    ),
)

QUEUE = (
    Bug(
        "a put that does not know its repetition",
        "A put whose answer was lost, sent again, makes a second entry: the job runs twice.",
        (_lua("put", "if redis.call('EXISTS', job) == 1 then return {'queued', now, 0, epoch} end\n", ""),),
        (REGRESSIONS + "a_put_that_is_repeated_late_runs_nothing_again",),
    ),
    Bug(
        "a lane trimmed by length",
        "The bound of a lane deletes accepted work instead of refusing more.",
        (_lua("put", "redis.call('XADD', lane, '*',", "redis.call('XADD', lane, 'MAXLEN', limit, '*',"),),
        (PROTOCOL + "a_full_lane_refuses_and_keeps_what_it_has",),
    ),
    Bug(
        "an unbounded lane",
        "Admission never ends, and the store fills up.",
        (_lua("put", "if waiting >= limit then return {'full', waiting} end\n", ""),),
        (PROTOCOL + "a_full_lane_refuses_and_keeps_what_it_has",),
    ),
    Bug(
        "an idempotency key of everybody",
        "Two tenants with the same key share one job and read each other's answer.",
        (
            Edit("streaming/ids.py", "joined(tenant, key).encode()", 'joined("", key).encode()'),
            _lua("prelude", "s[1] ~= tenant or ", ""),
        ),
        (PROTOCOL + "an_idempotency_key_leads_to_one_job",),
    ),
    Bug(
        "names joined by a separator",
        "Tenant a with key b:K is tenant a:b with key K.",
        (Edit("streaming/ids.py", '"".join(f"{len(name)}:{name}" for name in names)', '":".join(names)'),),
        (IDEMPOTENCY + "no_key_leads_to_another_tenants_job", IDEMPOTENCY + "joined_names_can_be_told_apart"),
    ),
    Bug(
        "a join that does not look whose job it is",
        "A stored key that leads to another tenant's job delivers its answer.",
        (_lua("prelude", "s[1] ~= tenant or ", ""),),
        (IDEMPOTENCY + "a_stored_key_of_another_tenants_job_delivers_nothing",),
    ),
    Bug(
        "an idempotency key that expires before its job",
        "A retry of a request that waits longer than results are kept makes a second job.",
        (_lua("put", "id .. ':' .. digest)\n", "id .. ':' .. digest, 'EX', keep)\n"),),
        (IDEMPOTENCY + "a_key_leads_to_its_job_for_as_long_as_that_waits_and_runs",),
    ),
    Bug(
        "an idempotency key that outlives its finished job",
        "The store keeps the key of every job that was ever completed.",
        (_lua("finish", "  if is_idem_key(s[9]) then redis.call('EXPIRE', s[9], retention_s(s[7])) end\n", ""),),
        (IDEMPOTENCY + "a_key_leads_to_its_job_for_as_long_as_that_waits_and_runs",),
    ),
    Bug(
        "an idempotency key that outlives its cancelled job",
        "The same, of jobs that no worker ends.",
        (_lua("prelude", "  if is_idem_key(s[7]) then redis.call('EXPIRE', s[7], retention_s(s[5])) end\n", ""),),
        (IDEMPOTENCY + "whatever_ends_a_job_bounds_the_life_of_its_key",),
    ),
    Bug(
        "an idempotency key of a job that is gone",
        "It answers every retry with the id of a job that nobody can read.",
        (
            _lua(
                "prelude",
                "  if not s.err and not s[1] then return nil end\n",
                "  if not s.err then s[1], s[2], s[3] = s[1] or tenant, s[2] or 'queued', s[3] or '0' end\n",
            ),
        ),
        (IDEMPOTENCY + "a_key_whose_job_is_gone_is_free",),
    ),
    Bug(
        "a lost connection that keeps its key",
        "The next try of a client that lost its connection is told that the job was cancelled.",
        (_lua("cancel", "    free_idempotency_key(s[5], id)\n", ""),),
        (
            IDEMPOTENCY + "a_job_that_lost_its_client_leaves_its_key_free",
            RETRIES + "a_request_that_lost_its_connection_is_computed_when_it_comes_again",
        ),
    ),
    Bug(
        "a lost connection that ends what others wait for",
        "One client's leaving cancels the job that another one follows under the same key, or was told of with a 202.",
        (_lua("cancel", "  if #others > 0 or s[4] == '1' then return 'kept' end\n", ""),),
        (
            IDEMPOTENCY + "a_lost_client_ends_no_job_that_others_wait_for",
            IDEMPOTENCY + "a_lost_client_ends_no_job_whose_id_was_answered",
        ),
    ),
    Bug(
        "a join that comes too late",
        "A request that finds its job cancelled for want of a client waits for that job and is told of the cancel.",
        (_lua("follow", "if s[4] and ARGV[3] == '1' then return 'abandoned' end\n", ""),),
        (IDEMPOTENCY + "whoever_joins_too_late_is_told",),
    ),
    Bug(
        "a 202 that needs a second look",
        "The store goes between a put and the answer, and an accepted job is denied.",
        (
            Edit(
                "api/jobs.py",
                "    view = _accepted_view(services, admitted)\n",
                "    view = await view_of(services, await services.job_reader.record(accepted.id))\n",
            ),
        ),
        (RETRIES + "a_job_is_accepted_by_its_put_alone",),
    ),
    Bug(
        "an idempotency key for any body",
        "Another request under the same key gets the first one's answer.",
        (_lua("prelude", " or string.sub(known, 38) ~= digest)", ")"),),
        (PROTOCOL + "an_idempotency_key_leads_to_one_job",),
    ),
    Bug(
        "leaving with work in hand",
        "A worker that drains deletes its consumer and is gone: what it held is never run.",
        (
            _lua(
                "leave",
                "local held = redis.call('SCARD', claims_key(worker))\nif held > 0 then return held end\n",
                "for _, lane in ipairs(model_streams(redis.call('HGET', worker_key(worker), 'model'))) do\n"
                "  redis.pcall('XGROUP', 'DELCONSUMER', lane, GROUP, worker)\nend\n",
            ),
        ),
        (PROTOCOL + "a_released_job_is_not_counted_as_a_loss",),
    ),
    Bug(
        "a consumer deleted with pending work",
        "What was delivered to it can be found by nobody.",
        (_lua("prelude", "if not pending.err and #pending == 0 then", "if not pending.err then"),),
        (REGRESSIONS + "a_consumer_with_pending_entries_is_never_deleted",),
    ),
    Bug(
        "put back beside the old entry",
        "Entries and consumers of dead workers stay for ever.",
        (
            _lua(
                "prelude",
                "  ack_and_delete(s[1], s[2])\n  buffer_write(buffered_releases, worker, id)\n",
                "  buffer_write(buffered_releases, worker, id)\n",
            ),
        ),
        (REGRESSIONS + "a_lost_worker_leaves_no_entry_behind",),
    ),
    Bug(
        "one record stops every claim",
        "No worker of the model gets a job any more because one that waits cannot be read.",
        (
            _lua(
                "claim",
                "local ran, job = pcall(claim_entry, lane, item[1], fields[2])",
                "local ran, job = true, claim_entry(lane, item[1], fields[2])",
            ),
        ),
        (MALFORMED + "a_claim_gives_the_other_jobs",),
    ),
    Bug(
        "a newer job fails",
        "During an upgrade the old workers fail the jobs of the new API processes.",
        (Edit("streaming/jobs/lease.py", "str(error), newer=True)", "str(error))"),),
        (CLAIMER_TESTS + "a_job_of_a_newer_version_waits_for_a_newer_worker",),
    ),
    Bug(
        "a newer job spins",
        "An old worker claims a newer job and puts it back, over and over.",
        (
            Edit(
                "workers/claimer.py",
                "            self._newer_until[partition] = time.monotonic() + self._pause_s\n",
                "            self._look.set()\n",
            ),
        ),
        (CLAIMER_TESTS + "a_job_of_a_newer_version_waits_for_a_newer_worker",),
    ),
    Bug(
        "a model loaded for nothing",
        "A store that is away for a moment while a worker registers ends the worker.",
        (
            Edit(
                "workers/worker.py",
                "return await retry_until(stop, register, expected, REGISTER_RETRY_DELAY_S)",
                "await register()\n        return True",
            ),
        ),
        (START_TESTS + "a_store_that_is_away_at_the_start_is_waited_for",),
    ),
    Bug(
        "weights errors as a traceback",
        "Nobody is told why the model cannot be had, and what to do.",
        (Edit("workers/__main__.py", "needed_to_start(EngineDead, exit_code=2)", "needed_to_start(exit_code=2)"),),
        (START_TESTS + "weights_that_cannot_be_had_are_told_and_the_fix",),
    ),
    Bug(
        "one partition's loss is everybody's",
        "A worker that is fenced in one partition abandons its jobs in all others.",
        (
            Edit(
                "workers/worker.py",
                "            self.lose(partition)\n            await asyncio",
                "            raise\n            await asyncio",
            ),
        ),
        (DRAIN_TESTS + "a_lease_lost_in_one_partition_abandons_no_job_of_another",),
    ),
    Bug(
        "losses that are not counted",
        "A request that kills its engine kills one worker after another, for ever.",
        (_lua("reap", "redis.call('HINCRBY', job_key(id), 'losses', 1)", "0"),),
        (PROTOCOL + "a_job_given_up_after_too_many_lost_workers_is_a_dead_letter",),
    ),
    Bug(
        "a full store fences its workers",
        "Leases cannot be renewed while the store is full; innocent jobs are put back again and again, and given up.",
        (_lua("beat", "#!lua flags=allow-oom\n", ""),),
        (MEMORY + "a_store_that_refuses_writes_costs_no_job_an_attempt",),
    ),
    Bug(
        "a full store takes no worker",
        "Workers that start while the store is full cannot register: nothing drains it.",
        (_lua("register", "#!lua flags=allow-oom\n", ""),),
        (MEMORY + "what_drains_a_full_store_runs",),
    ),
    Bug(
        "a spared lease that looks renewed",
        "A worker whose lease was spared and renewed in one millisecond is fenced when the store is away again.",
        (_lua("reap", "local till = now + lease - 0.5", "local till = now + lease"),),
        (REGRESSIONS + "a_spared_lease_that_was_renewed_at_once_may_be_spared_again",),
    ),
    Bug(
        "a room that many promise",
        "Each API process reserves the same memory: together they accept more than the store can hold.",
        (_lua("put", "if total_reserved_bytes() + reserved > max_reserved then", "if reserved > max_reserved then"),),
        (MEMORY + "what_is_accepted_leaves_room_for_its_output",),
    ),
    Bug(
        "a put that brings nothing and keeps its reservation",
        "One client that repeats a request under its idempotency key has everybody refused: the store seems full.",
        (
            Edit(
                "streaming/jobs/queue.py",
                "            if not _brought_work(answer):\n                reserved.give_back()",
                "            pass",
            ),
        ),
        (MEMORY + "what_brings_nothing_into_the_store_takes_no_room",),
    ),
    Bug(
        "a full store that refuses whoever comes back",
        "A retry that would only fetch the answer of an accepted job is told that nothing more is accepted.",
        (
            Edit(
                "streaming/jobs/queue.py",
                "found = await self._join(job, idempotency_key, digest) if idempotency_key else None",
                "found = None",
            ),
        ),
        (MEMORY + "a_full_store_answers_a_key_whose_job_it_has",),
    ),
    Bug(
        "a malformed job that still owes",
        "The room of a job that failed as malformed is never given back, and each such job has less accepted.",
        (_lua("prelude", "  if model then add_reserved_bytes(model, priority, s[10], -1) end\n", ""),),
        (MALFORMED + "a_malformed_job_leaves_nothing_behind",),
    ),
    Bug(
        "a malformed job that keeps its idempotency key",
        "The key has no expiry and leads to a failed job for ever.",
        (_lua("prelude", "  free_idempotency_key(s[9], id)\n", ""),),
        (MALFORMED + "a_malformed_job_leaves_nothing_behind",),
    ),
    Bug(
        "an idempotency key of a job that cannot be read",
        "Every retry with the key breaks on the record it leads to, and is answered with 500.",
        (_lua("prelude", "  if s.err or not STATES[s[2]] or not tonumber(s[3]) or not created or", "  if"),),
        (MALFORMED + "a_key_that_leads_to_what_cannot_be_read_is_free",),
    ),
    Bug(
        "messages joined by a separator",
        "A broker message is counted with another one's redeliveries and rejected for them.",
        (Edit("streaming/events/redeliveries.py", "joined(queue, message_id)", 'f"{queue}\\0{message_id}"'),),
        ("tests/streaming/events/test_redeliveries.py::test_each_message_of_each_queue_is_counted_by_itself",),
    ),
    Bug(
        "a schema that is tried again and again",
        "One tenant's schema that takes all the time of a check holds up the checks of every tenant.",
        (Edit("workers/checker.py", "            if self._exhausting.has(schema):", "            if False:"),),
        ("tests/workers/test_checker.py::test_a_schema_whose_check_was_ended_is_not_tried_again",),
    ),
    Bug(
        "a child that has the worker's secrets",
        "A fault of the validator of strangers' schemas gives the password of Redis away.",
        (Edit("workers/checker.py", "stdout=PIPE, env=environ, cwd", "stdout=PIPE, cwd"),),
        ("tests/workers/test_checker.py::test_the_child_is_given_no_secrets",),
    ),
    Bug(
        "a refusal that tells clients to reset the store",
        "Whoever sends a request while the store is unfit reads the operator's command that deletes everything.",
        (Edit("api/services.py", "        return self.store.brief\n", "        return self.store.reason\n"),),
        (ERRORS + "a_client_is_told_no_command_of_the_operators",),
    ),
    Bug(
        "a reservation that is never given back",
        "With every finished job less is accepted, in the end nothing.",
        (_lua("finish", "  add_reserved_bytes(model, priority, s[10], -1)\n", ""),),
        (MEMORY + "what_ends_gives_its_reservation_back",),
    ),
    Bug(
        "a sum that outlives its jobs",
        "What was reserved for jobs that the store has lost is never free again.",
        (_lua("reap", "if unfinished == 0 then", "if false then"),),
        (MEMORY + "a_sum_that_outlived_its_jobs_is_forgotten",),
    ),
    Bug(
        "the log of a lost worker kept for a day",
        "Every worker that ends leaves its log behind although no job needs it.",
        (_lua("prelude", "redis.call('EXISTS', heirs_key(worker)) == 1 and keep or LOG_GRACE_S", "keep"),),
        (REGRESSIONS + "a_lost_workers_log_lives_as_long_as_its_jobs",),
    ),
    Bug(
        "rows for nobody",
        "The log holds a copy of every row for each API process that has died.",
        (Edit("workers/worker.py", "        loops.append(self._listeners.keep_looking())\n", ""),),
        ("tests/workers/test_listeners.py::test_an_address_nobody_listens_at_is_dropped",),
    ),
    Bug(
        "a reader dropped for good",
        "A reader that was away when a worker looked hears nothing more until the end.",
        (
            Edit(
                "streaming/jobs/relay.py",
                "if record.state is JobState.RUNNING and not inbox.whole and self",
                "if False and self",
            ),
        ),
        ("tests/workers/test_listeners.py::test_a_reader_that_was_dropped_by_mistake_follows_again",),
    ),
    Bug(
        "a list of jobs that only grows",
        "Ids of forgotten jobs pile up in a list nobody reads.",
        (_lua("prelude", "    redis.call('EXPIRE', jobs_key(tenant), listing_keep_s)\n", ""),),
        (REGRESSIONS + "a_list_of_jobs_is_as_long_as_its_time",),
    ),
)

TOKENS = (
    Bug(
        "a frame that does not know its repetition",
        "An append whose answer was lost, sent again, stands in the log twice.",
        (_lua("append", "if number <= last then return 0 end", "if number <= last then number = last + 1 end"),),
        (PROTOCOL + "repeated_writes_change_nothing",),
    ),
    Bug(
        "a store that was set back goes unnoticed by writers",
        "New frames are written behind a hole in the log.",
        (_lua("append", "if number > last + 1 and not forced then return -1 end\n", ""),),
        (PROTOCOL + "frames_behind_lost_ones_are_refused_until_the_loss_is_made_good",),
    ),
    Bug(
        "a store that was set back goes unnoticed by readers",
        "Event ids of tokens that are gone stay valid: a resumed stream is spliced from two texts.",
        (Edit("streaming/jobs/reaper.py", "if tick <= seen:", "if tick < 0:"),),
        (PROTOCOL + "a_store_that_was_set_back_begins_a_new_epoch_once",),
    ),
    Bug(
        "a gap that is not seen",
        "Frames that pub/sub has lost are missing from the stream.",
        (
            Edit(
                "streaming/jobs/reorder_buffer.py",
                "elif row.seq == self.seq + 1 and not",
                "elif row.seq > self.seq and not",
            ),
        ),
        (RELAY + "an_inbox_puts_what_comes_in_order_and_takes_each_once",),
    ),
    Bug(
        "a spliced stream",
        "Where the store has lost what was shown, another text goes on in its place.",
        (
            Edit(
                "streaming/jobs/reorder_buffer.py",
                "self.rewound, self.flow = True, None",
                "self.rewound, self.flow = False, None",
            ),
        ),
        (RELAY + "a_run_that_contradicts_what_was_given_is_never_spliced_to_it",),
    ),
    Bug(
        "a run behind any other",
        "After a failover a second worker's text is put behind the first one's, whatever it goes on from.",
        (
            Edit(
                "streaming/jobs/reorder_buffer.py",
                "return opening.parent in self._parents if self.seq else opening.parent is None",
                "return True",
            ),
        ),
        (RELAY + "a_run_that_contradicts_what_was_given_is_never_spliced_to_it",),
    ),
    Bug(
        "an end by anybody",
        "A reader who saw one worker's text is given the end of another's as its own.",
        (Edit("streaming/jobs/reorder_buffer.py", "if not self._agrees(terminal):", "if False:"),),
        (RELAY + "an_end_that_does_not_begin_with_what_was_given_is_no_end_of_it",),
    ),
    Bug(
        "a reader who listens to a worker that has lost the job",
        "Deltas that the record does not know reset readers who had seen nothing wrong.",
        (
            Edit(
                "streaming/jobs/reorder_buffer.py",
                "if valid.issuperset(held.runs) and not valid & held.disputed:",
                "if False:",
            ),
        ),
        (RELAY + "a_run_that_contradicts_what_was_given_is_never_spliced_to_it",),
    ),
    Bug(
        "an end in pieces",
        "Of a long answer in one piece only the first deltas are taken from its record.",
        (
            Edit(
                "streaming/jobs/reorder_buffer.py",
                "rest = [row for row in terminal.rows if row.seq > self.seq]",
                "rest = [row for row in terminal.rows if row.seq > self.seq][:MAX_ROWS]",
            ),
        ),
        (RELAY + "the_end_hands_over_every_delta_at_once",),
    ),
    Bug(
        "a checkpoint that nobody is told of",
        "The log is trimmed to a copy of a long job's tokens, and readers still look for them before it.",
        (_lua("checkpoint", "redis.call('HSET', job_key(id), 'runs',", "tostring("),),
        (PROTOCOL + "a_checkpoint_counts_only_for_its_run_and_once_it_is_in_the_log",),
    ),
    Bug(
        "a checkpoint without the latest tokens",
        "What a step gave while the checkpoint waited to be written is trimmed with the steps before it.",
        (
            Edit(
                "workers/writer.py",
                "self._checkpoints.append(checkpoint)\n",
                "rows = checkpoint.rows()\n        checkpoint.rows = lambda: rows\n"
                "        self._checkpoints.append(checkpoint)\n",
            ),
        ),
        ("tests/workers/test_writer.py::test_a_checkpoint_holds_all_that_came_before_it_is_written",),
    ),
    Bug(
        "a log that one long job keeps",
        "As long as one job runs, every step of all its neighbours stays in the store.",
        (Edit("workers/heartbeat.py", "            self._checkpoint(partition)\n", ""),),
        (RUNS_TESTS + "a_long_job_does_not_keep_the_whole_log",),
    ),
    Bug(
        "a job with a hole in its log goes on",
        "What the store lost is missing from the result, or the job never ends.",
        (Edit("workers/claimer.py", "if history.whole else", "if history.rows else"),),
        (RUNS_TESTS + "a_job_whose_log_has_a_hole_begins_anew",),
    ),
    Bug(
        "JSON that goes on at its grammar's root",
        "After the loss of a worker a second JSON text begins inside the first one, and the job completes.",
        (
            Edit(
                "workers/claimer.py",
                "        reason = reason or restart_reason(claim.job, self._starter.card.capabilities, history.rows)\n",
                "",
            ),
        ),
        (ANSWER_CHECKS_TESTS + "json_that_another_worker_began_is_computed_from_its_first_token",),
    ),
    Bug(
        "a check that holds its job for ever",
        "A job whose answer waits to be checked can neither be cancelled nor run out of time.",
        (Edit("workers/worker.py", "elif not attempt.over or attempt.is_checked:", "elif not attempt.over:"),),
        (ANSWER_CHECKS_TESTS + "a_job_whose_answer_is_being_checked_ends_whatever_the_check_does",),
    ),
    Bug(
        "JSON that nobody looks at",
        "An engine drops a constraint in the middle of an answer, and the job completes with any text.",
        (
            Edit(
                "workers/worker.py",
                "            if attempt.constrained:\n                attempt.check",
                "            if False:\n                attempt.check",
            ),
        ),
        (ANSWER_CHECKS_TESTS + "an_answer_that_is_not_the_json_asked_for_fails",),
    ),
    Bug(
        "a grammar that is dropped after its first token",
        "llama.cpp generates text outside the schema, and its requester is not told before it ends.",
        (Edit("workers/engines/llamacpp/engine.py", "TRIAL_TOKENS = 3", "TRIAL_TOKENS = 1"),),
        (
            "tests/workers/engines/llamacpp/test_engine.py::test_a_schema_whose_grammar_is_dropped_after_its_first_token_is_refused",
        ),
    ),
    Bug(
        "two prompts out of one",
        "A request goes on from text alone, and llama.cpp answers prompt and past each by itself.",
        (
            Edit(
                "workers/engines/llamacpp/prompt.py",
                "parts[-1], generated = last + first, generated[1:]",
                "parts, generated = [*parts, first], generated[1:]",
            ),
        ),
        ("tests/workers/engines/llamacpp/test_engine.py::test_a_past_without_token_ids_is_continued_as_one_prompt",),
    ),
    Bug(
        "an engine that takes two runs for one",
        "The same worker is given a job that it still runs: the end of the old run ends the new one.",
        (Edit("workers/attempt.py", 'f"{self.job.id}/{self.number}/{index}"', 'f"{self.job.id}/{index}"'),),
        (RUNS_TESTS + "a_worker_that_is_given_a_job_it_still_runs_lets_the_old_run_go",),
    ),
    Bug(
        "a log of runs that the store has forgotten",
        "A reader is given what a void run of its job wrote, told so, begins again and is given it again, for ever.",
        (Edit("streaming/jobs/relay.py", "self._dispatch_rows(frame, runs)", "self._dispatch_rows(frame)"),),
        (EVENTS + "what_a_run_wrote_that_the_store_forgot_is_shown_to_nobody",),
    ),
    Bug(
        "a newer worker's job is told anew without end",
        "Each reader of a job that a newer worker runs has its epoch changed as fast as it can ask.",
        (Edit("api/events.py", "if terminal is not None and terminal.failure is NEWER:", "if False:"),),
        (EVENTS + "the_reader_of_a_newer_workers_job_is_told_once",),
    ),
    Bug(
        "one number for two runs",
        "A job that fails in its claim uses up no place but a number: another job of the worker gets it too.",
        (_lua("claim", "job_key(id), number + begun + 1\n", "job_key(id), number + begun + 1\n  begun = begun + 1\n"),),
        (REGRESSIONS + "a_run_has_a_number_of_its_own_whatever_fails_beside_it",),
    ),
    Bug(
        "a job of nobody that keeps its worker",
        "A worker that drains waits for ever for a job that the store has lost.",
        (_lua("prelude", "  buffer_write(buffered_releases, worker, id)\n  return false\n", "  return false\n"),),
        (REGRESSIONS + "a_worker_leaves_though_the_store_has_lost_its_job",),
    ),
    Bug(
        "an event's id twice",
        "The end of a job has the id of its last delta: who drops what it has seen never hears of the end.",
        (Edit("api/openai/cursor.py", "+ len(runs) + 2, str(runs[-1]))", "+ len(runs) + 1, str(runs[-1]))"),),
        ("tests/api/openai/test_cursor.py::test_ids_grow_and_each_leads_back_to_its_place",),
    ),
    Bug(
        "a reset within its epoch",
        "After a loss the ids that a reader has seen stand for other deltas.",
        (Edit("api/events.py", "if seen is None or (seen.run and seen.epoch == record.epoch):", "if seen is None:"),),
        (EVENTS + "a_store_that_lost_what_was_shown_resets_its_readers",),
    ),
    Bug(
        "a started that is told twice",
        "Who comes back to a running job hears again of the workers that it has heard of.",
        (Edit("api/events.py", "self._started = len(place.runs)", "self._started = 0"),),
        (EVENTS + "a_running_job_is_taken_up_behind_any_id",),
    ),
    Bug(
        "a running job resumed one too early",
        "A reader that comes back gets its last token again.",
        (Edit("streaming/jobs/reorder_buffer.py", "self.seq = after\n", "self.seq = max(after - 1, 0)\n"),),
        (RELAY + "a_late_follower_gets_everything_and_then_the_rest",),
    ),
    Bug(
        "a started with the id of its first delta",
        "Whoever comes back behind `started` misses the first token after it.",
        (
            Edit(
                "api/openai/cursor.py",
                "return Cursor(epoch, first + place, str(run))",
                "return Cursor(epoch, first + place + 1, str(run))",
            ),
        ),
        (WALK + "events_can_be_taken_up_behind_any_of_them",),
    ),
    Bug(
        "a finished job resumed one too early",
        "The same, read from the record.",
        (
            Edit(
                "streaming/jobs/reorder_buffer.py",
                "for row in terminal.rows if row.seq > self.seq]",
                "for row in terminal.rows if row.seq >= self.seq]",
            ),
        ),
        (WALK + "events_can_be_taken_up_behind_any_of_them",),
    ),
    Bug(
        "a log trimmed too early",
        "The last write of a drain deletes tokens of the jobs that were handed back.",
        (
            Edit(
                "workers/held_jobs.py",
                "in chain(self.handed_back, self.attempts.values()):",
                "in self.attempts.values():",
            ),
        ),
        (DRAIN_TESTS + "the_last_write_of_a_drain_keeps_what_is_handed_back",),
    ),
    Bug(
        "a step behind the end",
        "A worker that was given up goes on writing its steps, and renews its lease with them: nobody takes its jobs.",
        (Edit("workers/writer.py", "self._stopped = True", "self._stopped = False"),),
        (WRITER + "nothing_is_written_once_its_run_is_over",),
    ),
    Bug(
        "prompts counted by the last worker alone",
        "A choice that ended before its worker was lost is not run again, and its prompt counts nothing.",
        (
            Edit(
                "workers/attempt.py",
                "                self._prompts.setdefault(row.index, row.prompt)\n",
                "                pass\n",
            ),
        ),
        (
            ATTEMPT + "a_prompt_is_counted_once_whatever_ran_it",
            "tests/system/test_losses.py::test_a_prompt_whose_answer_had_ended_is_counted_after_its_worker_was_killed",
        ),
    ),
    Bug(
        "prompts that no log holds",
        "What the engine says of a prompt's size is known to its worker alone, and lost with it.",
        (Edit("workers/attempt.py", "piece.finish, piece.logprobs, prompt)", "piece.finish, piece.logprobs)"),),
        (ATTEMPT + "a_prompt_is_counted_once_whatever_ran_it",),
    ),
    Bug(
        "a log written anew without its prompts",
        "After a failover the rewritten log has lost how large the prompts were.",
        (Edit("streaming/jobs/codec.py", "    if delta.prompt is not None:\n", "    if not delta:\n"),),
        (ATTEMPT + "a_prompt_is_counted_once_whatever_ran_it",),
    ),
    Bug(
        "copies that pass for one's own",
        "After a failover, what earlier attempts said is logged as the last one's, and resets its readers.",
        (Edit("workers/attempt.py", "replace(row, stream=-self.number)", "row"),),
        (ATTEMPT + "the_record_holds_what_was_logged_before_and_what_was_given_out",),
    ),
    Bug(
        "a worker that forgets what was said",
        "It begins a lost job anew, and its readers see other tokens under the same numbers.",
        (Edit("workers/claimer.py", "await self._continuable(claim, history))", "NOTHING)"),),
        (RUNS_TESTS + "the_next_worker_numbers_on_where_the_log_ends",),
    ),
    Bug(
        "a task that dies with its connection",
        "A shared connection closed while it opens cancels all who wait for it: readers hear nothing any more.",
        (Edit("streaming/redis/connection.py", "await asyncio.wait({opening})", "await asyncio.shield(opening)"),),
        (LINE + "who_waits_while_it_is_closed_goes_on",),
    ),
    Bug(
        "a closed connection that is no lost one",
        "A request that is sent as the store dies is answered with 500 instead of 503.",
        (
            Edit(
                "streaming/redis/connection.py",
                "except RuntimeError as error:  # raised by uvloop",
                "except ZeroDivisionError as error:  # raised by uvloop",
            ),
        ),
        (LINE + "one_that_is_closed_without_a_word_counts_as_lost",),
    ),
    Bug(
        "a dead connection at hand",
        "After a failover a process takes up a connection whose end nobody will hear of: its users break or wait.",
        (
            Edit(
                "streaming/redis/connection.py",
                "if writer is None or writer.transport.is_closing():",
                "if writer is None:",
            ),
        ),
        (LINE + "one_that_was_lost_before_it_was_used_is_not_waited_for",),
    ),
    Bug(
        "one frame that cannot be read deafens all",
        "A worker's log is read to the bad frame and no further.",
        (
            Edit(
                "streaming/jobs/history.py",
                'cannot be read and is left out: %s", worker, error)\n        return None',
                'cannot be read and is left out: %s", worker, error)\n        raise',
            ),
        ),
        (MALFORMED + "a_frame_that_cannot_be_read_is_left_out",),
    ),
    Bug(
        "a newer worker's readers hang",
        "An API process leaves the frames of a newer worker out and says nothing to their readers.",
        (
            Edit(
                "streaming/jobs/relay.py",
                "                self._end_newer(worker, zip(inboxes, records, strict=True))\n",
                "                pass\n",
            ),
        ),
        (MALFORMED + "the_readers_of_a_newer_worker_are_told_so",),
    ),
    Bug(
        "one message ends the subscription",
        "A control message that a worker cannot read has it miss those that come next.",
        (
            Edit(
                "streaming/jobs/lease.py",
                '                    log.warning("a message to this worker is ignored: %s", error)\n',
                "                    raise\n",
            ),
        ),
        (MALFORMED + "a_message_that_cannot_be_read_ends_no_subscription",),
    ),
    Bug(
        "a reader who came too early",
        "A follow that arrives while the job's history is read is forgotten.",
        (
            Edit(
                "workers/worker.py",
                "                    self._claimer.note_follow(job_id, address)\n",
                "                    pass\n",
            ),
        ),
        (RUNS_TESTS + "a_reader_who_comes_while_the_history_is_read_is_heard",),
    ),
    Bug(
        "a task that broke for good",
        "One fault nobody expected, and the readers of a whole process wait without a word.",
        (Edit("runtime/loops.py", "            await asyncio.sleep(restart_delay_s)", "            return"),),
        (RELAY + "a_fault_nobody_expected_costs_no_reader",),
    ),
)

LOOKS = (
    Bug(
        "a list that reads bodies",
        "A page of jobs with long prompts is more than a process has memory for.",
        (
            _lua("recent", "'epoch', 'runs')", "'epoch', 'runs', 'body')"),
            Edit(
                "streaming/jobs/summaries.py",
                '*(b"metadata", b"epoch", b"runs"),',
                '*(b"metadata", b"epoch", b"runs", b"body"),',
            ),
        ),
        (LISTS + "a_list_reads_summaries",),
    ),
    Bug(
        "a list that looks without end",
        "Whoever asks for a state that few jobs are in has every job of theirs read, in one request.",
        (Edit("streaming/jobs/summaries.py", "MAX_ROUNDS = 4", "MAX_ROUNDS = 4_000"),),
        (LISTS + "a_status_that_no_job_has_is_looked_for_in_bounds",),
    ),
    Bug(
        "an end of a newer version that counts as malformed",
        "While a new version is rolled out lists say of its jobs that they failed.",
        (
            Edit(
                "streaming/jobs/records.py",
                "    except NewerMessage:\n        return Terminal(job_id, JobState.FAILED, 0, failure=NEWER)\n",
                "",
            ),
        ),
        (SUMMARIES + "a_list_says_what_a_look_says_of_an_end_that_cannot_be_read",),
    ),
    Bug(
        "a cursor whose id alone is looked up",
        "A cursor of an old time and the id of a new job has one script walk the whole list of a tenant.",
        (
            _lua(
                "recent",
                "local low, high = redis.call('ZCOUNT', jobs, '(' .. time, '+inf'), ",
                "local low, high = redis.call('ZREVRANK', jobs, id) or 0, ",
            ),
            _lua("recent", "  while low < high do", "  while false do"),
        ),
        (SUMMARIES + "a_made_up_cursor_reads_no_more_than_a_page",),
    ),
    Bug(
        "a list that shows what is not next",
        "Jobs of a partition that stopped looking are passed over: no page ever shows them.",
        (Edit("streaming/jobs/summaries.py", "if reached is None or job[0] >= reached]", "]"),),
        (SUMMARIES + "pages_hold_every_job_once_in_order",),
    ),
    Bug(
        "a look at the lane for every reader",
        "Each reader of a waiting job has a thousand entries read twice a second.",
        (Edit("streaming/jobs/reader.py", "look is None or look.began < asked - old_s or old_s == 0:", "True:"),),
        (LISTS + "readers_who_wait_share_one_look_at_their_lane",),
    ),
    Bug(
        "a body for every look at a silent reader",
        "Whoever waits has the whole prompt read again, twice a second.",
        (
            Edit(
                "api/events.py",
                "record = await services.job_reader.again(record)",
                "record = await services.job_reader.record(record.job.id)",
            ),
        ),
        (LISTS + "readers_who_wait_share_one_look_at_their_lane",),
    ),
    Bug(
        "a round trip for every lane",
        "With many models and partitions, a look at the lanes takes longer than a tick.",
        (
            Edit(
                "streaming/jobs/backlog.py",
                "        args: list[str | int] = [deadlines, *models]\n",
                "        args: list[str | int] = [deadlines, *models]\n        await self._client.now_ms()\n",
            ),
        ),
        ("tests/streaming/jobs/test_backlog.py::test_a_look_is_one_call_for_each_partition",),
    ),
    Bug(
        "a pass over the log for every job",
        "After the loss of a worker with hundreds of jobs, its log is read hundreds of times until the last goes on.",
        (
            Edit(
                "runtime/rounds.py",
                "waiting, self._waiting = self._waiting, []",
                "waiting, self._waiting = self._waiting[:1], self._waiting[1:]",
            ),
        ),
        (HISTORY + "one_pass_serves_all_jobs_of_a_claim",),
    ),
    Bug(
        "a log read in one piece",
        "While a long log is decoded, nothing else runs: every stream of the process stands still.",
        (Edit("streaming/jobs/history.py", "if rows >= ROWS_AT_ONCE:", "if rows < 0:"),),
        (HISTORY + "others_have_their_turn_while_a_log_is_read",),
    ),
    Bug(
        "a look that reads the log",
        "To show a running job, all that its worker wrote since is read.",
        (
            Edit(
                "api/jobs.py",
                "latest=latest_of(record),",
                "latest=latest_of(record) if await services.job_reader.history(record.job.id, record.runs) else None,",
            ),
        ),
        (LISTS + "a_running_jobs_log_is_not_read_to_show_it",),
    ),
)

CALLERS = (
    Bug(
        "any key opens the door",
        "Whoever sends some key is taken for somebody.",
        (
            Edit(
                "api/auth/keys.py",
                "caller = self._callers.get(self._digest(_sha256(token)))",
                "caller = next(iter(self._callers.values()))",
            ),
        ),
        (KEYS + "anything_else_is_refused",),
    ),
    Bug(
        "keys compared as they are configured",
        "The look-up goes by the configured hash itself, whose digits an attacker can aim at.",
        (Edit("api/auth/keys.py", 'return hmac.digest(self._pepper, sha256, "sha256")', "return sha256"),),
        (KEYS + "no_key_or_hash_is_kept_readable",),
    ),
    Bug(
        "a tenant of any name",
        "A tenant's name may hold what separates names in keys and messages.",
        (Edit("api/settings.py", '        check_tenant("tenant", self.tenant)\n', "        pass\n"),),
        (KEYS + "a_tenants_name_is_checked_wherever_it_is_set",),
    ),
    Bug(
        "a constraint that has no effect",
        "A field by which other servers constrain an answer is ignored, and the answer is taken for a constrained one.",
        (Edit("api/openai/schemas.py", "if name in CONSTRAINTS:", "if False:"),),
        ("tests/api/openai/test_schemas.py::test_constraints_of_other_servers_are_refused_with_what_to_use_instead",),
    ),
    Bug(
        "jobs of other tenants",
        "Who knows a job's id can read and cancel it.",
        (
            Edit("api/jobs.py", "if record.job.tenant == caller.tenant:", "if record.job.tenant:"),
            Edit("api/jobs.py", "job_reader.outline(job_id, caller.tenant)", "job_reader.outline(job_id)"),
        ),
        ("tests/api/admin/test_dead_letters.py::test_keys_say_who_may_come_in_how_high_and_who_may_administer",),
    ),
    Bug(
        "a joined job that is lost",
        "Whoever joined a job by its key waits for ever when the store has lost it.",
        (
            Edit(
                "api/admission.py",
                "    inbox.accepted = True\n    try:\n        await services",
                "    try:\n        await services",
            ),
        ),
        (ERRORS + "a_joined_job_that_is_lost_ends_its_reader",),
    ),
    Bug(
        "a poison message of a broker",
        "A message that makes its taker fail comes again and again, and nothing behind it is taken.",
        (Edit("offline/broker/intake.py", "if count > MAX_REDELIVERIES:", "if count < 0:"),),
        ("tests/offline/broker/test_events.py::test_a_message_that_makes_its_taker_fail_is_put_aside",),
    ),
    Bug(
        "a reader that leaves is not heard",
        "The engine goes on for a client that is gone.",
        (Edit("api/stream/reply.py", "await abandon_quietly(self._services, job_id)", "await asyncio.sleep(0)"),),
        ("tests/system/test_walk.py::test_leaving_a_stream_cancels_its_job_unless_it_asks_to_go_on",),
    ),
)

LINES = (
    Bug(
        "a batch without its fence",
        "A process that was overtaken goes on saying how far the batch is, and ends it.",
        (_lua("save", "s[1] ~= epoch or ", ""),),
        (BATCHES + "one_works_on_it_at_a_time",),
    ),
    Bug(
        "two that work on one batch",
        "Every message that says that there is work begins a turn, whoever has the batch.",
        (
            _lua("hold", "if s[8] and tonumber(s[8]) > now then return 'held' end\n", ""),
            _lua("due", "now + repeat_ms", "now"),
        ),
        (BATCHES + "one_works_on_it_at_a_time", BATCHES + "a_new_batch_is_due_once"),
    ),
    Bug(
        "a batch that is told of once",
        "A message that Celery loses is never sent again: the batch stands still for ever.",
        (
            _lua("due", "redis.call('ZADD', due_key(), now + repeat_ms, id)", "redis.call('ZREM', due_key(), id)"),
            _lua("hold", " or not redis.call('ZSCORE', due_key(), id)", ""),
        ),
        (BATCHES + "a_new_batch_is_due_once",),
    ),
    Bug(
        "a cancel that progress undoes",
        "A word about how far a batch is takes its owner's cancel back.",
        (_lua("save", "if s[2] == 'cancelling' and not FINAL[status] then status = 'cancelling' end\n", ""),),
        (BATCHES + "what_the_owner_wants_is_heard",),
    ),
    Bug(
        "a batch that sleeps through its owner's wish",
        "Resumed or cancelled just as it is laid aside, a paused batch is not looked at before its window ends.",
        (_lua("save", "  if resume_ms ~= '' and s[3] == '' then resume_ms = 0 end\n", ""),),
        (BATCHES + "a_wish_that_comes_as_a_paused_turn_ends_is_not_slept_through",),
    ),
    Bug(
        "a half-written row counts",
        "A process killed while it wrote leaves a line with an answer of something else.",
        (
            Edit(
                "streaming/batches/ledger.py", 'if zlib.crc32(packed).to_bytes(4, "little") != check:', "if not check:"
            ),
        ),
        (LEDGER + "a_spoilt_row_and_what_follows_do_not_count",),
    ),
    Bug(
        "the last answer is right",
        "A process that was overtaken changes answers that were given.",
        (Edit("streaming/batches/ledger.py", "if self.ends[row.line] is None:", "if row.outcome.ends:"),),
        (LEDGER + "the_first_turn_that_ended_a_line_is_right",),
    ),
    Bug(
        "equal prompts are equal requests",
        "A line gets the answer of one that asked for something else, or for another sample.",
        (Edit("api/openai/batch_lines.py", "(request.model, job_prompt, sampling)", "(request.model, job_prompt)"),),
        (SURVEY + "equal_lines_are_computed_once_if_their_answer_is_sure",),
    ),
    Bug(
        "the file of the first try",
        "A batch whose create is tried again with another file computes the first one.",
        (
            Edit(
                "streaming/batches/file_store.py",
                'return self.work(batch_id) / f"input.{_safe(file_id)}"',
                'return self.work(batch_id) / "input"',
            ),
        ),
        ("tests/api/test_batches.py::test_a_create_tried_again_with_another_file_computes_that_one",),
    ),
    Bug(
        "a line cancelled by the turn before",
        "A line whose job an overtaken turn has cancelled gets that as its answer.",
        (
            Edit(
                "offline/batch/lines.py",
                "        elif record.state is JobState.CANCELLED:\n",
                "        elif record.state is JobState.QUEUED:\n",
            ),
        ),
        ("tests/api/test_batches.py::test_a_line_whose_job_was_cancelled_is_computed",),
    ),
    Bug(
        "a refused create that keeps its file",
        "Every refused try to create a batch leaves a link to its input, so a deleted file takes room on the disk.",
        (
            Edit(
                "api/batches.py",
                "    except KeyReused:\n        await _discard_input(services, batch)\n",
                "    except KeyReused:\n",
            ),
        ),
        ("tests/api/test_batches.py::test_a_refused_create_leaves_no_link_to_its_file",),
    ),
    Bug(
        "a refused offer that takes the input away",
        "A refused try with the file of the batch that has not begun removes the input of that batch.",
        (
            Edit(
                "streaming/batches/file_store.py",
                'if file_id != used or (self.work(batch_id) / "input").exists():',
                "if file_id:",
            ),
        ),
        ("tests/api/test_batches.py::test_the_other_offers_go_when_a_batch_takes_its_input",),
    ),
    Bug(
        "one batch that cannot be read fails the list",
        "Its owner sees none of the others.",
        (
            Edit(
                "streaming/batches/store.py",
                "        return BatchRecord(batch=nothing, state=BatchState.FAILED",
                "        raise\n        return BatchRecord(batch=nothing, state=BatchState.FAILED",
            ),
        ),
        (MALFORMED + "a_batch_that_cannot_be_read_fails_and_is_shown",),
    ),
    Bug(
        "one webhook message ends the deliveries",
        "A message whose record cannot be read ends the process that would deliver the others.",
        (
            Edit(
                "streaming/events/webhooks.py",
                "                except (ValueError, TypeError, AttributeError) as error:\n",
                "                except LookupError as error:\n",
            ),
        ),
        (MALFORMED + "a_webhook_message_that_cannot_be_read_is_given_up",),
    ),
    Bug(
        "a custom_id twice",
        "Two lines of the output have the same name, and nobody knows which is which.",
        (Edit("offline/batch/survey.py", "return earlier if earlier != number else 0", "return 0"),),
        (SURVEY + "a_bad_line_is_named",),
    ),
)

STORE = (
    Bug(
        "tidy that removes what the store forgot",
        "A store restored to an earlier moment destroys the files that were uploaded since.",
        (
            Edit(
                "offline/batch/desk.py",
                "asyncio.to_thread(self._context.file_store.set_aside, part, name)",
                "asyncio.to_thread(self._context.file_store.remove, name)",
            ),
        ),
        (TIDY + "what_the_store_forgot_is_quarantined",),
    ),
    Bug(
        "a plain file that ends the emptying",
        "One file that somebody put into the quarantine, and nothing is ever removed from it again.",
        (
            Edit(
                "streaming/batches/file_store.py",
                "for part in day.iterdir() if part.is_dir() for",
                "for part in day.iterdir() for",
            ),
        ),
        (TIDY + "what_lies_in_the_quarantine_ends_no_emptying",),
    ),
    Bug(
        "a day that ends the emptying",
        "What cannot be removed on one day keeps what was set aside on all later ones.",
        (
            Edit(
                "streaming/batches/file_store.py",
                '            except OSError as error:\n                log.warning("what was quar',
                '            except LookupError as error:\n                log.warning("what was quar',
            ),
        ),
        (TIDY + "what_lies_in_the_quarantine_ends_no_emptying",),
    ),
    Bug(
        "a look at adoption that writes",
        "`penstock store adopt` without --yes gives an identity to whatever store its settings lead to.",
        (
            Edit(
                "cli/store.py",
                "await enter_store(wire) if yes else await read_identity(wire)",
                "await enter_store(wire)",
            ),
        ),
        ("tests/cli/test_store.py::test_adopt_without_yes_writes_nothing",),
    ),
    Bug(
        "tidy for another deployment",
        "Penstock pointed at another or an emptied Redis clears the folder of files.",
        (
            Edit(
                "offline/batch/desk.py",
                "        if not await self._store_matches():\n            return\n        while",
                "        while",
            ),
        ),
        (TIDY + "an_emptied_store_touches_nothing",),
    ),
    Bug(
        "a folder that any store takes",
        "Files of a deployment that nobody named are handed to the first store that comes.",
        (
            Edit(
                "streaming/batches/file_store.py",
                "if owner or not deployment or not self.is_empty:",
                "if owner or not deployment:",
            ),
        ),
        (TIDY + "a_folder_with_files_of_nobody_is_not_taken",),
    ),
    Bug(
        "an emptied store under its old name",
        "Nobody can tell that the store has forgotten everything.",
        (
            Edit(
                "streaming/store/identity.py",
                "new_deployment_id())\n    return _parsed",
                '"dep_0")\n    return _parsed',
            ),
        ),
        (IDENTITY + "an_emptied_store_has_another_deployment",),
    ),
    Bug(
        "an identity that each start writes",
        "Processes that start at once disagree on which deployment this is.",
        (_lua("identify", "if redis.call('EXISTS', store_key()) == 0 then", "do"),),
        (IDENTITY + "processes_that_start_at_once_agree",),
    ),
    Bug(
        "partitions that nobody compares",
        "Two processes spread jobs over different numbers of partitions; some are never claimed.",
        (
            Edit(
                "streaming/store/identity.py",
                "if identity.partitions != settings.partitions:",
                "if identity.partitions < 1:",
            ),
        ),
        (IDENTITY + "another_number_of_partitions_is_refused",),
    ),
    Bug(
        "an earlier version's store taken for an empty one",
        "Keys and messages of two versions are mixed.",
        (
            Edit(
                "streaming/store/identity.py",
                "if found is None and await _is_used(client):",
                "if found is None and not client:",
            ),
        ),
        (IDENTITY + "a_store_of_an_earlier_version_is_refused",),
    ),
    Bug(
        "a store that is checked once",
        "A server that evicts or has no append-only file is given jobs if it was not the first.",
        (
            Edit(
                "streaming/store/monitor.py",
                "if servers == self._servers and time.monotonic() - self._checked_at < CHECK_INTERVAL_S:",
                "if self._servers:",
            ),
        ),
        ("tests/streaming/store/test_monitor.py::test_settings_that_change_are_seen_a_little_later",),
    ),
    Bug(
        "a promoted replica taken for the primary before it",
        "Nobody looks at the settings of the server that Sentinel has named.",
        (
            Edit(
                "streaming/store/monitor.py",
                "if servers == self._servers and time.monotonic()",
                "if self._servers and time.monotonic()",
            ),
        ),
        ("tests/streaming/redis/test_sentinel.py::test_a_promoted_replica_is_checked",),
    ),
    Bug(
        "processes known by their names",
        "Two machines run the documented commands, and each hides the other's worker.",
        (Edit("streaming/fleet/processes.py", "{process.role}:{process.life}", "{process.role}:{process.id}"),),
        ("tests/streaming/fleet/test_presence.py::test_machines_may_use_the_same_name",),
    ),
)

POOLS = (
    Bug(
        "a plan without its fence",
        "A scheduler that was suspended goes on as the leader when it wakes up, over another's decisions.",
        (
            _lua(
                "plan",
                "if redis.call('GET', leader_key()) ~= ARGV[1] or redis.call('GET', leader_epoch_key()) ~= ARGV[2]"
                " then return 0 end\n",
                "",
            ),
        ),
        (PLANS + "a_plan_is_taken_from_the_leader_only",),
    ),
    Bug(
        "a pool that follows anybody",
        "Workers are started and stopped for a plan that another leader has overturned.",
        (_lua("act", "if redis.call('GET', leader_epoch_key()) ~= ARGV[1] then return 0 end\n", ""),),
        (PLANS + "a_pool_acts_only_under_the_current_epoch",),
    ),
    Bug(
        "an epoch that stays",
        "The next leader has the epoch of the last one: nobody can tell their acts apart.",
        (_lua("lead", "math.max(epoch + 1, math.floor(now_ms() / 1000))", "math.max(epoch, 1)"),),
        (PLANS + "one_leads_and_keeps_leading",),
    ),
    Bug(
        "a scale without its version",
        "A suspended leader sets the number of pods over its successor's.",
        (Edit("scheduler/pools/kubernetes.py", "resourceVersion=version),", "),"),),
        (PODS + "a_leader_stopped_after_its_stamp_is_refused",),
    ),
    Bug(
        "pods that go undrained",
        "The scale is lowered at once, and running work is cut off when the grace period is over.",
        (Edit("scheduler/pools/leaving.py", "want + len(chosen) - len(drained)", "want"),),
        (PODS + "a_pod_is_drained_before_it_goes",),
    ),
    Bug(
        "one Deployment for two pools",
        "Two models whose names differ only in a dot or a capital scale the same pods against each other.",
        (Edit("scheduler/settings.py", "            if other != pool:\n", "            if not other:\n"),),
        ("tests/scheduler/test_process.py::test_two_pools_of_one_deployment_are_refused",),
    ),
    Bug(
        "every machine starts them all",
        "Two machines that follow one plan run twice the workers that are wanted.",
        (
            Edit(
                "cli/pool.py",
                "size = await plans.share(plan.epoch, pool, by, len(members), total)",
                "size = total if len(members) < 99 else None",
            ),
        ),
        ("tests/cli/test_pool.py::test_two_machines_share_what_is_wanted",),
    ),
    Bug(
        "one entry ends the scheduler",
        "A process, plan or card that cannot be read ends whoever looks at the fleet.",
        (
            Edit(
                "streaming/fleet/entries.py",
                'is left out: %s", name, kind.__name__, error)\n        return None',
                'is left out: %s", name, kind.__name__, error)\n        raise',
            ),
        ),
        (MALFORMED + "an_entry_of_the_fleet_that_cannot_be_read_is_left_out",),
    ),
    Bug(
        "an unreadable override is none",
        "The scheduler decides over the head of somebody whose word it cannot read.",
        (
            Edit(
                "streaming/fleet/overrides.py", ' or Override(by="unreadable")', ' or Override(want=1, by="unreadable")'
            ),
        ),
        (MALFORMED + "an_override_that_cannot_be_read_is_a_pause",),
    ),
    Bug(
        "loading holds up the loop",
        "While TensorRT-LLM loads, its worker does not say that it is there.",
        (
            Edit(
                "workers/engines/trtllm/engine.py",
                "library = await asyncio.to_thread(load_library)",
                "library = load_library()",
            ),
        ),
        ("tests/workers/engines/trtllm/test_engine.py::test_the_event_loop_goes_on_while_it_loads",),
    ),
    Bug(
        "a sleeper nobody wakes at once",
        "The first request at zero workers waits for the next tick.",
        (_lua("put", "wake_scheduler(model)", "has_consumer(lane)"),),
        (PLANS + "a_put_nobody_is_there_for_wakes_the_scheduler",),
    ),
)

BUGS = (
    *FENCING,
    *ENDS,
    *QUEUE,
    *TOKENS,
    *LOOKS,
    *CALLERS,
    *LINES,
    *STORE,
    *POOLS,
    *LONG_RESULTS,
    *READERS,
    *WORK,
    *DOORS,
    *CONNECTIONS,
    *SECURITY,
    *STORE_ACCESS,
    *tenants.BUGS,
    *UNREADABLE,
    *ROOM_BUGS,
    *SURVIVORS,
    *MEASUREMENTS,
)
