"""Planted bugs of connections and subscriptions, of lists and histories, and of what callers are told."""

from __future__ import annotations

from bench.planted.bug import Edit, bug, lua

RELAY = "tests/streaming/jobs/test_relay.py::test_"
RUNS_TESTS = "tests/workers/test_runs.py::test_"
KEYS = "tests/api/auth/test_keys.py::test_"
LINE = "tests/streaming/redis/test_connection.py::test_"
MALFORMED = "tests/streaming/test_malformed.py::test_"
ERRORS = "tests/api/openai/test_errors.py::test_"
LISTS = "tests/api/test_lists.py::test_"
SUMMARIES = "tests/streaming/jobs/test_summaries.py::test_"
HISTORY = "tests/streaming/jobs/test_history.py::test_"

CHANNELS = (
    bug(
        "a closed connection that is no lost one",
        "A request that is sent as the store dies is answered with 500 instead of 503.",
        Edit(
            "streaming/redis/connection.py",
            "except RuntimeError as error:  # raised by uvloop",
            "except ZeroDivisionError as error:  # raised by uvloop",
        ),
        LINE + "one_that_is_closed_without_a_word_counts_as_lost",
    ),
    bug(
        "a dead connection at hand",
        "After a failover a process takes up a connection whose end nobody will hear of: its users break or wait.",
        Edit(
            "streaming/redis/connection.py", "if writer is None or writer.transport.is_closing():", "if writer is None:"
        ),
        LINE + "one_that_was_lost_before_it_was_used_is_not_waited_for",
    ),
    bug(
        "one frame that cannot be read deafens all",
        "A worker's log is read to the bad frame and no further.",
        Edit(
            "streaming/jobs/history.py",
            "LOG_KINDS[name.kind], name.name, error)\n        return None",
            "LOG_KINDS[name.kind], name.name, error)\n        raise",
        ),
        MALFORMED + "a_frame_that_cannot_be_read_is_left_out",
    ),
    bug(
        "a newer worker's readers hang",
        "An API process leaves the frames of a newer worker out and says nothing to their readers.",
        Edit(
            "streaming/jobs/relay.py",
            "                self._end_newer(name, zip(buffers, records, strict=True))\n",
            "                pass\n",
        ),
        MALFORMED + "the_readers_of_a_newer_worker_are_told_so",
    ),
    bug(
        "one message ends the subscription",
        "A control message that a worker cannot read has it miss those that come next.",
        Edit(
            "streaming/jobs/lease.py",
            '                    log.warning("a message to this worker is ignored: %s", error)\n',
            "                    raise\n",
        ),
        MALFORMED + "a_message_that_cannot_be_read_ends_no_subscription",
    ),
    bug(
        "a reader who came too early",
        "A follow that arrives while the job's history is read is forgotten.",
        Edit(
            "workers/controls.py",
            "                    self._claimer.note_follow(job_id, address)\n",
            "                    pass\n",
        ),
        RUNS_TESTS + "a_reader_who_comes_while_the_history_is_read_is_heard",
    ),
    bug(
        "a task that broke for good",
        "One fault nobody expected, and the readers of a whole process wait without a word.",
        Edit("runtime/loops.py", "            await asyncio.sleep(restart_delay_s)", "            return"),
        RELAY + "a_fault_nobody_expected_costs_no_reader",
    ),
)

LOOKS = (
    bug(
        "a list that reads bodies",
        "A page of jobs with long prompts is more than a process has memory for.",
        lua("recent", "'runs', 'endpoint')", "'runs', 'endpoint', 'body')"),
        Edit(
            "streaming/jobs/summaries.py",
            '*(b"metadata", b"epoch", b"runs", b"endpoint"),',
            '*(b"metadata", b"epoch", b"runs", b"endpoint", b"body"),',
        ),
        LISTS + "a_list_reads_summaries",
    ),
    bug(
        "a list that looks without end",
        "Whoever asks for a state that few jobs are in has every job of theirs read, in one request.",
        Edit("streaming/jobs/summaries.py", "MAX_ROUNDS = 4", "MAX_ROUNDS = 4_000"),
        LISTS + "a_status_that_no_job_has_is_looked_for_in_bounds",
    ),
    bug(
        "an end of a newer version that counts as malformed",
        "While a new version is rolled out lists say of its jobs that they failed.",
        Edit(
            "streaming/jobs/records.py",
            "    except NewerMessage:\n        return Terminal(job_id, JobState.FAILED, 0, failure=NEWER)\n",
            "",
        ),
        SUMMARIES + "a_list_says_what_a_look_says_of_an_end_that_cannot_be_read",
    ),
    bug(
        "a cursor whose id alone is looked up",
        "A cursor of an old time and the id of a new job has one script walk the whole list of a tenant.",
        lua(
            "recent",
            "local low, high = redis.call('ZCOUNT', jobs, '(' .. time, '+inf'), ",
            "local low, high = redis.call('ZREVRANK', jobs, id) or 0, ",
        ),
        lua("recent", "  while low < high do", "  while false do"),
        SUMMARIES + "a_made_up_cursor_reads_no_more_than_a_page",
    ),
    bug(
        "a list that shows what is not next",
        "Jobs of a partition that stopped looking are passed over: no page ever shows them.",
        Edit("streaming/jobs/summaries.py", "if reached is None or job[0] >= reached]", "]"),
        SUMMARIES + "pages_hold_every_job_once_in_order",
    ),
    bug(
        "a look at the lane for every reader",
        "Each reader of a waiting job has a thousand entries read twice a second.",
        Edit("streaming/jobs/places.py", "look is None or look.began < asked - old_s or old_s == 0:", "True:"),
        LISTS + "readers_who_wait_share_one_look_at_their_lane",
    ),
    bug(
        "a body for every look at a silent reader",
        "Whoever waits has the whole prompt read again, twice a second.",
        Edit(
            "api/events.py",
            "partial(services.job_reader.again, record)",
            "partial(services.job_reader.record, record.job.id)",
        ),
        LISTS + "readers_who_wait_share_one_look_at_their_lane",
    ),
    bug(
        "a round trip for every lane",
        "With many models and partitions, a look at the lanes takes longer than a tick.",
        Edit(
            "streaming/jobs/backlog.py",
            "        args: list[str | int] = [deadlines, *models]\n",
            "        args: list[str | int] = [deadlines, *models]\n        await self._client.now_ms()\n",
        ),
        "tests/streaming/jobs/test_backlog.py::test_a_look_is_one_call_for_each_partition",
    ),
    bug(
        "a pass over the log for every job",
        "After the loss of a worker with hundreds of jobs, its log is read hundreds of times until the last goes on.",
        Edit(
            "runtime/rounds.py",
            "self._waiting[: self._max_items], self._waiting[self._max_items :]",
            "self._waiting[:1], self._waiting[1:]",
        ),
        HISTORY + "one_pass_serves_all_jobs_of_a_claim",
    ),
    bug(
        "a log read in one piece",
        "While a long log is decoded, nothing else runs: every stream of the process stands still.",
        Edit("streaming/jobs/history.py", "if rows >= ROWS_AT_ONCE:", "if rows < 0:"),
        HISTORY + "others_have_their_turn_while_a_log_is_read",
    ),
    bug(
        "a look that reads the log",
        "To show a running job, all that its worker wrote since is read.",
        Edit(
            "api/jobs.py",
            "    return JobView.of(record, facts_of",
            "    await services.job_reader.history(record.job.id, record.runs)\n    return JobView.of(record, facts_of",
        ),
        LISTS + "a_running_jobs_log_is_not_read_to_show_it",
    ),
)

CALLERS = (
    bug(
        "any key opens the door",
        "Whoever sends some key is taken for somebody.",
        Edit(
            "api/auth/keys.py",
            "caller = self._callers.get(self._digest(_sha256(token)))",
            "caller = next(iter(self._callers.values()))",
        ),
        KEYS + "anything_else_is_refused",
    ),
    bug(
        "keys compared as they are configured",
        "The look-up goes by the configured hash itself, whose digits an attacker can aim at.",
        Edit("api/auth/keys.py", 'return hmac.digest(self._pepper, sha256, "sha256")', "return sha256"),
        KEYS + "no_key_or_hash_is_kept_readable",
    ),
    bug(
        "a tenant of any name",
        "A tenant's name may hold what separates names in keys and messages.",
        Edit("api/settings.py", '        check_tenant("tenant", self.tenant)\n', "        pass\n"),
        KEYS + "a_tenants_name_is_checked_wherever_it_is_set",
    ),
    bug(
        "a constraint that has no effect",
        "A field by which other servers constrain an answer is ignored, and the answer is taken for a constrained one.",
        Edit("api/openai/refused_fields.py", "if name in CONSTRAINTS:", "if False:"),
        "tests/api/openai/test_schemas.py::test_constraints_of_other_servers_are_refused_with_what_to_use_instead",
    ),
    bug(
        "jobs of other tenants",
        "Who knows a job's id can read and cancel it.",
        Edit("api/jobs.py", "if record.job.tenant == caller.tenant:", "if record.job.tenant:"),
        Edit("api/jobs.py", "job_reader.outline(job_id, caller.tenant)", "job_reader.outline(job_id)"),
        "tests/api/admin/test_dead_letters.py::test_keys_say_who_may_come_in_how_high_and_who_may_administer",
    ),
    bug(
        "a joined job that is lost",
        "Whoever joined a job by its key waits for ever when the store has lost it.",
        Edit(
            "api/admission.py",
            "    buffer.accepted = True\n    try:\n        await services",
            "    try:\n        await services",
        ),
        ERRORS + "a_joined_job_that_is_lost_ends_its_reader",
    ),
    bug(
        "a poison message of a broker",
        "A message that makes its taker fail comes again and again, and nothing behind it is taken.",
        Edit("offline/broker/intake.py", "if count > MAX_REDELIVERIES:", "if count < 0:"),
        "tests/offline/broker/test_events.py::test_a_message_that_makes_its_taker_fail_is_put_aside",
    ),
    bug(
        "a reader that leaves is not heard",
        "The engine goes on for a client that is gone.",
        Edit("api/stream/reply.py", "await abandon_quietly(self._services, job_id)", "await asyncio.sleep(0)"),
        "tests/system/test_walk.py::test_leaving_a_stream_cancels_its_job_unless_it_asks_to_go_on",
    ),
)
