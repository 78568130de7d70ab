"""Planted bugs of fences and ends: who may still write, and when a job is over."""

from __future__ import annotations

from bench.planted.bug import Edit, bug, lua

PROTOCOL = "tests/streaming/jobs/test_protocol.py::test_"
REGRESSIONS = "tests/streaming/test_regressions.py::test_"
RELAY = "tests/streaming/jobs/test_relay.py::test_"
RENDER = "tests/api/openai/test_rendering.py::test_"
MALFORMED = "tests/streaming/test_malformed.py::test_"

FENCING = (
    bug(
        "append without its fence",
        "A worker that was taken for dead goes on writing tokens beside its successor.",
        lua("append", "if mine[1] ~= 'live' then return 'fenced' end\n", ""),
        PROTOCOL + "a_fenced_worker_can_write_nothing",
    ),
    bug(
        "finish without its fence",
        "A worker that was taken for dead is not told so when it ends a job, and goes on.",
        lua("finish", "if not is_live(worker) then return 'fenced' end\n", ""),
        PROTOCOL + "a_fenced_worker_can_write_nothing",
    ),
    bug(
        "finish without its owner",
        "Any live worker can end a job that another one runs.",
        lua("finish", "holds_job(id, worker, run, s[1]", "holds_job(id, s[2], run, s[1]"),
        REGRESSIONS + "a_job_is_ended_by_its_holder_and_its_run_only",
    ),
    bug(
        "finish without its run",
        "The end of an earlier attempt counts for a later one.",
        lua("finish", "holds_job(id, worker, run, s[1]", "holds_job(id, worker, s[3], s[1]"),
        REGRESSIONS + "a_job_is_ended_by_its_holder_and_its_run_only",
    ),
    bug(
        "release without its run",
        "A hand-back that arrives late takes the job from the worker that has claimed it again and runs it.",
        lua("release", "holds_job(id, worker, run, s[1]", "holds_job(id, worker, s[3], s[1]"),
        REGRESSIONS + "a_release_that_arrives_late_leaves_the_next_attempt_alone",
    ),
    bug(
        "a lease by a client's clock",
        "A process whose clock is fast fences every worker; one whose clock is slow never finds a dead one.",
        Edit(
            "streaming/jobs/reaper.py",
            "LOG_KEEP_S, settings.lease_ms, ended, wanted, ends)",
            "LOG_KEEP_S, settings.lease_ms, ended, wanted, ends, _now_ms())",
        ),
        Edit(
            "streaming/jobs/reaper.py",
            "class Reaper:",
            "def _now_ms() -> int:\n    import time\n\n    return int(time.time() * 1000)\n\n\nclass Reaper:",
        ),
        lua("reap", "local now = now_ms()", "local now = tonumber(ARGV[9])"),
        REGRESSIONS + "a_clients_clock_decides_nothing",
    ),
    bug(
        "the lease of a process that still lives",
        "A worker that drains is fenced by its own supervisor, and its jobs are computed twice.",
        Edit("cli/lease_release.py", "elif status.pid is None and (", "elif ("),
        "tests/cli/test_lease_release.py::test_an_exit_ends_the_lease_once",
    ),
    bug(
        "a wake-up for the dead",
        "The jobs of a worker that was idle a moment ago wake nobody else.",
        lua("reap", "    redis.call('ZREM', key, worker) -- first: its", "    -- first: its"),
        "tests/streaming/jobs/test_reaper.py::test_its_jobs_wake_a_worker_that_lives",
    ),
    bug(
        "a lease ends while the store is away",
        "When it is back every worker is fenced, and what the store had not written yet is made anew by others.",
        lua("reap", "if now - before > lease / 2 then", "if false then"),
        REGRESSIONS + "the_time_the_store_was_away_ends_no_lease",
    ),
    bug(
        "a lease made by a clock that was ahead",
        "The store's clock is set back: whoever dies then holds its jobs for as long as it was set back by.",
        lua("reap", "redis.call('ZADD', leases_key(), now + lease, worker)\nend\n\nif ended", "end\n\nif ended"),
        REGRESSIONS + "a_clock_that_is_set_back_keeps_no_dead_worker",
    ),
    bug(
        "a lease that is spared for ever",
        "Where sweeps are rare, a dead worker's jobs wait without end.",
        lua("reap", "tonumber(redis.call('HGET', worker_key(held[i]), 'spared')) ~= tonumber(held[i + 1])", "true"),
        REGRESSIONS + "the_time_the_store_was_away_ends_no_lease",
    ),
)

ENDS = (
    bug(
        "acknowledged before it is one's own",
        "A finish that is refused has already removed the job's entry: the job waits for ever.",
        lua("finish", "  if not holds_job(", "  ack_and_delete(s[4], s[5])\n  if not holds_job("),
        REGRESSIONS + "a_finish_behind_the_hand_back_leaves_the_job_in_the_queue",
    ),
    bug(
        "ended but not acknowledged",
        "Entries of jobs that have ended fill their lane.",
        lua("finish", "ack_and_delete(s[4], s[5])\n", ""),
        PROTOCOL + "a_job_is_put_claimed_logged_and_finished",
    ),
    bug(
        "a finish reason before the end",
        "A reader takes an answer for complete that is not stored yet.",
        Edit(
            "api/openai/rendering.py",
            "return prefix + to_json(text) + end\n",
            "return prefix + to_json(text) + end + "
            '(self._finish(delta.index, delta.finish) if delta.finish else b"")\n',
        ),
        RENDER + "no_block_of_a_delta_has_a_finish",
    ),
    bug(
        "an end before its last tokens",
        "A reader is told that all is said while deltas are missing.",
        Edit("streaming/jobs/reorder_buffer.py", "if self.seq < terminal.seq:", "if self.seq < 0:"),
        RELAY + "a_buffer_waits_for_what_is_missing_before_it_ends",
    ),
    bug(
        "a cancel that forgets the queue",
        "A waiting job is only marked: a worker runs it all the same.",
        lua(
            "cancel", "end_job(id, 'cancelled', 'cancelled', now_ms())", "redis.call('HSET', job_key(id), 'cancel', 1)"
        ),
        PROTOCOL + "cancel_ends_a_waiting_job_and_marks_a_running_one",
    ),
    bug(
        "a cancel that forgets the worker",
        "A running job is never told of its cancel: it keeps its slot to the end.",
        lua("cancel", "    redis.call('HSET', job_key(id), 'cancel', 1)\n    notify_worker(s[2], {'c', id})\n", ""),
        PROTOCOL + "cancel_ends_a_waiting_job_and_marks_a_running_one",
    ),
    bug(
        "one record that cannot be read deafens all",
        "The readers of a whole API process hear nothing more from the log because of one spoiled job.",
        Edit(
            "streaming/jobs/reader.py",
            "return malformed_record(job_id, fields, await fail_malformed(self._client, job_id, error))",
            "raise",
        ),
        MALFORMED + "a_record_that_cannot_be_read_fails_its_job_alone",
    ),
    bug(
        "an unreadable job is nobody's",
        "Its reader gets an error, but it is no dead letter and stays running in the store.",
        Edit(
            "streaming/jobs/reader.py",
            '    return int(await client.call("fail_malformed", partition_of(job_id) or 0, job_id, str(error)))\n',
            "    return 0\n",
        ),
        MALFORMED + "a_record_that_cannot_be_read_fails_its_job_alone",
    ),
    bug(
        "an unreadable job without a time of its end",
        "Who asks for a job until it has an end in time asks for ever: it has failed, and is never said to be over.",
        lua(
            "fail_malformed",
            "return tonumber(string.match(redis.call('HGET', job, 'done') or '', '^%d+$')) or now",
            "return 0",
        ),
        MALFORMED + "a_job_that_cannot_be_read_has_an_end_in_time",
    ),
    bug(
        "one record stops every sweep",
        "A dead worker's jobs stay with it because one of them cannot be read.",
        lua("malformed", "local ran, answer = pcall(step, id, worker)", "local ran, answer = true, step(id, worker)"),
        MALFORMED + "a_sweep_puts_the_other_jobs_back",
    ),
    bug(
        "a replay that doubles",
        "Two people replay one dead letter, and its job runs twice.",
        Edit(
            "streaming/jobs/dead_letters.py",
            "replay_job_id(letter.id, letter.job)",
            "self._queue.new_id(record.job.tenant)",
        ),
        MALFORMED + "a_dead_letter_replayed_twice_is_one_job",
    ),
    bug(
        "a replay of nothing",
        "A dead letter whose body cannot be read becomes a job with an empty prompt.",
        Edit(
            "streaming/jobs/dead_letters.py",
            "        if record.fault:\n            raise MalformedJob(record.fault)\n",
            "",
        ),
        MALFORMED + "a_dead_letter_without_a_body_is_not_replayed",
    ),
    bug(
        "an expired job is run",
        "Work that nobody waits for any more costs engine steps.",
        lua("claims", " or is_past(s[3], c.now) then", " then"),
        REGRESSIONS + "a_job_whose_time_is_over_is_not_claimed",
    ),
)
