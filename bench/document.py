"""`python -m bench.document`: writes the tables of the docs from bench/results and the source, between their marks.

A page says `<!-- results: jobs -->` for a table, `<!-- plot: jobs-cpu -->` for a picture, `<!-- faults: chaos -->` for
a chaos run, `<!-- cost: gateway -->` for the short table of the README, `<!-- goals: page -->` for all goals of the
page's tables, `<!-- goals: batch -->` for those of one run, `<!-- entrypoints: chats -->` for requests as other servers
answer them, and the marks of bench/reference.py for the tables of docs/metrics.md. Behind stands `<!-- end -->`. What
is between is never typed.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from bench import reference, report
from bench.chaos import report as chaos
from bench.conformance import entrypoints

PAGES_OF_DOCS = (
    "guarantees",
    "batches",
    "api",
    "metrics",
    "records",
    "traces",
    "clients",
    "planning",
)

PAGES = (
    Path("README.md"),
    *(Path("docs", f"{name}.md") for name in PAGES_OF_DOCS),
)

OF_RESULTS = ("results", "plot", "faults", "cost")
"""Kinds of marks whose name is that of a file of results."""
KINDS = "|".join((*OF_RESULTS, "goals", "entrypoints", *reference.WRITERS))
MARKED = re.compile(rf"(<!-- ({KINDS}): ([A-Za-z0-9/-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
SHOWN = re.compile(r"<!-- results: ([a-z0-9-]+) -->")

RIVALS = {
    "penstock": "Penstock",
    "router": "SGLang router + engine server",
    "plain": "FastAPI, a PUBLISH per token",
    "dynamo": "Dynamo (tokenizes too)",
    "litellm": "LiteLLM",
}
"""As the README names them."""

VERDICTS: tuple[report.Verdict, ...] = ("missed", "undecided", "reached")


def filled(page: str, results: Path, plots: Path) -> str:
    """The page with every marked part written anew. Raises OSError, msgspec.ValidationError for a broken result."""
    shown = [results / f"{name}.json" for name in SHOWN.findall(page)]

    def part(found: re.Match[str]) -> str:
        if found[2] == "entrypoints":
            text = entrypoints.as_table(found[3])
        elif found[2] in reference.WRITERS:
            text = reference.WRITERS[found[2]](found[3])
        elif found[2] != "goals":
            text = _part(found[2], found[3], results, plots)
        elif found[3] == "page":
            text = _goals([report.load(path) for path in shown if path.exists()])
        else:
            only = report.load(results / f"{found[3]}.json")
            text = f"{_goals([only])}\n\n{report.source(only)}"
        return f"{found[1]}{text}\n{found[4]}"

    return MARKED.sub(part, page)


def _part(kind: str, name: str, results: Path, plots: Path) -> str:
    path = plots / f"{name}.png" if kind == "plot" else results / f"{name}.json"
    if path.exists() and kind == "plot":
        return f"[![{name}]({plots.name}/{name}.png)]({plots.name}/{name}.svg)"
    if not path.exists():
        return f"Not measured yet: `penstock bench {name.partition('-')[0]}`."
    if kind == "faults":
        return chaos.as_markdown(msgspec.json.decode(path.read_bytes()))
    return WRITERS[kind](report.load(path))


def _goals(found: Sequence[report.Report]) -> str:
    """Every goal of these runs, the missed ones first. What must simply be so, such as no error, is no goal."""
    goals = [(each, ratio) for each in found for ratio in each.ratios if ratio.verdict and ratio.at_most != 0]
    goals.sort(key=lambda goal: VERDICTS.index(goal[1].verdict))
    counts = Counter(ratio.verdict for _, ratio in goals)
    lines = [", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS) + ":", ""]
    lines += ["| run | figure | measured | goal | |", "| --- | --- | ---: | --- | --- |"]
    for each, ratio in goals:
        verdict = f"**{ratio.verdict}**" if ratio.verdict == "missed" else ratio.verdict
        lines.append(f"| {each.name} | {ratio.what} | {ratio.figure} | {ratio.goal} | {verdict} |")
    return "\n".join(lines)


def _cost(found: report.Report) -> str:
    """CPU per token and time to the first token at the highest concurrency, a column a system; and when it was so."""
    top = max(row["streams"] for row in found.rows)
    rows = {row["system"]: row for row in found.rows if row["streams"] == top}
    systems = [name for name in RIVALS if name in rows]
    figures = (("CPU per token, us", "cpu_us_per_token", 1), ("time to first token, p50, ms", "ttft_p50_ms", 0))
    table = "\n".join(
        f"| {' | '.join(cells)} |"
        for cells in (
            [f"{top} streams", *(RIVALS[name] for name in systems)],
            ["---", *["---:"] * len(systems)],
            *([words, *(report.cell(rows[name][key], digits) for name in systems)] for words, key, digits in figures),
        )
    )
    tree = f"commit {found.commit}" if found.commit else "its file names no commit"
    return f"{table}\n\nMeasured on {found.date}; {tree}."


WRITERS: Mapping[str, Callable[[report.Report], str]] = {
    "results": report.as_markdown,
    "cost": _cost,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if --check found that the page is behind."""
    parser = argparse.ArgumentParser(prog="python -m bench.document", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if something would change")
    parser.add_argument("--page", type=Path, action="append", help="default: all that have such marks")
    parser.add_argument("--results", type=Path, default=report.RESULTS)
    args = parser.parse_args(argv)
    behind = False
    for page in args.page or PAGES:
        before = page.read_text(encoding="utf-8")
        after = filled(before, args.results, page.parent / "plots")
        behind |= after != before
        if not args.check:
            page.write_text(after, encoding="utf-8")
    return int(behind and args.check)


if __name__ == "__main__":
    sys.exit(main())
