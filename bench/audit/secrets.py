"""Secrets in the tree or in the history that led to it, by detect-secrets; those of tests and examples are known.

Every line that was ever added is looked at once, whichever commit added it, merges included: those are compared with
their first parent, so that what a merge itself brings in is seen. Lock files are left out: they are hashes.
"""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath

import msgspec

from bench.audit.tools import AuditTools, ToolResult, run
from bench.program import WrongArguments

KNOWN = Path(__file__).with_name("known_secrets.json")
LEFT_OUT = ("*.lock", "*.svg", "*.png", "bench/audit/known_secrets.json")
PATCHES = (
    *("log", "-p", "--diff-merges=first-parent", "--unified=0", "--format="),
    *("--no-color", "--no-ext-diff", "--no-textconv", "--text", "--src-prefix=a/", "--dst-prefix=b/"),
)
"""Git's words for what every commit adds, whatever its user's settings are."""
HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
BREAK = re.compile("[\r\v\f\x1c-\x1e\x85\u2028\u2029]")


class KnownFinding(msgspec.Struct, frozen=True):
    """What looks like a secret and is none."""

    type: str
    sha1: str
    """Of the secret, as detect-secrets writes it."""
    where: str


class Finding(msgspec.Struct, frozen=True):
    """The part of what the tool found that tells one from another."""

    type: str
    hashed_secret: str
    line_number: int


class Scan(msgspec.Struct):
    """The tool's report."""

    results: dict[str, list[Finding]]


def check(tools: AuditTools, known: Path = KNOWN) -> list[str]:
    """Secrets that are not known, in words; never the secret. Raises WrongArguments without a history."""
    expected = {(each.type, each.sha1) for each in msgspec.json.decode(known.read_bytes(), type=list[KnownFinding])}
    lines = added_lines(_git(tools, *PATCHES))
    tree = _git(tools, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in tree.split("\0"):
        path = tools.root / name
        if name and path.is_file() and not any(PurePosixPath(name).match(each) for each in LEFT_OUT):
            lines[_kind(name)] |= dict.fromkeys(path.read_text(encoding="utf-8", errors="replace").split("\n"), name)
    return scanned(tools, lines, expected)


def scanned(
    tools: AuditTools, lines: Mapping[str, Mapping[str, str]], expected: Collection[tuple[str, str]]
) -> list[str]:
    """What the tool makes of these lines (each with the file it was in), by kind of file."""
    with tempfile.TemporaryDirectory(prefix="penstock-audit-") as folder:
        for kind, texts in lines.items():
            text = "\n".join(BREAK.sub(" ", each) for each in texts) + "\n"  # the tool's lines are to be these lines
            (Path(folder) / f"lines{kind}").write_text(text, encoding="utf-8", errors="replace")
        said = tools.run("detect-secrets", "scan", "--no-verify", "--all-files", ".", cwd=Path(folder))
    found: list[str] = []
    for name, findings in _report(said).items():
        files = list(lines[name.removeprefix("./").removeprefix("lines")].values())
        for each in findings:
            if (each.type, each.hashed_secret) not in expected:
                found.append(f"{files[each.line_number - 1]}: {each.type} {each.hashed_secret}")
    return found


def _report(said: ToolResult) -> dict[str, list[Finding]]:
    try:
        return msgspec.json.decode(said.out, type=Scan).results
    except msgspec.MsgspecError:
        raise WrongArguments(f"detect-secrets left no report: {said.err[-300:]}") from None


def added_lines(log: str) -> dict[str, dict[str, str]]:
    """Every line that a log of patches without context adds, by kind of file, each once, with a file it was in."""
    lines: dict[str, dict[str, str]] = defaultdict(dict)
    name, removed, added = "", 0, 0
    for line in log.split("\n"):
        if added and line.startswith("+"):
            added -= 1
            if name:
                lines[_kind(name)].setdefault(line[1:], f"{name} (history)")
        elif removed and line.startswith("-"):
            removed -= 1
        elif line.startswith("+++ "):
            name = _name_of(line)
        elif hunk := HUNK.match(line):
            removed, added = (1 if count is None else int(count) for count in hunk.groups())
    return lines


def _name_of(header: str) -> str:
    """Of the file that a header of a patch names; "" if its lines are not looked at."""
    name = header.removeprefix("+++ ").rstrip("\t").removeprefix("b/")
    return "" if any(PurePosixPath(name).match(each) for each in ("/dev/null", *LEFT_OUT)) else name


def _kind(name: str) -> str:
    """What the tool goes by."""
    return PurePosixPath(name).suffix or ".txt"


def _git(tools: AuditTools, *words: str) -> str:
    said = run(["git", "-c", "core.quotePath=false", *words], tools.root)
    if said.code:
        raise WrongArguments(f"git {words[0]}: {said.err.strip()[:300]}\nnext:  run it in a clone of the project")
    return said.out.decode("utf-8", "replace")


def as_known(findings: Iterable[str]) -> list[KnownFinding]:
    """Findings as they stand in the list of what is known."""
    split = (each.rpartition(": ") for each in findings)
    return [KnownFinding(rest.rpartition(" ")[0], rest.rpartition(" ")[2], where) for where, _, rest in split]
