"""Planted bugs of the gate: what it predicts, what it lets into the engine, and what becomes of what waits."""

from __future__ import annotations

from bench.planted.bug import Edit, bug, lua

PURE = "tests/workers/gate/test_"
KEEPER = "tests/workers/test_gatekeeper.py::test_"
WORKER = "tests/workers/test_gate_of_worker.py::test_"

GATE = (
    bug(
        "a text that can never fit waits",
        "A request whose prompt is larger than the cache waits at the gate for ever, and its worker claims nothing.",
        Edit("workers/gate/gate.py", "        if never_fits(text, capacity):\n            return ADMITTED\n", ""),
        WORKER + "what_can_never_fit_is_refused_at_once",
    ),
    bug(
        "the impossible waits its turn",
        "A request that the engine will refuse waits behind others, and its client with it.",
        Edit("workers/choices.py", "self.gate.never_fits(attempt, attempt.next_choice[0])", "False"),
        WORKER + "what_can_never_fit_does_not_wait_behind_others",
    ),
    bug(
        "preempted for nothing",
        "A chat that does not fit beside the jobs that stay preempts batch jobs, and waits all the same.",
        Edit("workers/preemption.py", " or not self._starter.would_start(attempt, victims)", ""),
        WORKER + "a_chat_that_does_not_fit_anyway_preempts_nothing",
    ),
    bug(
        "a large job shuts out chats",
        "While a long job of lane standard waits at the gate, the worker claims no chats, which would fit.",
        Edit("workers/choices.py", "        return self.gate.chat_room()\n", "        return 0\n"),
        WORKER + "chats_that_fit_overtake_a_large_job_of_lane_standard",
    ),
    bug(
        "overtaken for ever",
        "Chats that keep coming overtake a long job at the gate without end.",
        Edit("workers/choices.py", "any(each.ahead.isdisjoint(self.running) for each in standard)", "False"),
        WORKER + "a_job_at_the_gate_is_overtaken_only_while_what_ran_before_it_runs",
    ),
    bug(
        "preemptible too late",
        "A chat waits at the gate for a batch job to end that has run long enough to give way.",
        Edit("workers/worker.py", "            self._preemption.make_way_again(now)\n", ""),
        WORKER + "a_batch_job_gives_way_as_soon_as_it_has_run_for_long_enough",
    ),
    bug(
        "a history that ends workers",
        "A stored history that is no text ends each worker of the model at its start.",
        Edit("workers/length_keeper.py", "(msgspec.MsgspecError, UnicodeDecodeError, ", "(msgspec.MsgspecError, "),
        WORKER + "a_history_that_cannot_be_read_is_replaced",
    ),
    bug(
        "a target that starves batches",
        "Where chats alone miss their target, lane batch waits for ever.",
        Edit("workers/gate/predictor.py", "(offline or without <= target)", "True"),
        PURE + "predictor.py::test_an_engine_that_misses_the_target_without_it_takes_one",
    ),
    bug(
        "a peak of the texts as they are now",
        "Texts grow beyond the cache, and the engine evicts.",
        Edit("workers/gate/peak.py", "peak = max(peak, remaining * number + held)", "peak = max(peak, held)"),
        PURE + "peak.py::test_the_formula_equals_counting_on_a_thousand_random_batches",
    ),
    bug(
        "headroom that forgets the texts that end later",
        "A claim gets a budget that does not fit.",
        Edit("workers/gate/peak.py", "            before = max(before, term)", "            pass"),
        PURE + "peak.py::test_headroom_is_the_most_that_one_more_text_may_hold",
    ),
    bug(
        "a cold history that guesses",
        "The first texts of a new model are evicted.",
        Edit("workers/gate/lengths.py", "LengthWindow(unknown=WINDOW // 2)", "LengthWindow((1,))"),
        PURE + "lengths.py::test_at_first_every_text_is_expected_to_use_its_limit",
    ),
    bug(
        "draws that ignore what a text has generated",
        "A long text counts as ending at once for as long as it runs.",
        Edit("workers/gate/gate.py", "text.lowest <= text.generated < text.limit or ", ""),
        PURE + "gate.py::test_a_text_that_has_outgrown_its_draws_is_drawn_again",
    ),
    bug(
        "pinned tokens count as free",
        "Kept prefixes are evicted, or texts are.",
        Edit(
            "workers/gate/gate.py",
            "int(self.tokens * (1 - self.reserve)) - self.taken",
            "int(self.tokens * (1 - self.reserve))",
        ),
        PURE + "gate.py::test_what_is_pinned_or_reserved_is_taken",
    ),
    bug(
        "a burst of prompts is the cost of one",
        "First tokens that waited for many prompts keep lane batch out of an idle engine for minutes.",
        Edit("workers/gate/colocation.py", "if text.is_alone:", "if True:"),
        PURE + "colocation.py::test_a_burst_of_prompts_is_not_taken_for_the_cost_of_one",
    ),
    bug(
        "steps that compute prompts are usual steps",
        "A few long prompts keep lane batch out of the engine.",
        Edit("workers/gate/colocation.py", "elif held and all(each.generated for each in held):", "elif held:"),
        PURE + "colocation.py::test_only_steps_without_a_prompt_are_learned",
    ),
    bug(
        "a reserve that never falls",
        "One bad minute costs a fifth of the cache for ever.",
        Edit("workers/gate/reserve.py", "max(MIN_RESERVE, self.share - STEP)", "self.share"),
        PURE + "gate.py::test_the_reserve_rises_with_evictions_and_falls_without",
    ),
    bug(
        "an outlier that the fit believes",
        "After one pause of the machine no line of a batch begins for a minute.",
        Edit("workers/gate/predictor.py", "max(-bound, min(bound, residual))", "residual"),
        PURE + "predictor.py::test_steps_and_first_tokens_are_predicted_within_a_tenth",
    ),
    bug(
        "a gate that predicts only what runs",
        "The line that breaks the target is let in.",
        Edit("workers/gate/predictor.py", "texts + 1, held + prompt", "texts, held"),
        PURE + "predictor.py::test_the_line_in_question_counts",
    ),
    bug(
        "answers that were cut off are learned",
        "Cancelled jobs make answers look short, and texts are evicted.",
        Edit("workers/gatekeeper.py", 'if piece.finish in ("stop", "length") and', "if piece.finish and"),
        KEEPER + "only_answers_that_ended_by_themselves_or_at_their_limit_are_learned",
    ),
    bug(
        "the oldest tenant is forgotten first",
        "The gate forgets the answers of a tenant that has been there for long and sends all the time.",
        Edit("workers/gate/lengths.py", "        self._tenants.move_to_end((lane, tenant))\n", ""),
        "tests/workers/gate/test_lengths.py::test_the_history_is_bounded",
    ),
    bug(
        "tenants predicted from all answers of their lane",
        "A tenant of short answers waits for room that only the long ones of others would need.",
        Edit("workers/gatekeeper.py", "text(job.priority, job.tenant, prompt", 'text(job.priority, "", prompt'),
        "tests/workers/test_gatekeeper.py::test_a_tenant_is_predicted_from_its_own_answers",
    ),
    bug(
        "ended texts that count again each second",
        "The more texts have ended, the more evictions the gate overlooks: it no longer leaves more of the cache free.",
        Edit("workers/gatekeeper.py", "        self._ended = 0\n        if self.limits", "        if self.limits"),
        "tests/workers/test_gatekeeper.py::test_answers_that_ended_count_once_beside_evictions",
    ),
    bug(
        "the engine gets whatever there is a slot for",
        "A full cache evicts texts as before.",
        Edit("workers/choices.py", "self._has_turn(attempt) and self._passes(attempt)", "self._has_turn(attempt)"),
        WORKER + "with_the_gate_a_full_cache_evicts_nothing",
    ),
    bug(
        "small jobs overtake at the gate",
        "A large job waits for as long as small ones come.",
        Edit("workers/choices.py", "self._has_turn(attempt) and self._passes(attempt)", "self._passes(attempt)"),
        WORKER + "jobs_of_a_lane_begin_in_the_order_of_their_claims",
    ),
    bug(
        "a line at the gate stops every claim",
        "A chat that would fit waits for a line of a batch to begin.",
        Edit(
            "workers/choices.py",
            "self.gate.room(self._held_back(batch=False))",
            "self.gate.room(self._held_back(batch=False) + self._held_back(batch=True))",
        ),
        WORKER + "a_waiting_job_does_not_hold_back_chats_that_fit",
    ),
    bug(
        "a cancelled job waits at the gate for ever",
        "Its reader hears nothing until a place is free that it does not need.",
        Edit("workers/worker.py", "if ran and attempt.over:", "if False:"),
        WORKER + "a_job_that_waits_at_the_gate_ends_at_once",
    ),
    bug(
        "an older worker overwrites a newer history",
        "During an upgrade new workers lose what they have learned.",
        lua("lengths", "then return 0 end", "then end"),
        WORKER + "a_newer_history_is_left_to_newer_workers",
    ),
)
