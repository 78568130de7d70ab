"""Bugs in the planner: formulas of the papers as they must not be copied."""

from __future__ import annotations

from bench.planted.bug import Edit, bug

MEMORY, ROOFLINE = "tests/planner/test_memory.py::test_", "tests/planner/test_roofline.py::test_"

BUGS = (
    bug(
        "a plan keeps room for whole answers",
        "It counts each request with all its tokens, although half of its answer is not there yet in the mean: fewer "
        "requests fit than SLM-Pareto's Table 1 says.",
        Edit("planner/load.py", "return self.prompt + self.answer / 2", "return self.prompt + self.answer"),
        MEMORY + "table_1_of_the_paper",
    ),
    bug(
        "a roofline reads each key once for each query head",
        "The defect of LLM-Viewer: models with grouped queries seem bound by their cache.",
        Edit("planner/roofline.py", "2 * batch * read * given.kv_heads * hd", "2 * batch * read * heads * hd"),
        ROOFLINE + "attention_reads_each_key_once_and_stores_one_row",
    ),
    bug(
        "narrow weights seem to compute faster",
        "Weights of 4 bits are widened before they are multiplied with activations of 16 bits; a plan that counts with "
        "the rate of 8 bits promises twice the prefill.",
        Edit("planner/facts/device.py", "wide = max(w_bits, a_bits)", "wide = w_bits"),
        "tests/planner/facts/test_catalogue.py::test_a_product_runs_at_the_narrowest_type_that_holds_both_operands",
    ),
    bug(
        "objectives are judged one by one",
        "DistServe's search: a rate counts as kept although fewer requests than wanted keep both objectives.",
        Edit(
            "planner/serving.py",
            "both = [one and other for one, other in zip(ttft, tpot, strict=True)]",
            "both = min(ttft, tpot, key=sum)",
        ),
        "tests/planner/test_serving.py::test_both_objectives_count_and_not_each_by_itself",
    ),
    bug(
        "a replica holds the whole cache on each of its GPUs",
        "Plans over several GPUs seem to hold as few requests as one GPU, and the search prefers many small replicas.",
        Edit(
            "planner/parallel.py",
            "token = self.model.kv_token_bytes(self.precision.kv, self.plan.heads_shared_by) / self.plan.pp",
            "token = self.model.kv_token_bytes(self.precision.kv)",
        ),
        "tests/planner/test_parallel.py::test_attention_dp_holds_its_matrices_whole_and_each_cache_once",
    ),
    bug(
        "the knee is that of single doublings",
        "Noise of 3 % decides whether a doubling gains a tenth: the batch that is recommended changes from run to run.",
        Edit(
            "planner/knee.py",
            "is_fitted = line is not None and _misfit(medians, *line) <= MAX_MISFIT",
            "is_fitted = False",
        ),
        "tests/planner/test_knee.py::test_a_hundred_curves_with_noise_of_three_percent",
    ),
    bug(
        "measured settings of any server are written",
        "Somebody measures a llama-server from the folder of a Penstock, and changes the Penstock's batch.",
        Edit("cli/tune/frontier.py", "if context is None:", "if not server:"),
        "tests/cli/tune/test_tune.py::test_it_writes_nothing_for_another_server",
    ),
    bug(
        "a short try cuts the cache below a context",
        "The settings that it writes make the server refuse prompts that it took before.",
        Edit(
            "planner/tuning.py",
            "return Recommendation(batch, max(least, batch * request), withheld=why)",
            "return Recommendation(batch, batch * request, withheld=why)",
        ),
        "tests/planner/test_tuning.py::test_no_cache_is_smaller_than_a_context",
    ),
    bug(
        "a batch is advised where throughput still rises",
        "A sweep that ends too early lowers the batch of a server that was well set.",
        Edit("planner/tuning.py", 'return found.knee.reason if found.knee.is_beyond else ""', 'return ""'),
        "tests/planner/test_tuning.py::test_the_advice_says_what_more_would_cost",
    ),
    bug(
        "the largest batch that fits is not looked at",
        "A GPU that holds 55 requests is counted with 32: the plan buys more GPUs than the load needs.",
        Edit("planner/frontier.py", "    if last < most:\n", "    if last > most:\n"),
        "tests/planner/test_frontier.py::test_the_largest_batch_that_fits_is_one_of_them",
    ),
    bug(
        "a short run judges a rate",
        "The queue grows slowly: the goodput that is named collapses after a minute.",
        Edit("planner/goodput.py", "LONGER = (1, 4, 16)", "LONGER = (1,)"),
        "tests/planner/test_goodput.py::test_a_queue_that_grows_slowly_does_not_hold",
    ),
    bug(
        "a step that gives one token alone counts as the others",
        "An engine that multiplies with a vector there is twice as quick: two clients are predicted a third too much "
        "throughput.",
        Edit(
            "planner/calibration.py",
            "lone_s = median([1 / each.pace for each in alone]) if len(alone) >= MIN_ALONE else None",
            "lone_s = None",
        ),
        "tests/bench/test_frontier.py::test_loads_of_known_step_times_are_predicted",
    ),
    bug(
        "llama.cpp's prompts are computed in the order of their arrival",
        "The simulator says that all wait alike where the last slots starve: its time to the first token is twice that "
        "of the Penstock with 32 clients.",
        Edit("planner/simulator/engine.py", "texts.sort(key=self._slots.__getitem__)", "pass"),
        "tests/planner/simulator/test_engine.py::test_by_slot_prompts_are_computed_in_the_order_of_their_slots",
    ),
    bug(
        "loads that are held out are fitted",
        "The error that `plan fit` prints is none of a prediction: it is small however badly the simulator predicts.",
        Edit(
            "planner/prediction.py",
            "fitted([text for load in loads[::2] for text in load], limits)",
            "fitted([text for load in loads for text in load], limits)",
        ),
        "tests/planner/test_prediction.py::test_what_is_held_out_is_not_fitted",
    ),
    bug(
        "the time of a token is not judged",
        "`plan fit` says that step times may be planned with that are off by a third.",
        Edit(
            "planner/prediction.py",
            "worst = max(getattr(errors, name) for name in FIGURES)",
            "worst = max(errors.tokens_s, errors.ttft_p50_s, errors.ttft_p90_s)",
        ),
        "tests/planner/test_prediction.py::test_one_figure_that_is_too_far_is_enough",
    ),
    bug(
        "copies on one GPU take no turns",
        "Each copy seems to have the whole GPU: `plan place` puts all of them on one.",
        Edit("planner/placement.py", " * max(1, self.gpu.stepping)", ""),
        "tests/planner/test_placement.py::test_copies_on_one_gpu_take_turns",
    ),
    bug(
        "a simulated engine leaps over an eviction",
        "Steps that are simulated at once pass the moment at which the cache is full: texts hold more than there is.",
        Edit(
            "planner/simulator/engine.py",
            "steps = min(steps, (self.shape.kv_tokens - self.held) // texts)",
            "steps = min(steps, self.shape.kv_tokens)",
        ),
        "tests/planner/simulator/test_pool.py::test_no_leap_passes_an_eviction",
    ),
    bug(
        "a counter of energy that stands still is zero joules",
        "A Penstock's metrics follow the GPU every few seconds: a short measurement would seem to cost no energy.",
        Edit("bench/energy.py", "if steps and min(steps) > 0 else None", "if steps else None"),
        "tests/bench/test_energy.py::test_energy_between_two_readings",
    ),
    bug(
        "a connection that the server has closed fails its next request",
        "llama-server closes after each stream without saying so: half of the requests to it would count as failed.",
        Edit(
            "bench/table1/client.py",
            "if is_kept and answer.fault.startswith(CUT_OFF)",
            "if not is_kept and answer.fault.startswith(CUT_OFF)",
        ),
        "tests/cli/tune/test_tune.py::test_a_server_that_closes_after_each_answer_loses_none",
    ),
)
