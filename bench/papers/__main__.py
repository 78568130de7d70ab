"""`python -m bench.papers`: the planner's figures beside those that papers published, and how long its searches take.

Everything is computed; it needs no GPU and takes about a minute. The comparisons are the same on every machine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from bench.papers.comparisons import COMPARISONS, EFFICIENCY, Comparison
from bench.program import OUT, BenchProgram, ProgramRun
from bench.report import Ratio, columns
from planner.facts import catalogue
from planner.load import HALF, RequestLengths
from planner.search import SearchInput, search

COLUMNS = columns("""
    paper: paper; case: case; unit: unit; published: published; planner: planner; ratio: planner / published .2
""")
SEARCHES = (("llama-3.1-70b", "h200", 8), ("llama-3.1-8b", "l4", 1))
NOTES = (
    "Where a paper gives a range, the ratio is 1 within it. `planner` is computed at 0.7 of the roofline for what an "
    "engine reaches, and at the roofline itself for ScaleLLM's Table 1, LServe and Lamina.",
    "SLM-Pareto: the knee of OPT-125M comes out at half of the paper's, which names about one batch for both models. "
    "An engine takes a fixed time for each step, which a roofline lacks; it puts the knee of small models later.",
    "ScaleLLM: at 8 and 16 at once the paper is quicker than the bound, so its routing is not even.",
    "APEX: its times are sums of measured kernels, those here a share of a bound. The example's arrivals are in a "
    "trace that is not published with it: its means stand for it here, all requests at once. Two stages come out too "
    "quick: here they are always busy, while APEX reports 8 % idle and 5.6 requests for each pass of a stage. Power "
    "rises here with the busier of arithmetic and memory, and communication costs idle power alone. APEX has 80 GiB "
    "of memory; with 80e9 bytes attention-dp would not fit, and its cache is smaller here, for APEX leaves the tables "
    "of embeddings out of the weights.",
    "APEX, searches: the paper's figures are the most of many models, traces and clusters, these the most of six "
    "searches of one model. Its program also takes the clock rate of the GPUs, which this planner does not choose.",
    "LServe: the bound of a step, without the paper's quantised weights and cache, is within its range at 64k "
    "and 96k, and a little beyond it at 128k.",
    "Lamina: with one batch, the devices of one kind wait for those of the other. With short requests so many fit that "
    "two H100 are bound by arithmetic, which four are not. The paper compares systems of similar cost; 2 x H100 with "
    "4 x H20 beside 4 x H100 is the choice of this program, and its lengths are, too.",
)


def row(each: Comparison) -> dict[str, Any]:
    """One line of the table."""
    return {
        "paper": each.paper,
        "case": each.case,
        "unit": each.unit,
        "published": " to ".join(f"{value:g}" for value in each.published),
        "planner": "does not fit" if each.planner is None else f"{each.planner:.4g}",
        "ratio": each.ratio,
    }


def ratios(found: Sequence[Comparison]) -> list[Ratio]:
    """What must agree: the figures that the planner's formulas were taken from, and orders."""
    exact = [each for each in found if "Table 1, opt" in each.case or "best layout" in each.case]
    apex = [each.planner or 0.0 for each in found if each.paper == "APEX" and each.unit == "tokens/s"]
    steps = [each.ratio or 0.0 for each in found if each.paper == "ScaleLLM" and each.unit == "ms a token"]
    return [
        Ratio.none("SLM-Pareto's Table 1 and ScaleLLM's best layouts: figures that differ",
                   sum(each.ratio != 1.0 for each in exact)),
        Ratio.none("APEX's example: plans out of its order by tokens a second",
                   sum(one < other for one, other in pairwise(apex))),
        Ratio.held("papers.step", "ScaleLLM's Table 1: the largest distance of a step, %",
                   100 * max(abs(each - 1) for each in steps), digits=0),
    ]  # fmt: skip


def timed() -> list[Ratio]:
    """How long the searches take that the plan must answer within a minute."""
    found = []
    for model, device, gpus in SEARCHES:
        given = SearchInput(catalogue.model(model), catalogue.device(device), gpus, RequestLengths(), HALF, EFFICIENCY)
        began = time.monotonic()
        search(given)
        what = f"search of {model} on {gpus} x {device}, s"
        found.append(Ratio.held("papers.search_s", what, time.monotonic() - began))
    return found


def _run(run: ProgramRun) -> int:
    found = [each for compared in COMPARISONS for each in compared()]
    title = "Published figures of papers, and the planner's"
    kept = run.result("papers", title, COLUMNS, [row(each) for each in found], [*ratios(found), *timed()], NOTES)
    return int(run.keep(kept).missed)


main = BenchProgram("penstock bench papers", __doc__, _run).taking(OUT)

if __name__ == "__main__":
    main.exit()
