"""`python -m bench.mutants`: would the test suite notice a mistake made by chance? Draws small changes of the product
and runs, in a copy of the tree, the tests that take no seconds: those that reach the changed line, the nearest first;
for a Lua script those of its folder, then of all rooms. Tells which changes no test noticed. A test that fails without
the change too has noticed nothing.

Every run draws another sample, from a seed that is printed first; `--seed N` repeats a sample. Exits 1 if fewer are
noticed than are wanted; 2 if its tool is not there."""

from __future__ import annotations

import difflib
import random
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from redis import Redis
from redis.exceptions import ResponseError

from bench import program
from bench.mutants.reach import Reach, measure
from bench.penstock import start_redis
from bench.processes import Processes
from bench.program import OUT, BenchProgram, Option, ProgramRun, WrongArguments, side_by_side
from bench.report import Ratio, columns
from bench.trials import NO_TESTS, PASSED, Strayed, TreeCopies, check_origins, copy_tree, run_tests
from streaming.redis.scripts import assemble

FOLDER = "streaming/lua"


class Mutant(msgspec.Struct, frozen=True):
    """A change drawn by chance."""

    file: str
    text: str
    """The whole file with the change."""

    @property
    def room(self) -> str:
        return FOLDER if self.file.endswith(".lua") else self.file.split("/", 1)[0]

    def name(self, before: str) -> str:
        """What changed, in one line; the same for as long as the changed lines and their place are. `before` is the
        file without the change."""
        sides: tuple[list[str], list[str]] = ([], [])
        for line in difflib.ndiff(before.splitlines(), self.text.splitlines()):
            if line.startswith(("- ", "+ ")):
                sides[line.startswith("+ ")].append(line[2:].strip())
        old, new = (" / ".join(side) or "nothing" for side in sides)
        return f"{self.file}:{self.line(before)}: {old} -> {new}"

    def line(self, before: str) -> int:
        """The number of the first line that changed, from 1."""
        pairs = enumerate(zip(before.splitlines(), self.text.splitlines(), strict=False), 1)
        return next((number for number, (old, new) in pairs if old != new), 1)


SWAPS = {
    "==": "~=",
    "~=": "==",
    "<=": "<",
    ">=": ">",
    "<": "<=",
    ">": ">=",
    "+": "-",
    "-": "+",
    "and": "or",
    "or": "and",
    "true": "false",
    "false": "true",
    "not": "",
}
TOKEN = re.compile(r"==|~=|<=|>=|[<>]|(?<= )[+-](?= )|\b(?:and|or|not|true|false)\b|(?<![\w.])\d+(?![\w.])")
APART = re.compile(r"--.*|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
"""Comments and strings: left as they are."""
CALL = re.compile(r"^\s*[\w.]+\(.*\)$")
GUARD = re.compile(r"^\s*if .* then return.* end$")
SET = re.compile(r"^\s*(?!\s|local\b)[\w.\[\]# ,+]+ = (?!function\b).+$")
OPENS = re.compile(r"\b(?:function|then|do|repeat)\b|[{(]")
CLOSES = re.compile(r"\b(?:end|until)\b|[})]")


def draw(server: Redis, tree: Path, seed: int, count: int) -> list[Mutant]:
    """As many, in an order drawn by chance; every change of every line is as likely as every other."""
    return list(islice((each for each in _drawn(tree, seed) if compiles(server, tree, each)), count))


def _drawn(tree: Path, seed: int) -> Iterator[Mutant]:
    texts = _texts(tree)
    chances = [(file, *change) for file, text in texts.items() for change in changes(text)]
    random.Random(seed).shuffle(chances)  # noqa: S311 - to be repeated
    for file, number, new in chances:
        yield Mutant(file, _replaced(texts[file], number, new))


def _texts(tree: Path) -> dict[str, str]:
    """The text of every Lua file by its name in the tree."""
    paths = sorted((tree / FOLDER).rglob("*.lua"))
    return {path.relative_to(tree).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def changes(text: str) -> Iterator[tuple[int, str]]:
    """Every change of a script: the line's number, and the line instead."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#!"):
            continue
        bare = APART.sub(lambda found: " " * len(found[0]), line)
        for token in TOKEN.finditer(bare):
            new = SWAPS[token[0]] if token[0] in SWAPS else str(int(token[0]) + 1)
            yield number, line[: token.start()] + new + line[token.end() :]
        if _is_statement(bare):
            yield number, ""


def _is_statement(bare: str) -> bool:
    """Can be left out: a call, an assignment or a guard that begins and ends in its line."""
    line = bare.rstrip()
    whole = len(OPENS.findall(line)) == len(CLOSES.findall(line))
    return whole and any(kind.match(line) for kind in (CALL, SET, GUARD))


def _replaced(text: str, number: int, new: str) -> str:
    lines = text.splitlines(keepends=True)
    lines[number - 1] = new + "\n"
    return "".join(lines)


def compiles(server: Redis, tree: Path, mutant: Mutant) -> bool:
    """One that does not is no mistake that anybody could ship."""
    texts = {Path(file).name: text for file, text in (_texts(tree) | {mutant.file: mutant.text}).items()}
    try:
        server.function_load(assemble(texts).text, replace=True)
    except ResponseError:
        return False
    return True


SOURCE = Path(__file__).parents[2]
TOOL = Path(".venv-audit/bin/python")
ROOMS = ("api", "workers", "scheduler", "offline", "streaming")
CHECKSUM = "tests/streaming/store/test_identity.py::test_every_change_of_the_store_raises_its_format"
"""It fails at every change of what scripts read and write, right or wrong: it notices no mistake."""
HANG_TIMEOUT_S, HANG_TIMEOUT_PER_TEST_S = 60.0, 0.5
"""Longer than any tests take that take no seconds: a mutant that makes one wait for ever is noticed."""
LUA_TESTS = [("tests/streaming",), ("tests/api", "tests/workers", "tests/scheduler", "tests/offline")]
LUA_TIMEOUT_S = 900.0
COLUMNS = columns("room: room; mutants: mutants; reached: reached; noticed: noticed; percent: %")


@dataclass(frozen=True, slots=True)
class MutantTrial:
    """What the tests made of one mutant."""

    mutant: Mutant
    name: str
    noticed: str
    """By which test; "" if all pass."""
    reached: bool
    """Whether a test runs the changed line in its own process; of a Lua script it is not measured."""


def try_mutant(copies: TreeCopies, reach: Reach, mutant: Mutant) -> MutantTrial:
    """Write it into a copy of the tree and run the tests there that reach it."""
    before = (copies.tree / mutant.file).read_text(encoding="utf-8")
    with copies.changed({mutant.file: mutant.text}) as changed:
        if mutant.file.endswith(".lua"):
            found = (_noticed(copies, changed, folders, LUA_TIMEOUT_S) for folders in LUA_TESTS)
            return MutantTrial(mutant, mutant.name(before), next(filter(None, found), ""), reached=True)
        tests = reach.tests(mutant.file, mutant.line(before))
        noticed = _noticed_by_any(copies, changed, tests) if tests else ""
        return MutantTrial(mutant, mutant.name(before), noticed, reached=bool(tests))


def _noticed_by_any(copies: TreeCopies, changed: Path, tests: Sequence[str]) -> str:
    """Of these tests, named in a file: there may be thousands."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as names:
        names.write("\n".join(tests))
        names.flush()
        return _noticed(copies, changed, (f"@{names.name}",), HANG_TIMEOUT_S + HANG_TIMEOUT_PER_TEST_S * len(tests))


def _noticed(copies: TreeCopies, changed: Path, tests: tuple[str, ...], limit_s: float) -> str:
    """The test among them that fails in the changed tree and passes in the sound one; what else ended the tests of the
    changed tree alone."""
    left_out = [CHECKSUM]
    while True:
        options = [f"--deselect={test}" for test in left_out]
        options += ["-x", "-m", "not slow"]
        run = run_tests(changed, tests, *options, limit_s=limit_s)
        if run.code in (PASSED, NO_TESTS):
            return ""
        with copies.changed({}) as sound:
            if run.failure is None:  # a fixture, an import, a test that waits for ever
                same = run_tests(sound, tests, *options, limit_s=limit_s)
                is_same = (same.code, same.failure) == (run.code, None)
                return "" if is_same else f"no test that could be run (pytest: {run.code})"
            test, _ = run.failure
            if run_tests(sound, [test]).code == PASSED:
                return test
        left_out.append(test)


def rows(trials: Sequence[MutantTrial]) -> list[dict[str, Any]]:
    """One for each room, and one for all."""
    found = []
    for room in (*sorted({each.mutant.room for each in trials}), "all"):
        of = [each for each in trials if room in ("all", each.mutant.room)]
        reached, noticed = sum(each.reached for each in of), sum(bool(each.noticed) for each in of)
        percent = 100 * noticed / max(len(of), 1)
        found.append({"room": room, "mutants": len(of), "reached": reached, "noticed": noticed, "percent": percent})
    return found


def _run(run: ProgramRun) -> int:
    args = run.args
    if not TOOL.exists():
        raise WrongArguments(f"{TOOL} is not there\nnext:  make mutants, which installs it")
    seed = random.SystemRandom().randrange(2**32) if args.seed is None else args.seed
    run.console.print(f"the sample: --seed {seed}")
    with tempfile.TemporaryDirectory(prefix="penstock-sound-") as folder:
        sound = Path(folder) / "sound"
        copy_tree(SOURCE, sound)  # once: the tree may be edited meanwhile
        copies = TreeCopies(sound, Path(folder))
        check_origins(sound)
        sample = _named(sound, _python(sound, seed, args.sample) + _lua(sound, seed, args.lua), args.only or "")
        run.console.print("one run of the tests that take no seconds: which lines does each reach?")
        data = Path(folder) / "reach" / "data"
        data.parent.mkdir()
        measure(sound, ROOMS, data)
        reach = Reach(sound, data)
        trials: list[MutantTrial] = []
        for trial in side_by_side([partial(try_mutant, copies, reach, mutant) for mutant in sample], args.jobs):
            trials.append(trial)
            verdict = f"noticed by {trial.noticed}" if trial.noticed else "SURVIVED"
            run.console.print(f"{len(trials)}/{len(sample)} {trial.name}: {verdict}", soft_wrap=True, markup=False)
    found = rows(trials)
    noticed = Ratio.held("mutants.noticed", "mutants noticed, %", found[-1]["percent"], digits=1)
    name, title = "mutants-some" if args.only else "mutants", "Mistakes made by chance"
    return run.keep(run.result(name, title, COLUMNS, found, [noticed], seed=seed))


def _named(tree: Path, mutants: Sequence[Mutant], only: str) -> list[Mutant]:
    """Those that are wanted, each name once."""
    befores = {file: (tree / file).read_text(encoding="utf-8") for file in {mutant.file for mutant in mutants}}
    by_name = {mutant.name(befores[mutant.file]): mutant for mutant in mutants}
    return [mutant for name, mutant in by_name.items() if only in name]


def _python(tree: Path, seed: int, count: int) -> list[Mutant]:
    """So many by chance."""
    files = [path.relative_to(tree).as_posix() for room in ROOMS for path in sorted((tree / room).rglob("*.py"))]
    command = [str(TOOL.absolute()), "-P", str(Path(__file__).with_name("drawn.py")), str(seed), str(count), *files]
    drawn = subprocess.run(command, cwd=tree, stdout=subprocess.PIPE, check=True).stdout
    return [msgspec.json.decode(each, type=Mutant) for each in drawn.splitlines()]


def _lua(tree: Path, seed: int, count: int) -> list[Mutant]:
    with (
        tempfile.TemporaryDirectory(prefix="penstock-mutants-") as folder,
        Processes(Path(folder)) as processes,
        Redis.from_url(start_redis(processes)) as server,
    ):
        return draw(server, tree, seed, count)


main = BenchProgram("python -m bench.mutants", __doc__, _run, Strayed).taking(
    Option("--sample", type=int, default=400, help="mutants of Python files (default: 400)"),
    Option("--lua", type=int, default=60, help="mutants of Lua scripts (default: 60)"),
    Option("--seed", type=int, help="of a sample, to repeat it (default: a new one)"),
    Option("--jobs", type=program.count, default=2, help="mutants tried at the same time (default: 2)"),
    Option("--only", metavar="TEXT", help="only mutants whose line has this in it"),
    OUT,
)

if __name__ == "__main__":
    main.exit()
