"""Planted bugs of preemption and of parked logs: jobs that are put back with their tokens."""

from __future__ import annotations

from bench.planted.bug import Edit, bug, lua

PARKING = "tests/workers/test_parking.py::test_"
VICTIMS = "tests/workers/test_victims.py::test_"
PREEMPTION = "tests/workers/test_preemption.py::test_"

PREEMPTIONS = (
    bug(
        "standard work preempts",
        "A job of lane standard that was claimed beside a chat preempts a batch job.",
        Edit(
            "workers/claimer.py",
            "make_room([claim.job for claim in chats])",
            "make_room([claim.job for claim in (*chats, *others)])",
        ),
        "tests/workers/test_preemption.py::test_a_job_of_lane_standard_beside_a_chat_preempts_nothing",
    ),
    bug(
        "token ids cost a place",
        "A batch job gives way to a request that the tokenizer alone answers.",
        Edit("workers/worker.py", "job.task is None or job.task.computes for job in jobs", "True for job in jobs"),
        "tests/workers/test_preemption.py::test_only_a_task_that_computes_takes_a_place",
    ),
    bug(
        "a prefetched job begins at once",
        "A request that must not queue is let in where it is only prefetched, and waits for a slot.",
        lua("claim", "c.begun < begins and idle_key(model) or prefetching_key(model)", "idle_key(model)"),
        "tests/workers/test_preemption.py::test_a_worker_whose_slots_are_taken_is_not_idle",
    ),
    bug(
        "a worker that left is woken",
        "A job wakes a worker that has left, instead of one that would prefetch it.",
        lua("leave", "{idle_key(model), yielding_key(model), prefetching_key(model)}", "{idle_key(model)}"),
        "tests/streaming/jobs/test_protocol.py::test_a_worker_that_goes_is_not_woken_any_more",
    ),
    bug(
        "a dead worker is woken",
        "A job wakes a worker whose lease has lapsed, instead of one that would prefetch it.",
        lua("reap", "{idle_key(model), yielding_key(model), prefetching_key(model)}", "{idle_key(model)}"),
        "tests/streaming/jobs/test_protocol.py::test_a_worker_that_goes_is_not_woken_any_more",
    ),
    bug(
        "the oldest gives way",
        "A batch job that is nearly done is preempted, and a chat costs much more work than it must.",
        Edit("workers/victims.py", "key=lambda job: (-job.began_s, job.id)", "key=lambda job: (job.began_s, job.id)"),
        VICTIMS + "the_youngest_go_first_and_no_more_than_needed",
    ),
    bug(
        "four victims for a long prompt",
        "A chat with a long prompt preempts a few batch jobs in vain, and waits until others end.",
        Edit("workers/victims.py", "MAX_VICTIMS = 16", "MAX_VICTIMS = 4"),
        "tests/workers/test_gate_of_worker.py::test_a_chat_with_a_long_prompt_takes_the_place_of_as_many_batch_jobs_as_"
        "it_needs",
    ),
    bug(
        "no rest after a preemption",
        "Under a steady load of chats the same batch job is preempted again and again, and never ends.",
        Edit("workers/victims.py", "if job.is_continued and now_s", "if not job.is_continued and now_s"),
        VICTIMS + "who_is_left_alone",
    ),
    bug(
        "half a schema",
        "JSON that the engine cannot continue is preempted: its second half is a second text.",
        Edit("workers/preemption.py", "is_continuable(attempt.job, self._capabilities)", "True"),
        PREEMPTION + "what_cannot_be_continued_exactly_keeps_its_place",
    ),
    bug(
        "a claim without an answer",
        "The heartbeat hands back a job that is being put back, without its tokens.",
        Edit(
            "workers/held_jobs.py",
            "self.attempts.get(job_id) or self._parking.get(job_id)",
            "self.attempts.get(job_id)",
        ),
        PREEMPTION + "while_the_store_is_away_the_job_stays_this_workers",
    ),
    bug(
        "standard work beyond the places",
        "A full worker claims jobs of lane standard for places that it will not free.",
        lua("claims", "if lane.rank > 1 and c.begun + #c.chosen >= c.free then", "if false then"),
        PREEMPTION + "a_claim_beyond_the_free_places_brings_the_highest_lane_alone",
    ),
    bug(
        "a full worker sleeps",
        "A chat waits for the next look of a worker whose batch jobs would give way at once.",
        Edit(
            "streaming/lua/shared/signals.lua",
            " or priority == PRIORITIES[1] and wake_freshest(yielding_key(model), now)\n",
            "\n",
        ),
        PREEMPTION + "a_chat_takes_the_place_of_a_batch_job",
    ),
    bug(
        "the record still names the worker's log",
        "What a preempted job has generated is looked for in a log that its worker has trimmed.",
        Edit("streaming/lua/release.lua", "':0:%1'", "':1:%1'"),
        PARKING + "it_holds_everything_after_any_number_of_runs",
    ),
    bug(
        "copies without their authors",
        "After a second preemption a cursor of the first run is unknown, and its reader is reset.",
        Edit("streaming/jobs/history.py", "if copies and logged[run].copied:", "if False:"),
        PARKING + "it_holds_everything_after_any_number_of_runs",
    ),
    bug(
        "parked for ever",
        "The parked log of a job that has ended stays in the store.",
        Edit(
            "streaming/lua/shared/logs.lua",
            "local function release_logs(id, runs)\n  redis.call('EXPIRE', parked_key(id), LOG_GRACE_S)\n",
            "local function release_logs(id, runs)\n",
        ),
        PARKING + "a_job_that_is_cancelled_keeps_its_parked_tokens",
    ),
    bug(
        "a reader looks in the wrong log",
        "A reader that missed the last deltas before a preemption waits for them until the job ends.",
        Edit("streaming/jobs/subscribers.py", "buffer.number if logged.frame else 0", "buffer.number"),
        PARKING + "a_reader_who_has_a_part_of_the_run_gets_the_rest_from_it",
    ),
)
