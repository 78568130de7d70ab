"""Bugs in the planner: formulas of the papers as they must not be copied."""

from __future__ import annotations

from bench.planted.bug import Bug, Edit

MEMORY, ROOFLINE = "tests/planner/test_memory.py::test_", "tests/planner/test_roofline.py::test_"

BUGS = (
    Bug(
        "a plan keeps room for whole answers",
        "It counts each request with all its tokens, although half of its answer is not there yet in the mean: fewer "
        "requests fit than SLM-Pareto's Table 1 says.",
        (Edit("planner/load.py", "return self.prompt + self.answer / 2", "return self.prompt + self.answer"),),
        (MEMORY + "table_1_of_the_paper",),
    ),
    Bug(
        "a roofline reads each key once for each query head",
        "The defect of LLM-Viewer: models with grouped queries seem bound by their cache.",
        (
            Edit(
                "planner/roofline.py",
                "2 * batch * read * given.kv_heads * hd",
                "2 * batch * read * heads * hd",
            ),
        ),
        (ROOFLINE + "attention_reads_each_key_once_and_stores_one_row",),
    ),
    Bug(
        "narrow weights seem to compute faster",
        "Weights of 4 bits are widened before they are multiplied with activations of 16 bits; a plan that counts with "
        "the rate of 8 bits promises twice the prefill.",
        (Edit("planner/facts/device.py", "wide = max(w_bits, a_bits)", "wide = w_bits"),),
        ("tests/planner/facts/test_catalogue.py::test_a_product_runs_at_the_narrowest_type_that_holds_both_operands",),
    ),
)
