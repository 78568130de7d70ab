"""Planted bugs of how work is counted and bounded: units of work, choices of one request, quotas of batches."""

from __future__ import annotations

from bench.planted.bug import Edit, bug

UNITS = "tests/streaming/jobs/test_work.py::test_"
CHOICES = "tests/workers/test_choices.py::test_"
PLACES = "tests/workers/test_places.py::test_"
BOUND = "tests/api/test_choices.py::test_"
QUOTA = "tests/offline/batch/test_quota.py::test_"
WORKER = "workers/worker.py"
STARTER = "workers/choices.py"

WORK = (
    bug(
        "a list of inputs that never begins",
        "A task whose inputs together are larger than the cache of the simulated engine waits for ever.",
        Edit(
            "workers/engines/sim/engine.py",
            "sequence.largest = max(counts, default=0)",
            "sequence.largest = sum(counts)",
        ),
        "tests/workers/engines/sim/test_engine.py::test_the_inputs_of_a_task_are_computed_one_after_another",
    ),
    bug(
        "a cancel waits for the twentieth step",
        "A slot that a client has left computes on, unseen, and the next request waits for it.",
        Edit(
            "workers/engines/sim/engine.py",
            "for sequence in batch.cancelled]\n        batch.cancelled.clear()",
            "for sequence in batch.cancelled if self._steps % 20 == 0]\n"
            "        batch.cancelled = batch.cancelled if self._steps % 20 else []",
        ),
        "tests/workers/engines/sim/test_engine.py::test_cancel_frees_the_slot_in_a_step",
    ),
    bug(
        "a list of prompts is one prompt",
        "A request of 128 prompts is counted as one of them: the store fills beyond what was reserved.",
        Edit(
            "streaming/jobs/work.py", "sampling.n * prompt_count(prompt) * answer_tokens", "sampling.n * answer_tokens"
        ),
        UNITS + "work_is_choices_times_tokens",
    ),
    bug(
        "without max_tokens there is no work",
        "Requests that name no limit cost a tenant's quota nothing.",
        Edit(
            "streaming/jobs/work.py",
            "(card.default_output or card.max_output) if max_tokens is None else max_tokens",
            "max_tokens or 0",
        ),
        QUOTA + "a_line_weighs_what_it_may_have_computed",
    ),
    bug(
        "a line is counted by a unit of its own",
        "A batch passes a quota that the same requests, sent one by one, would exceed.",
        Edit(
            "streaming/jobs/work.py",
            "sum(prompt_sizes(prompt, tools)) + work_of(prompt, sampling, card)",
            "(sum(prompt_sizes(prompt, tools)) + (sampling.max_tokens or 0))",
        ),
        UNITS + "a_line_of_a_batch_and_a_request_weigh_the_same",
    ),
    bug(
        "a prompt of many choices is counted once",
        "A batch with n = 8 and long prompts costs an eighth of the quota that eight lines cost.",
        Edit(
            "streaming/jobs/work.py",
            "sampling.n * sum(prompt_sizes(prompt, tools))",
            "sum(prompt_sizes(prompt, tools))",
        ),
        UNITS + "many_choices_weigh_what_as_many_requests_weigh",
    ),
    bug(
        "any number of choices",
        "600 bytes make 1,024 texts.",
        Edit("api/admission.py", "    check_choices(asked, services.settings.max_choices_per_request)\n", ""),
        BOUND + "a_small_body_cannot_ask_for_a_thousand_texts",
    ),
    bug(
        "any number of choices in a line of a batch",
        "What is refused at the door comes in by a file.",
        Edit("offline/batch/input_validation.py", "terms.models, terms.max_choices)", "terms.models)"),
        BOUND + "a_line_of_a_batch_is_held_to_it",
    ),
    bug(
        "any number of choices in a message",
        "What is refused at the door comes in by a broker.",
        Edit("offline/broker/intake.py", "            check_choices(asked, self._max_choices)\n", ""),
        BOUND + "a_message_of_a_broker_is_held_to_it",
    ),
    bug(
        "all slots for one request",
        "One tenant's request holds the whole worker, and everybody else waits for its end.",
        Edit(STARTER, "share = stats.slots // 2", "share = stats.slots"),
        CHOICES + "one_request_has_half_of_the_slots",
    ),
    bug(
        "all of the KV cache for one request",
        "Half of the slots is more than the cache holds: requests wait inside the engine, and nothing is claimed.",
        Edit(STARTER, "        if stats.kv_tokens:\n            size", "        if not stats.slots:\n            size"),
        CHOICES + "it_has_half_of_the_cache",
    ),
    bug(
        "further choices wait for the first one's end",
        "A request of eight choices takes eight times as long on an idle worker.",
        Edit(STARTER, "            asyncio.get_running_loop().call_soon(self.start_waiting)\n", ""),
        CHOICES + "its_end_before_its_time_starts_no_choice",
    ),
    bug(
        "choices of a batch in reserved slots",
        "Lines with many choices fill the slots that are kept for chats.",
        Edit(
            STARTER,
            "return attempt.job.priority is not Priority.BATCH or self.batch_texts < slots - self.reserved",
            "return True",
        ),
        CHOICES + "lane_batch_leaves_the_reserved_slots_free",
    ),
    bug(
        "the lowest lane's choices first",
        "A line of a batch overtakes the choices of a chat.",
        Edit(STARTER, "key=lambda each: each.job.priority.rank)", "key=lambda each: -each.job.priority.rank)"),
        PLACES + "of_choices_that_wait_the_highest_lane_goes_first",
    ),
    bug(
        "waiting choices take every place",
        "Three requests of sixteen choices close a worker of four slots: a chat of a higher lane waits for their end.",
        Edit(
            STARTER,
            "slots + (self._settings.prefetch if self._is_owed(attempt) else 0)",
            "slots + self._settings.prefetch",
        ),
        PLACES + "waiting_choices_leave_the_place_beyond_the_slots",
    ),
    bug(
        "a job with nothing running takes any place",
        "More large requests than a worker has slots close it until one of them ends.",
        Edit(
            STARTER,
            "if not attempt.started and self._may_start(attempt, slots):",
            "if not attempt.started and attempt.waits:",
        ),
        PLACES + "more_large_jobs_than_places_do_not_close_the_worker",
    ),
    bug(
        "of two large jobs the older one goes on",
        "A stream whose job has nothing running stands still until older jobs are done.",
        Edit(STARTER, "(each.job.priority.rank, each.last_start)", "each.job.priority.rank"),
        PLACES + "more_large_jobs_than_places_do_not_close_the_worker",
    ),
    bug(
        "a choice of a batch before a chat",
        "While chats wait in the queue, every second place goes to choices of lower lanes.",
        Edit(STARTER, "return attempt.job.priority.rank <= self._overtaken", "return self._overtaken >= 0"),
        PLACES + "a_higher_lane_has_every_place_that_becomes_free",
    ),
    bug(
        "choices wait as long as there are jobs",
        "Beside a stream of short jobs a request of sixteen choices computes one at a time.",
        Edit(
            STARTER,
            "            self._overtaken = max(self._overtaken, lane.rank)\n",
            "            self._overtaken = -1\n",
        ),
        PLACES + "jobs_of_the_same_lane_and_choices_have_a_place_each_in_turn",
    ),
    bug(
        "without a prefetch no place for claims",
        "A worker that holds nothing beyond its slots claims nothing until all choices of its large jobs are done.",
        Edit(STARTER, "if self._is_full() and not self._settings.prefetch and", "if False and"),
        PLACES + "without_a_place_beyond_the_slots_a_claim_goes_first",
    ),
    bug(
        "any number of large jobs in one worker",
        "One worker takes every request of many choices, and the workers beside it have nothing to do.",
        Edit("workers/claimer.py", "if self._starter.is_laden:", "if False:"),
        PLACES + "a_worker_does_not_hold_any_number_of_them",
    ),
    bug(
        "a choice's slot is found at the next poll",
        "A full worker leaves a free slot empty although jobs wait.",
        Edit(WORKER, "if not attempt.over and self._claimer.is_full:", "if attempt.stopped and attempt.over:"),
        CHOICES + "a_slot_that_becomes_free_is_taken_at_once",
    ),
    bug(
        "a cancelled job starts its other choices",
        "A cancel or a deadline frees no slot: the next choices of the same job take them.",
        Edit(
            "workers/attempt.py",
            "self._stopped = self._stopped or (state, failure)\n        self.start_no_more()\n",
            "self._stopped = self._stopped or (state, failure)\n",
        ),
        CHOICES + "its_end_before_its_time_starts_no_choice",
    ),
    bug(
        "a job that was handed back still waits here",
        "Its choices may be started by two workers at once.",
        Edit(STARTER, "        attempt.start_no_more()\n        self.waiting.pop(attempt.job.id, None)\n", ""),
        CHOICES + "a_drain_hands_over_what_was_not_started",
    ),
    bug(
        "prompts are looked at when their turn comes",
        "A list with one impossible prompt streams some answers, and then breaks off.",
        Edit(
            "workers/claimer.py", "[await self._target.refusal(claim.job) for claim in fresh]", "[None for _ in fresh]"
        ),
        CHOICES + "a_list_with_one_impossible_prompt_computes_nothing",
        BOUND + "a_list_with_one_impossible_prompt_is_refused_before_anything_is_said",
    ),
    bug(
        "a refused choice stays open",
        "A job whose later prompt is too long never ends.",
        Edit(
            "workers/attempt.py",
            "        self._open.discard(index)\n        self.stop(JobState.FAILED, failure)\n",
            "        self.stop(JobState.FAILED, failure)\n",
        ),
        CHOICES + "one_choice_that_is_refused_ends_the_job",
    ),
    bug(
        "an engine's death in a callback",
        "The engine is gone when a later choice is given to it, nobody hears of that, and the job never ends.",
        Edit(STARTER, "        if self.dead is not None:\n            raise self.dead\n", ""),
        CHOICES + "an_engine_that_dies_when_a_later_choice_is_given_ends_the_worker",
    ),
    bug(
        "a quota that is given back while a turn begins",
        "While the ledger of a large batch is read, another batch of the tenant takes its tokens.",
        Edit(
            "offline/batch/turn.py", "if self._lines is not None and self._lines.opened:", "if self._lines is not None:"
        ),
        QUOTA + "nothing_is_said_of_a_ledger_that_is_being_read",
    ),
    bug(
        "lines on their way into the queue are forgotten",
        "Between two looks a batch seems smaller than it is, and its tenant gets more in.",
        Edit(
            "offline/batch/lines.py",
            "before = len(self._queued)\n",
            "before = len(self._queued)\n                self.tokens_left -= self.plan.tokens[lines[0]]\n",
        ),
        QUOTA + "what_is_left_is_what_has_no_answer",
    ),
    bug(
        "answers give nothing back",
        "A batch holds its whole quota until its end.",
        Edit(
            "offline/batch/lines.py",
            "        self.tokens_left -= sum(self.plan.tokens[row.line] for row in ends)\n",
            "",
        ),
        QUOTA + "what_is_left_is_what_has_no_answer",
    ),
    bug(
        "a plug-in's piece for a request that does not run",
        "An engine that mixes up its requests leaves the right one waiting for ever.",
        Edit(
            "workers/engines/checked_engine.py",
            'return f"a piece for request {piece.id!r}, which does not run: unknown, or it has ended"',
            "continue",
        ),
        "tests/workers/engines/test_checked_engine.py::test_nonsense_ends_the_worker",
    ),
    bug(
        "a plug-in that raises is well",
        "An error in a plug-in's own method is raised to nobody, and its worker holds its jobs for ever.",
        Edit(
            "workers/engines/checked_engine.py", "problem := self._broken or self._overdue", "problem := self._overdue"
        ),
        "tests/workers/engines/test_checked_engine.py::test_nonsense_ends_the_worker",
    ),
)
