"""The table of planted bugs: mistakes that every queue of this kind has made, one at a time.

Each test is chosen to show its bug in seconds; the whole suite has slower ones that would show it too.
"""

from __future__ import annotations

from bench.planted.bug import Bug, Edit

LUA = "streaming/lua/"
PROTOCOL = "tests/test_streaming_protocol.py::test_"
REGRESSIONS = "tests/test_streaming_regressions.py::test_"
RELAY = "tests/test_streaming_relay.py::test_"
WORKER = "tests/test_workers_worker.py::test_"
WRITER = "tests/test_workers_writer.py::test_"
ATTEMPT = "tests/test_workers_attempt.py::test_"
WALK = "tests/test_walk.py::test_"
RENDER = "tests/test_api_render.py::test_"
KEYS = "tests/test_api_keys.py::test_"
BATCHES = "tests/test_streaming_batches.py::test_"
LEDGER = "tests/test_streaming_ledger.py::test_"
PLANS = "tests/test_streaming_plans.py::test_"
PODS = "tests/test_scheduler_kubernetes.py::test_"
LINE = "tests/test_streaming_line.py::test_"
SURVEY = "tests/test_offline_survey.py::test_"


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
        (_lua("finish", " or s[2] ~= worker", ""),),
        (REGRESSIONS + "a_job_is_ended_by_its_holder_in_its_attempt_only",),
    ),
    Bug(
        "finish without its attempt",
        "The end of an earlier attempt counts for a later one.",
        (_lua("finish", " or s[3] ~= attempt", ""),),
        (REGRESSIONS + "a_job_is_ended_by_its_holder_in_its_attempt_only",),
    ),
    Bug(
        "release without its attempt",
        "A hand-back that arrives late takes the job from the worker that has claimed it again and runs it.",
        (_lua("release", " or s[3] ~= attempt", ""),),
        (REGRESSIONS + "a_release_that_arrives_late_leaves_the_next_attempt_alone",),
    ),
    Bug(
        "a lease by a client's clock",
        "A process whose clock is fast fences every worker; one whose clock is slow never finds a dead one.",
        (
            Edit("streaming/reaper.py", "LOG_KEEP_S, settings.lease_ms)", "LOG_KEEP_S, settings.lease_ms, _now_ms())"),
            Edit(
                "streaming/reaper.py",
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
                "if s[1] ~= 'in_progress' or s[2]",
                "drop_entry(s[4], s[5])\nif s[1] ~= 'in_progress' or s[2]",
            ),
        ),
        (REGRESSIONS + "a_finish_behind_the_hand_back_leaves_the_job_in_the_queue",),
    ),
    Bug(
        "ended but not acknowledged",
        "Entries of jobs that have ended fill their lane.",
        (_lua("finish", "drop_entry(s[4], s[5])\n", ""),),
        (PROTOCOL + "a_job_is_put_claimed_logged_and_finished",),
    ),
    Bug(
        "a finish reason before the end",
        "A reader takes an answer for complete that is not stored yet.",
        (
            Edit(
                "api/render.py",
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
        (Edit("streaming/inbox.py", "if self.seq < terminal.seq:", "if self.seq < 0:"),),
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
        (_lua("cancel", "  redis.call('HSET', job_key(id), 'cancel', 1)\n  tell_worker(s[2], {'c', id})\n", ""),),
        (PROTOCOL + "cancel_ends_a_waiting_job_and_marks_a_running_one",),
    ),
    Bug(
        "an expired job is run",
        "Work that nobody waits for any more costs engine steps.",
        (_lua("claim", " or past(s[3], now) then", " then"),),
        (REGRESSIONS + "a_job_whose_time_is_over_is_not_claimed",),
    ),
)

QUEUE = (
    Bug(
        "a put that does not know its repetition",
        "A put whose answer was lost, sent again, makes a second entry: the job runs twice.",
        (_lua("put", "if redis.call('EXISTS', job) == 1 then return {'queued', now, 0} end\n", ""),),
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
            _lua("put", "redis.call('GET', idem_key(tenant, idem))", "redis.call('GET', idem_key('', idem))"),
            _lua("put", "redis.call('SET', idem_key(tenant, idem),", "redis.call('SET', idem_key('', idem),"),
        ),
        (PROTOCOL + "an_idempotency_key_leads_to_one_job",),
    ),
    Bug(
        "an idempotency key for any body",
        "Another request under the same key gets the first one's answer.",
        (_lua("put", "    if string.sub(known, 38) ~= digest then return {'reused'} end\n", ""),),
        (PROTOCOL + "an_idempotency_key_leads_to_one_job",),
    ),
    Bug(
        "leaving with work in hand",
        "A worker that drains deletes its consumer and is gone: what it held is never run.",
        (
            _lua(
                "leave",
                "local held = redis.call('SCARD', claims_key(worker))\nif held > 0 then return held end\n",
                "for _, lane in ipairs(lanes_of(redis.call('HGET', worker_key(worker), 'model'))) do\n"
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
                "  drop_entry(s[1], s[2])\n  if s[3] then gather(let_go, s[3], id) end\n",
                "  if s[3] then gather(let_go, s[3], id) end\n",
            ),
        ),
        (REGRESSIONS + "a_lost_worker_leaves_no_entry_behind",),
    ),
    Bug(
        "losses that are not counted",
        "A request that kills its engine kills one worker after another, for ever.",
        (_lua("reap", "redis.call('HINCRBY', job_key(id), 'losses', 1)", "0"),),
        (PROTOCOL + "a_job_given_up_after_too_many_lost_workers_is_a_dead_letter",),
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
        (Edit("streaming/reaper.py", "if tick <= seen:", "if tick < 0:"),),
        (PROTOCOL + "a_store_that_was_set_back_begins_a_new_epoch_once",),
    ),
    Bug(
        "a gap that is not seen",
        "Frames that pub/sub has lost are missing from the stream.",
        (Edit("streaming/inbox.py", "if row.seq == self.seq + 1 and len", "if row.seq > self.seq and len"),),
        (RELAY + "an_inbox_puts_what_comes_in_order_and_takes_each_once",),
    ),
    Bug(
        "a spliced stream",
        "Where the store has lost what was shown, another text goes on in its place.",
        (Edit("streaming/inbox.py", "self.rewound, self.flow = True, None", "self.rewound, self.flow = False, None"),),
        (RELAY + "other_deltas_in_the_place_of_given_ones_stop_the_stream",),
    ),
    Bug(
        "a running job resumed one too early",
        "A reader that comes back gets its last token again.",
        (Edit("streaming/inbox.py", "self.seq = after\n", "self.seq = max(after - 1, 0)\n"),),
        (RELAY + "a_late_follower_gets_everything_and_then_the_rest",),
    ),
    Bug(
        "an event's id ahead of its reader",
        "Whoever comes back behind `started` of a job that was further by then misses the tokens before.",
        (
            Edit(
                "api/render.py",
                'return Event("started", event_id(view.epoch, after), data)',
                'return Event("started", event_id(view.epoch, view.seq), data)',
            ),
        ),
        (WALK + "events_can_be_taken_up_behind_any_of_them",),
    ),
    Bug(
        "a finished job resumed one too early",
        "The same, read from the record.",
        (
            Edit(
                "streaming/journal.py",
                "for row in record.terminal.rows if row.seq > after]",
                "for row in record.terminal.rows if row.seq >= after]",
            ),
        ),
        (PROTOCOL + "a_job_is_put_claimed_logged_and_finished",),
    ),
    Bug(
        "a log trimmed too early",
        "The last write of a drain deletes tokens of the jobs that were handed back.",
        (
            Edit(
                "workers/worker.py",
                "in chain(self._handed_back, self._attempts.values()):",
                "in self._attempts.values():",
            ),
        ),
        (WORKER + "the_last_write_of_a_drain_keeps_what_is_handed_back",),
    ),
    Bug(
        "a step behind the end",
        "A worker that was given up goes on writing its steps, and renews its lease with them: nobody takes its jobs.",
        (Edit("workers/writer.py", "self._over = True", "self._over = False"),),
        (WRITER + "nothing_is_written_once_its_run_is_over",),
    ),
    Bug(
        "a record that counts what no log holds",
        "After a store lost a delta, the job's record cannot be read by anybody.",
        (Edit("workers/attempt.py", "return self.seq - self._lost", "return self.seq"),),
        (ATTEMPT + "the_record_holds_what_was_logged_before_and_what_was_given_out",),
    ),
    Bug(
        "a log written anew under earlier numbers",
        "After a failover, what earlier attempts said belongs to nobody, and readers miss it.",
        (Edit("workers/attempt.py", "encode(replace(row, stream=stream)) for row", "encode(row) for row"),),
        (ATTEMPT + "the_record_holds_what_was_logged_before_and_what_was_given_out",),
    ),
    Bug(
        "a worker that forgets what was said",
        "It begins a lost job anew, and its readers see other tokens under the same numbers.",
        (Edit("workers/claimer.py", "if claim.past else ()", "if not claim.past else ()"),),
        (WORKER + "the_next_worker_numbers_on_where_the_log_ends",),
    ),
    Bug(
        "a task that dies with its connection",
        "A shared connection closed while it opens cancels all who wait for it: readers hear nothing any more.",
        (Edit("streaming/line.py", "await asyncio.wait({opening})", "await asyncio.shield(opening)"),),
        (LINE + "who_waits_while_it_is_closed_goes_on",),
    ),
    Bug(
        "a dead connection at hand",
        "After a failover a process takes up a connection whose end nobody will hear of: its users break or wait.",
        (Edit("streaming/line.py", "if writer is None or writer.transport.is_closing():", "if writer is None:"),),
        (LINE + "one_that_was_lost_before_it_was_used_is_not_waited_for",),
    ),
    Bug(
        "a task that broke for good",
        "One fault nobody expected, and the readers of a whole process wait without a word.",
        (Edit("streaming/background.py", "            await asyncio.sleep(pause_s)", "            return"),),
        (RELAY + "a_fault_nobody_expected_costs_no_reader",),
    ),
)

CALLERS = (
    Bug(
        "any key opens the door",
        "Whoever sends some key is taken for somebody.",
        (
            Edit(
                "api/keys.py",
                "caller = self._callers.get(self._digest(hashlib.sha256(token.encode()).digest()))",
                "caller = next(iter(self._callers.values()))",
            ),
        ),
        (KEYS + "anything_else_is_refused",),
    ),
    Bug(
        "keys compared as they are configured",
        "The look-up goes by the configured hash itself, whose digits an attacker can aim at.",
        (Edit("api/keys.py", 'return hmac.digest(self._pepper, sha256, "sha256")', "return sha256"),),
        (KEYS + "no_key_or_hash_is_kept_readable",),
    ),
    Bug(
        "jobs of other tenants",
        "Who knows a job's id can read and cancel it.",
        (Edit("api/jobs.py", "if record.job.tenant == caller.tenant:", "if record.job.tenant:"),),
        ("tests/test_api_admin.py::test_keys_say_who_may_come_in_how_high_and_who_may_administer",),
    ),
    Bug(
        "a reader that leaves is not heard",
        "The engine goes on for a client that is gone.",
        (Edit("api/reply.py", "await cancel_quietly(self._services, job_id)", "await self._readers()"),),
        ("tests/test_walk.py::test_leaving_a_stream_cancels_its_job_unless_it_asks_to_go_on",),
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
            _lua("due", "now + again", "now"),
        ),
        (BATCHES + "one_works_on_it_at_a_time", BATCHES + "a_new_batch_is_due_once"),
    ),
    Bug(
        "a batch that is told of once",
        "A message that Celery loses is never sent again: the batch stands still for ever.",
        (
            _lua("due", "redis.call('ZADD', due_key(), now + again, id)", "redis.call('ZREM', due_key(), id)"),
            _lua("hold", " or not redis.call('ZSCORE', due_key(), id)", ""),
        ),
        (BATCHES + "a_new_batch_is_due_once",),
    ),
    Bug(
        "a cancel that progress undoes",
        "A word about how far a batch is takes its owner's cancel back.",
        (_lua("save", "if s[2] == 'cancelling' and not final[status] then status = 'cancelling' end\n", ""),),
        (BATCHES + "what_the_owner_wants_is_heard",),
    ),
    Bug(
        "a batch that sleeps through its owner's wish",
        "Resumed or cancelled just as it is laid aside, a paused batch is not looked at before its window ends.",
        (_lua("save", "  if rest ~= '' and s[3] == '' then rest = 0 end\n", ""),),
        (BATCHES + "a_wish_that_comes_as_a_paused_turn_ends_is_not_slept_through",),
    ),
    Bug(
        "a half-written row counts",
        "A process killed while it wrote leaves a line with an answer of something else.",
        (Edit("streaming/ledger.py", 'if zlib.crc32(packed).to_bytes(4, "little") != check:', "if not check:"),),
        (LEDGER + "a_spoilt_row_and_what_follows_do_not_count",),
    ),
    Bug(
        "the last answer is right",
        "A process that was overtaken changes answers that were given.",
        (Edit("streaming/ledger.py", "if self.ends[row.line] is None:", "if row.outcome.ends:"),),
        (LEDGER + "the_first_turn_that_ended_a_line_is_right",),
    ),
    Bug(
        "equal prompts are equal requests",
        "A line gets the answer of one that asked for something else, or for another sample.",
        (Edit("api/lines.py", "(request.model, job_prompt, sampling)", "(request.model, job_prompt)"),),
        (SURVEY + "equal_lines_are_computed_once_if_their_answer_is_sure",),
    ),
    Bug(
        "a custom_id twice",
        "Two lines of the output have the same name, and nobody knows which is which.",
        (Edit("offline/survey.py", "return earlier if earlier != number else 0", "return 0"),),
        (SURVEY + "a_bad_line_is_named",),
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
        (Edit("scheduler/kubernetes.py", "resourceVersion=version),", "),"),),
        (PODS + "a_leader_stopped_after_its_stamp_is_refused",),
    ),
    Bug(
        "pods that go undrained",
        "The scale is lowered at once, and running work is cut off when the grace period is over.",
        (Edit("scheduler/leaving.py", "want + len(chosen) - len(drained)", "want"),),
        (PODS + "a_pod_is_drained_before_it_goes",),
    ),
    Bug(
        "a sleeper nobody wakes at once",
        "The first request at zero workers waits for the next tick.",
        (_lua("put", "wake_scheduler(model)", "is_read(lane)"),),
        (PLANS + "a_put_nobody_is_there_for_wakes_the_scheduler",),
    ),
)

BUGS = (*FENCING, *ENDS, *QUEUE, *TOKENS, *CALLERS, *LINES, *POOLS)
