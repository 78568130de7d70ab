"""Planted bugs of what the queue promises a client: its lane, its wait, and when to come back."""

from __future__ import annotations

from bench.planted.bug import Edit, bug, lua

TAKERS = "tests/streaming/jobs/test_takers.py::test_"
LIMITS = "tests/api/test_wait_limits.py::test_"
SAMPLER = "tests/api/waits/test_sampler.py::test_"
CALIBRATION = "tests/api/waits/test_calibration.py::test_"
STANDING = "tests/api/test_own_standing.py::test_"
TRTLLM = "tests/workers/engines/trtllm/test_engine.py::test_"

PROMISES = (
    bug(
        "the engine does not hear the lane",
        "Inside the engine, a line of a batch goes before a chat that came a moment later.",
        Edit("workers/attempt.py", "ENGINE_PRIORITY[self.job.priority]", "NEUTRAL_PRIORITY"),
        "tests/workers/test_attempt.py::test_every_text_of_a_job_has_the_priority_of_its_lane",
    ),
    bug(
        "a resumed line goes before every chat",
        "After the loss of a worker, its batch work holds up the chats of another inside the engine.",
        Edit("workers/engines/trtllm/engine.py", "RESUMED_AHEAD = 0.1", "RESUMED_AHEAD = 0.5"),
        TRTLLM + "lanes_keep_their_order_inside_the_engine",
    ),
    bug(
        "the estimate itself refuses",
        "A request that half of its kind would have met is refused: the middle of the band decides, not its low end.",
        Edit("api/wait_limits.py", "return wait.low_ms > limit.ms", "return wait.eta_ms > limit.ms"),
        LIMITS + "a_limit_inside_the_band_is_accepted",
    ),
    bug(
        "jobs that expire say nothing",
        "A limit that no job has met lately is accepted again and again, and each such job expires.",
        Edit("api/waits/sampler.py", "record.state is JobState.EXPIRED or (", "("),
        SAMPLER + "jobs_that_expire_teach_that_a_limit_cannot_be_met",
    ),
    bug(
        "a corrupt record is taken for a wait",
        "One spoiled number in the store, or its clock set forward, and every request with a deadline is refused.",
        Edit("api/waits/sampler.py", "now - watched.since + CLOCK_SLACK_S", "float('inf')"),
        SAMPLER + "a_wait_longer_than_the_job_was_watched_teaches_nothing",
    ),
    bug(
        "the plan alone refuses",
        "For a second after the lane was emptied, requests that would start at once are sent away.",
        Edit("api/wait_limits.py", "wait = waits.wait(job, waiting)", "wait = waits.wait(job)"),
        LIMITS + "a_lane_that_has_emptied_since_the_plan_refuses_nothing",
    ),
    bug(
        "a limit that brings nothing forward",
        "A request that would go before all jobs of its tenant is refused, because they are many.",
        lua("waiting", "redis.call('ZCOUNT', line, '-inf', now_ms() + patience)", "redis.call('ZCARD', line)"),
        LIMITS + "a_limit_that_brings_a_job_forward_is_accepted",
    ),
    bug(
        "no one may wake the model",
        "A sleeping model refuses the request whose job would have woken it, and the next one, for ever.",
        Edit("api/waits/estimates.py", "plan.want > 0 and self._age", "self._age"),
        CALIBRATION + "only_a_fresh_plan_of_a_model_that_is_awake_refuses",
        LIMITS + "no_guess_refuses",
    ),
    bug(
        "a job that was accepted is refused",
        "A client that repeats its request with the key of a job that waits is told that it never could.",
        lua("put", "local found = key and find", "local found = key and not must_run and find"),
        LIMITS + "a_request_that_was_accepted_before_is_not_refused",
    ),
    bug(
        "a refusal hides the job of a key",
        "While the store takes no new job, a client that repeats its request does not get the answer that is there.",
        Edit(
            "streaming/jobs/queue.py",
            "return await self._existing(job, idempotency_key, digest, refusal)",
            "raise refusal",
        ),
        "tests/streaming/store/test_memory.py::test_a_full_store_answers_a_key_whose_job_it_has",
    ),
    bug(
        "a second makes every short wait possible",
        "With all slots taken for seconds, a deadline of a millisecond is accepted, and the job expires.",
        Edit("api/wait_limits.py", "wait.eta_ms > TRUSTED_FACTOR", "wait.eta_ms - 9_000 > TRUSTED_FACTOR"),
        LIMITS + "a_short_wait_beyond_a_shorter_limit_is_refused_without_measured_ones",
    ),
    bug(
        "a free place is refused",
        "A request that would start at once is sent away, because the plan of a second ago knew no free place.",
        Edit(
            "api/admission.py",
            "            late = await out_of_reach(services, job)\n",
            "            late = await out_of_reach(services, job)\n            if late is not None:\n"
            "                raise NoCapacity\n",
        ),
        LIMITS + "what_would_start_at_once_is_accepted_whatever_was_measured",
    ),
    bug(
        "reserved slots are free for a batch",
        "A line that must not queue waits for hours behind slots that are reserved from it.",
        lua("claims", "if batches >= c.spare then", "if false then"),
        TAKERS + "places_that_are_reserved_from_lane_batch_are_not_free_for_it",
        TAKERS + "jobs_that_the_claim_brings_take_the_places_of_lane_batch",
    ),
    bug(
        "kept slots are free for a flood",
        "A tenant that floods a worker is let in for the slot that is kept from it, and waits.",
        lua("takers", " and not is_closed_to('tenant:' .. tenant .. '\\n')", ""),
        TAKERS + "kept_places_are_free_for_others_alone",
        TAKERS + "a_chat_is_let_in_where_batch_work_gives_way_unless_its_tenant_crowds_the_worker",
    ),
    bug(
        "a flood holds up those that a slot is kept for",
        "While a flood waits, every other tenant's job that must not queue is refused beside a free slot.",
        lua("takers", "is_closed_to('tenant:') and own or waiting", "waiting"),
        TAKERS + "jobs_that_a_kept_place_is_kept_from_do_not_hold_up_others",
    ),
    bug(
        "any worker is woken",
        "A job that must not queue wakes a worker whose room is for others, and waits until another one looks.",
        lua("put", "if taker then\n", "if taker and not must_run then\n"),
        TAKERS + "the_worker_that_would_begin_the_job_is_woken",
    ),
    bug(
        "a batch waits for reserved slots without knowing it",
        "A line is told that it starts at once, while three of four slots run lines and the fourth is reserved.",
        Edit("scheduler/policy/forecast.py", "max(snapshot.running, kept)", "snapshot.running"),
        "tests/scheduler/policy/test_estimates.py::test_slots_that_are_reserved_from_lane_batch_are_not_free_for_it",
    ),
    bug(
        "a wait that grows by itself",
        "A client watches the estimate of its job go up and down with the noise of the load.",
        Edit("api/waits/shown.py", "else min(wait.eta_ms, shown[0])", "else wait.eta_ms"),
        CALIBRATION + "a_shown_wait_does_not_rise_unless_more_jobs_are_ahead",
    ),
    bug(
        "a wait that never grows",
        "Work of higher lanes pushes a job back, and its client is told the old time: a false hope.",
        Edit("api/waits/estimates.py", "position + self.plans.above(job.model, job.priority)", "position"),
        CALIBRATION + "more_work_in_a_higher_lane_lifts_the_estimate",
    ),
    bug(
        "the wait of one partition",
        "With four partitions, every client is told a quarter of its wait.",
        Edit("api/waits/estimates.py", "job, position * self._partitions)", "job, position)"),
        CALIBRATION + "the_wait_of_a_job_counts_all_partitions",
    ),
    bug(
        "five seconds, whatever waits",
        "Clients of a lane with an hour of work come back every five seconds.",
        Edit("api/waits/estimates.py", "DEFAULT_RETRY_S if wait is None else wait.eta_ms / 1000", "DEFAULT_RETRY_S"),
        CALIBRATION + "when_to_try_again_follows_from_the_wait",
    ),
    bug(
        "a client names its tenant",
        "Whoever sends another's name as `user` waits in that tenant's turn, and its jobs are that tenant's.",
        Edit(
            "api/admission.py",
            "        tenant=caller.tenant,\n        ceiling",
            "        tenant=asked.user or caller.tenant,\n        ceiling",
        ),
        STANDING + "no_field_lifts_a_request",
    ),
    bug(
        "a tier without a ceiling",
        "A key of the batch lane chats in the interactive one by OpenAI's word for it.",
        Edit(
            "api/openai/schemas.py",
            "priority=clamp(request.lane, ceiling)",
            "priority=request.lane if request.service_tier else clamp(request.lane, ceiling)",
        ),
        STANDING + "no_field_lifts_a_request",
    ),
    bug(
        "a line chooses its lane",
        "Fifty thousand lines of a batch wait before every chat.",
        Edit("api/openai/batch_lines.py", "        priority=lane,\n", "        priority=request.lane,\n"),
        STANDING + "no_field_lifts_a_line",
    ),
    bug(
        "waits of others refuse",
        "The order starts jobs with a limit sooner, and they are refused by how long all others wait.",
        Edit(
            "api/waits/calibration.py",
            "return cls(job.model, job.priority, estimator, limited)",
            "return cls(job.model, job.priority, estimator)",
        ),
        CALIBRATION + "there_is_no_band_without_enough_errors_of_the_same_source",
        LIMITS + "few_measured_waits_refuse_nothing",
    ),
)
