"""`python -m bench.document`: writes the tables of the docs from bench/results and the source, between their marks.

A page says `<!-- cost: gateway-rivals -->` for the short table of the README, `<!-- entrypoints: chats -->` for
requests that other servers answer otherwise, `<!-- metrics: requests -->` for a table of docs/metrics.md,
`<!-- rows: stack -->` for all rows of a result, and `<!-- faults: hosts -->` for the silence in each fault. Behind
stands `<!-- end -->`. What is between is never typed.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench import report
from bench.hosts.rows import ROWS
from telemetry.catalogue import GROUPS, LABELS, MetricSpec

PAGES = (Path("README.md"), Path("docs/clients.md"), Path("docs/deployment.md"), Path("docs/metrics.md"))
KINDS = "cost|entrypoints|faults|metrics|rows"
MARKED = re.compile(rf"(<!-- ({KINDS}): ([A-Za-z0-9/-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

RIVALS = {
    "penstock": "Penstock",
    "router": "SGLang router + engine server",
    "plain": "FastAPI, a PUBLISH per token",
    "dynamo": "Dynamo (tokenizes too)",
    "litellm": "LiteLLM",
}
"""As the README names them."""


def filled(page: str, results: Path) -> str:
    """The page with every marked part written anew. Raises OSError, msgspec.ValidationError for a broken result."""

    def part(found: re.Match[str]) -> str:
        if found[2] == "entrypoints":
            text = entrypoints(found[3])
        elif found[2] == "cost":
            text = _cost(report.load(results / f"{found[3]}.json"))
        elif found[2] == "faults":
            text = _faults(msgspec.json.decode((results / f"{found[3]}.json").read_bytes()))
        elif found[2] == "rows":
            text = _rows(report.load(results / f"{found[3]}.json"))
        else:
            text = metrics(found[3])
        return f"{found[1]}{text}\n{found[4]}"

    return MARKED.sub(part, page)


def _table(*rows: tuple[str, ...], numbers: bool = False) -> str:
    """`numbers`: all columns but the first are set to the right."""
    head, *body = rows
    line = ("---", *("---:" if numbers else "---" for _ in head[1:]))
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, line, *body))


def _code(value: object) -> str:
    return f"`{value}`"


def metrics(group: str) -> str:
    """The metrics of a group of the catalogue ("requests" for "Requests"), or all of their labels ("labels")."""
    if group == "labels":
        return _table(("label", "values"), *((_code(name), said) for name, said in LABELS.items()))
    (specs,) = (specs for name, specs in GROUPS.items() if name.lower().replace(",", "").replace(" ", "-") == group)
    rows = []
    for spec in specs.values():
        labels = ", ".join(map(_code, spec.labels))
        said = _with_values(spec) + (f" **Watch**: {spec.watch}." if spec.watch else "")
        said = f"{said} Histogram." if spec.kind == "histogram" else said
        rows.append((_code(spec.name), labels, spec.role, said.replace("|", r"\|")))
    return _table(("metric", "labels", "from", ""), *rows)


def _with_values(spec: MetricSpec) -> str:
    """What a metric means; with the values of its last label, if its meaning does not name them."""
    if not spec.values or all(value in spec.meaning for value in spec.values):
        return spec.meaning
    return f"{spec.meaning} `{spec.labels[-1]}`: {', '.join(spec.values)}."


ENTRYPOINTS = Path(__file__).parent / "conformance" / "entrypoints.toml"
"""Requests of vLLM's documentation; tests/bench/test_entrypoints.py sends each."""
IGNORED = "ignored, and named in `X-Ignored-Fields`: "
"""How `instead` begins for fields without effect; they share one row."""


def entrypoints(group: str) -> str:
    """The requests of one group that are answered otherwise, and last the fields that are ignored."""
    every = tomllib.loads(ENTRYPOINTS.read_text("utf-8"))[group]
    other = [each for each in every if "instead" in each]
    fields = [each["instead"].removeprefix(IGNORED) for each in other if each["instead"].startswith(IGNORED)]
    ignored = ["any unknown field" if field == "no_such_field" else _code(field) for field in fields]
    rows = [f"| {each['what']} | {each['instead']} |" for each in other if not each["instead"].startswith(IGNORED)]
    if ignored:
        rows.append(f"| {', '.join(ignored)} | {IGNORED.removesuffix(': ')} |")
    head = f"{len(every) - len(other)} of {len(every)} requests have the same answer. These do not:"
    return "\n".join([head, "", "| vLLM | Penstock |", "| --- | --- |", *rows])


def _cost(found: report.Report) -> str:
    """CPU per token and time to the first token at the highest concurrency, a column a system; and when it was so."""
    top = max(row["streams"] for row in found.rows)
    rows = {row["system"]: row for row in found.rows if row["streams"] == top}
    systems = [name for name in RIVALS if name in rows]
    figures = (("CPU per token, us", "cpu_us_per_token", 1), ("time to first token, p50, ms", "ttft_p50_ms", 0))
    body = [(words, *(report.cell(rows[name][key], digits) for name in systems)) for words, key, digits in figures]
    table = _table((f"{top} streams", *(RIVALS[name] for name in systems)), *body, numbers=True)
    return f"{table}\n\n{_measured(found.date, found.commit)}"


def _rows(found: report.Report) -> str:
    """Every row, all columns."""
    rows = [tuple(str(each) for each in row.values()) for row in found.rows]
    return f"{_table(tuple(found.rows[0]), *rows)}\n\n{_measured(found.date, found.commit)}"


def _faults(found: Mapping[str, Any]) -> str:
    """How long readers heard nothing in each fault between hosts."""
    injected = {row.id: row.inject for row in ROWS}
    body = []
    for fault in found["faults"]:
        figures = (f"{fault[name] / 1000:.1f}" for name in ("stall_p50_ms", "stall_p99_ms") if name in fault)
        silence = " / ".join(figures) or "not measured"
        body.append((f"{fault['title']}: {injected[fault['id']]}", f"{'' if fault['passed'] else 'FAIL; '}{silence}"))
    return f"{_table(('fault', 'silence, p50 / p99, s'), *body)}\n\n{_measured(found['date'], found['commit'])}"


def _measured(date: str, commit: str) -> str:
    return f"Measured on {date}; {f'commit {commit}' if commit else 'its file names no commit'}."


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
        after = filled(before, args.results)
        behind |= after != before
        if not args.check:
            page.write_text(after, encoding="utf-8")
    return int(behind and args.check)


if __name__ == "__main__":
    sys.exit(main())
