"""Planted bugs of the queue: how jobs are put, claimed, tried again and given up."""

from __future__ import annotations

from bench.planted.bug import Edit, bug, lua

PROTOCOL = "tests/streaming/jobs/test_protocol.py::test_"
REGRESSIONS = "tests/streaming/test_regressions.py::test_"
CLAIMER_TESTS = "tests/workers/test_claimer.py::test_"
DRAIN_TESTS = "tests/workers/test_drain.py::test_"
START_TESTS = "tests/workers/test_start.py::test_"
MEMORY = "tests/streaming/store/test_memory.py::test_"
IDEMPOTENCY = "tests/streaming/jobs/test_idempotency.py::test_"
RETRIES = "tests/api/test_idempotency.py::test_"
MALFORMED = "tests/streaming/test_malformed.py::test_"
ERRORS = "tests/api/openai/test_errors.py::test_"

QUEUE = (
    bug(
        "a put that does not know its repetition",
        "A put whose answer was lost, sent again, makes a second entry: the job runs twice.",
        lua("put", "if created then return {'queued', math.floor(parse_number(created) or now), {}, epoch} end\n", ""),
        REGRESSIONS + "a_put_that_is_repeated_late_runs_nothing_again",
    ),
    bug(
        "a lane trimmed by length",
        "The bound of a lane deletes accepted work instead of refusing more.",
        lua("put", "redis.call('XADD', lane, '*',", "redis.call('XADD', lane, 'MAXLEN', limit, '*',"),
        PROTOCOL + "a_full_lane_refuses_and_keeps_what_it_has",
    ),
    bug(
        "a lane that one tenant fills",
        "The first job of every other tenant is refused.",
        lua("put", "math.ceil(limit / 10)", "0"),
        PROTOCOL + "a_lane_that_one_tenant_fills_takes_a_job_of_each_other_one",
    ),
    bug(
        "an unbounded lane",
        "Admission never ends, and the store fills up.",
        lua("put", "if waiting >= limit and (own > 0 or", "if false and (own > 0 or"),
        PROTOCOL + "a_full_lane_refuses_and_keeps_what_it_has",
    ),
    bug(
        "an idempotency key of all conversations",
        "A turn of another conversation with the same key is refused, where its job is in the same partition.",
        Edit("streaming/ids.py", "(tenant, key, conversation) if conversation", "(tenant, key) if conversation"),
        "tests/streaming/jobs/test_conversations.py::test_an_idempotency_key_counts_within_its_conversation",
    ),
    bug(
        "an idempotency key of everybody",
        "Two tenants with the same key share one job and read each other's answer.",
        Edit("streaming/ids.py", "if conversation else (tenant, key)", 'if conversation else ("", key)'),
        lua("malformed", "s[1] ~= tenant or ", ""),
        PROTOCOL + "an_idempotency_key_leads_to_one_job",
    ),
    bug(
        "names joined by a separator",
        "Tenant a with key b:K is tenant a:b with key K.",
        Edit("streaming/ids.py", '"".join(f"{len(name)}:{name}" for name in names)', '":".join(names)'),
        IDEMPOTENCY + "no_key_leads_to_another_tenants_job",
        IDEMPOTENCY + "joined_names_can_be_told_apart",
    ),
    bug(
        "a join that does not look whose job it is",
        "A stored key that leads to another tenant's job delivers its answer.",
        lua("malformed", "s[1] ~= tenant or ", ""),
        IDEMPOTENCY + "a_stored_key_of_another_tenants_job_delivers_nothing",
    ),
    bug(
        "an idempotency key that expires before its job",
        "A retry of a request that waits longer than results are kept makes a second job.",
        lua("put", "id .. ':' .. digest)\n", "id .. ':' .. digest, 'EX', keep)\n"),
        IDEMPOTENCY + "a_key_leads_to_its_job_for_as_long_as_that_waits_and_runs",
    ),
    bug(
        "an idempotency key that outlives its finished job",
        "The store keeps the key of every job that was ever completed.",
        lua("finish", "  if is_idem_key(s[9]) then redis.call('EXPIRE', s[9], retention_s(s[7])) end\n", ""),
        IDEMPOTENCY + "a_key_leads_to_its_job_for_as_long_as_that_waits_and_runs",
    ),
    bug(
        "an idempotency key that outlives its cancelled job",
        "The same, of jobs that no worker ends.",
        lua("endings", "  if is_idem_key(s[7]) then redis.call('EXPIRE', s[7], retention_s(s[5])) end\n", ""),
        IDEMPOTENCY + "whatever_ends_a_job_bounds_the_life_of_its_key",
    ),
    bug(
        "an idempotency key of a job that is gone",
        "It answers every retry with the id of a job that nobody can read.",
        lua(
            "malformed",
            "  if not s.err and not s[1] then return nil end\n",
            "  if not s.err then s[1], s[2], s[3] = s[1] or tenant, s[2] or 'queued', s[3] or '0' end\n",
        ),
        IDEMPOTENCY + "a_key_whose_job_is_gone_is_free",
    ),
    bug(
        "a lost connection that keeps its key",
        "The next try of a client that lost its connection is told that the job was cancelled.",
        lua("cancel", "    free_idempotency_key(s[5], id)\n", ""),
        IDEMPOTENCY + "a_job_that_lost_its_client_leaves_its_key_free",
        RETRIES + "a_request_that_lost_its_connection_is_computed_when_it_comes_again",
    ),
    bug(
        "a lost connection that ends what others wait for",
        "One client's leaving cancels the job that another one follows under the same key, or was told of with a 202.",
        lua("cancel", "  if #others > 0 or s[4] == '1' then return 'kept' end\n", ""),
        IDEMPOTENCY + "a_lost_client_ends_no_job_that_others_wait_for",
        IDEMPOTENCY + "a_lost_client_ends_no_job_whose_id_was_answered",
    ),
    bug(
        "a join that comes too late",
        "A request that finds its job cancelled for want of a client waits for that job and is told of the cancel.",
        lua("follow", "if s[4] and ARGV[3] == '1' then return 'abandoned' end\n", ""),
        IDEMPOTENCY + "whoever_joins_too_late_is_told",
    ),
    bug(
        "a 202 that needs a second look",
        "The store goes between a put and the answer, and an accepted job is denied.",
        Edit(
            "api/jobs.py",
            "    view = _accepted_view(services, admitted)\n",
            "    view = await view_of(services, await services.job_reader.record(accepted.id))\n",
        ),
        RETRIES + "a_job_is_accepted_by_its_put_alone",
    ),
    bug(
        "an idempotency key for any body",
        "Another request under the same key gets the first one's answer.",
        lua("malformed", " or string.sub(known, 38) ~= digest)", ")"),
        PROTOCOL + "an_idempotency_key_leads_to_one_job",
    ),
    bug(
        "leaving with work in hand",
        "A worker that drains deletes its consumer and is gone: what it held is never run.",
        lua(
            "leave",
            "local held = redis.call('SCARD', claims_key(worker))\nif held > 0 then return held end\n",
            "for _, lane in ipairs(model_streams(redis.call('HGET', worker_key(worker), 'model'))) do\n"
            "  redis.pcall('XGROUP', 'DELCONSUMER', lane, GROUP, worker)\nend\n",
        ),
        PROTOCOL + "a_released_job_is_not_counted_as_a_loss",
    ),
    bug(
        "a consumer deleted with pending work",
        "What was delivered to it can be found by nobody.",
        lua("consumers", "if not pending.err and #pending == 0 then", "if not pending.err then"),
        REGRESSIONS + "a_consumer_with_pending_entries_is_never_deleted",
    ),
    bug(
        "put back beside the old entry",
        "Entries and consumers of dead workers stay for ever.",
        lua("endings", "  ack_and_delete(s[1], s[2])\n  if kind == 'lane' and s[5]", "  if kind == 'lane' and s[5]"),
        REGRESSIONS + "a_lost_worker_leaves_no_entry_behind",
    ),
    bug(
        "one record stops every claim",
        "No worker of the model gets a job any more because one that waits cannot be read.",
        lua(
            "claims",
            "local ran, result = pcall(step, c, lane, entry, id, job)",
            "local ran, result = true, step(c, lane, entry, id, job)",
        ),
        MALFORMED + "a_claim_gives_the_other_jobs",
    ),
    bug(
        "a newer job fails",
        "During an upgrade the old workers fail the jobs of the new API processes.",
        Edit("streaming/jobs/lease.py", "str(error), newer=True)", "str(error))"),
        CLAIMER_TESTS + "a_job_of_a_newer_version_waits_for_a_newer_worker",
    ),
    bug(
        "a newer job spins",
        "An old worker claims a newer job and puts it back, over and over.",
        Edit(
            "workers/claimer.py",
            "            self._newer_until[partition] = time.monotonic() + self._pause_s\n",
            "            self._look.set()\n",
        ),
        CLAIMER_TESTS + "a_job_of_a_newer_version_waits_for_a_newer_worker",
    ),
    bug(
        "a model loaded for nothing",
        "A store that is away for a moment while a worker registers ends the worker.",
        Edit(
            "workers/worker.py",
            "return await retry_until(stop, register, expected, REGISTER_RETRY_DELAY_S)",
            "await register()\n        return True",
        ),
        START_TESTS + "a_store_that_is_away_at_the_start_is_waited_for",
    ),
    bug(
        "weights errors as a traceback",
        "Nobody is told why the model cannot be had, and what to do.",
        Edit("workers/__main__.py", "needed_to_start(EngineDead, exit_code=2)", "needed_to_start(exit_code=2)"),
        START_TESTS + "weights_that_cannot_be_had_are_told_and_the_fix",
    ),
    bug(
        "one partition's loss is everybody's",
        "A worker that is fenced in one partition abandons its jobs in all others.",
        Edit(
            "workers/worker.py",
            "            self.lose(partition)\n            await asyncio",
            "            raise\n            await asyncio",
        ),
        DRAIN_TESTS + "a_lease_lost_in_one_partition_abandons_no_job_of_another",
    ),
    bug(
        "losses that are not counted",
        "A request that kills its engine kills one worker after another, for ever.",
        lua("reap", "redis.call('HINCRBY', job_key(id), 'losses', 1)", "0"),
        PROTOCOL + "a_job_given_up_after_too_many_lost_workers_is_a_dead_letter",
    ),
    bug(
        "a full store fences its workers",
        "Leases cannot be renewed while the store is full; innocent jobs are put back again and again, and given up.",
        lua("beat", "#!lua flags=allow-oom\n", ""),
        MEMORY + "a_store_that_refuses_writes_costs_no_job_an_attempt",
    ),
    bug(
        "a full store takes no worker",
        "Workers that start while the store is full cannot register: nothing drains it.",
        lua("register", "#!lua flags=allow-oom\n", ""),
        MEMORY + "what_drains_a_full_store_runs",
    ),
    bug(
        "a spared lease that looks renewed",
        "A worker whose lease was spared and renewed in one millisecond is fenced when the store is away again.",
        lua("reap", "local till = now + lease - 0.5", "local till = now + lease"),
        REGRESSIONS + "a_spared_lease_that_was_renewed_at_once_may_be_spared_again",
    ),
    bug(
        "a room that many promise",
        "Each API process reserves the same memory: together they accept more than the store can hold.",
        lua("put", "if total_reserved_bytes() + reserved > max_reserved then", "if reserved > max_reserved then"),
        MEMORY + "what_is_accepted_leaves_room_for_its_output",
    ),
    bug(
        "a put that brings nothing and keeps its reservation",
        "One client that repeats a request under its idempotency key has everybody refused: the store seems full.",
        Edit(
            "streaming/jobs/queue.py",
            "            if not _brought_work(answer):\n                reserved.give_back()",
            "            pass",
        ),
        MEMORY + "what_brings_nothing_into_the_store_takes_no_room",
    ),
    bug(
        "a full store that refuses whoever comes back",
        "A retry that would only fetch the answer of an accepted job is told that nothing more is accepted.",
        Edit("streaming/jobs/queue.py", "found = await self._join(job, key, digest) if key else None", "found = None"),
        MEMORY + "a_full_store_answers_a_key_whose_job_it_has",
    ),
    bug(
        "a malformed job that still owes",
        "The room of a job that failed as malformed is never given back, and each such job has less accepted.",
        lua("malformed", "  if model then add_reserved_bytes(model, priority, s[10], -1) end\n", ""),
        MALFORMED + "a_malformed_job_leaves_nothing_behind",
    ),
    bug(
        "a malformed job that keeps its idempotency key",
        "The key has no expiry and leads to a failed job for ever.",
        lua("malformed", "  free_idempotency_key(s[9], id)\n", ""),
        MALFORMED + "a_malformed_job_leaves_nothing_behind",
    ),
    bug(
        "an idempotency key of a job that cannot be read",
        "Every retry with the key breaks on the record it leads to, and is answered with 500.",
        lua("malformed", "  if s.err or not STATES[s[2]] or not tonumber(s[3]) or not created or", "  if"),
        MALFORMED + "a_key_that_leads_to_what_cannot_be_read_is_free",
    ),
    bug(
        "messages joined by a separator",
        "A broker message is counted with another one's redeliveries and rejected for them.",
        Edit("streaming/events/redeliveries.py", "joined(queue, message_id)", 'f"{queue}\\0{message_id}"'),
        "tests/streaming/events/test_redeliveries.py::test_each_message_of_each_queue_is_counted_by_itself",
    ),
    bug(
        "a schema that is tried again and again",
        "One tenant's schema that takes all the time of a check holds up the checks of every tenant.",
        Edit("workers/checker.py", "            if self._exhausting.has(schema):", "            if False:"),
        "tests/workers/test_checker.py::test_a_schema_whose_check_was_ended_is_not_tried_again",
    ),
    bug(
        "a child that has the worker's secrets",
        "A fault of the validator of strangers' schemas gives the password of Redis away.",
        Edit("workers/checker.py", "stdout=PIPE, env=environ, cwd", "stdout=PIPE, cwd"),
        "tests/workers/test_checker.py::test_the_child_is_given_no_secrets",
    ),
    bug(
        "a refusal that tells clients to reset the store",
        "Whoever sends a request while the store is unfit reads the operator's command that deletes everything.",
        Edit("api/services.py", "        return self.store.refusal\n", "        return self.store.reason\n"),
        ERRORS + "a_client_is_told_no_command_of_the_operators",
    ),
    bug(
        "a reservation that is never given back",
        "With every finished job less is accepted, in the end nothing.",
        lua("finish", "  add_reserved_bytes(model, priority, s[10], -1)\n", ""),
        MEMORY + "what_ends_gives_its_reservation_back",
    ),
    bug(
        "a sum that outlives its jobs",
        "What was reserved for jobs that the store has lost is never free again.",
        lua("reap", "if unfinished == 0 then", "if false then"),
        MEMORY + "a_sum_that_outlived_its_jobs_is_forgotten",
    ),
    bug(
        "the log of a lost worker kept for a day",
        "Every worker that ends leaves its log behind although no job needs it.",
        lua("logs", "redis.call('EXISTS', heirs_key(worker)) == 1 and keep or LOG_GRACE_S", "keep"),
        REGRESSIONS + "a_lost_workers_log_lives_as_long_as_its_jobs",
    ),
    bug(
        "rows for nobody",
        "The log holds a copy of every row for each API process that has died.",
        Edit("workers/worker.py", "self._listeners.keep_looking(), ", ""),
        "tests/workers/test_listeners.py::test_an_address_nobody_listens_at_is_dropped",
    ),
    bug(
        "a reader dropped for good",
        "A reader that was away when a worker looked hears nothing more until the end.",
        Edit(
            "streaming/jobs/relay.py",
            "if record.state is JobState.RUNNING and not buffer.whole and self",
            "if False and self",
        ),
        "tests/workers/test_listeners.py::test_a_reader_that_was_dropped_by_mistake_follows_again",
    ),
    bug(
        "a list of jobs that only grows",
        "Ids of forgotten jobs pile up in a list nobody reads.",
        lua("writes", "    redis.call('EXPIRE', jobs_key(tenant), listing_keep_s)\n", ""),
        REGRESSIONS + "a_list_of_jobs_is_as_long_as_its_time",
    ),
)
