"""CPU per token of this tree over that of another commit: both deployed at once, loaded in turn, judged by an interval.

Each round starts both trees anew, because the memory layout and hash seed of one start make a process a few percent
cheaper or dearer for as long as it lives. Each tree has a store server of its own (the same binary), and the processes
and settings of system `penstock` in the comparison of gateways. The load generator and the program that starts the
processes are this tree's for both; the simulated engine is part of each tree's worker.
"""

from __future__ import annotations

import shutil
import subprocess
import time
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from bench.environments import ROOT
from bench.gateway.figures import COLUMNS, Readings, rows
from bench.gateway.sweep import SETTLE_S, GatewayOptions, GatewayReadings, notes
from bench.gateway.systems import GatewaySystem, PenstockGateway, ServingGateway
from bench.load.plan import StreamReading, measure
from bench.program import ProgramRun, Testbed, WrongArguments
from bench.report import Ratio, Report
from bench.stats import median_interval
from bench.trials import Strayed, check_origins, copy_tree

ROLES = ("api", "workers", "streaming", "telemetry", "runtime", "penstock")
"""Packages that the processes of a measured deployment import; a tree may lack some."""


@dataclass(frozen=True, slots=True)
class Tree:
    """One source tree; `version` names its commit, with `-dirty` behind it where files differ from that commit."""

    path: Path
    version: str


def copy_of_this(target: Path) -> Tree:
    """The working tree as it is now, so that it may be edited while the comparison runs. Raises WrongArguments."""
    version = _git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    copy_tree(ROOT, target)
    return _checked(Tree(target, version))


def export(ref: str, target: Path) -> Tree:
    """The tree of a git commit, out of `git archive`: checkout and repository stay as they are. Raises
    WrongArguments."""
    commit = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    archive = target.with_suffix(".zip")
    _git("archive", "--format=zip", f"--output={archive}", commit)
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(target)
    archive.unlink()
    return _checked(Tree(target, commit[:12]))


def _checked(tree: Tree) -> Tree:
    """Its processes will import it, and nothing of the tree that is installed. Raises WrongArguments."""
    try:
        check_origins(tree.path, [name for name in ROLES if (tree.path / name).is_dir()])
    except subprocess.CalledProcessError as error:
        last_line = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise WrongArguments(
            f"the tree of {tree.version} cannot be imported in this environment: {last_line}"
        ) from error
    except Strayed as error:
        raise WrongArguments(f"the tree of {tree.version} cannot be run from a copy: {error}") from error
    return tree


def _git(*words: str) -> str:
    """Output of a git command in the checkout this program runs from. Raises WrongArguments."""
    program = shutil.which("git")
    if program is None:
        raise WrongArguments("--base needs git, which is not on the PATH")
    ran = subprocess.run([program, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if ran.returncode:
        said = " ".join(ran.stderr.split()) or "no such commit"
        raise WrongArguments(f"git {words[0]} {words[-1]}: {said} (in {ROOT})")
    return ran.stdout.strip()


NAME = "gateway-base"
THIS, BASE = "this", "base"
TURNS = (THIS, BASE, BASE, THIS)
"""Who is loaded when, within a level of a round: a drift of the machine that is steady over four turns cancels out."""
LEVELS = (1, 16, 256)
MIN_ROUNDS = 9
"""For a verdict: the interval of the median is then the 2nd to the 8th ratio, and one odd round on either side does not
decide."""

SHOWN = ("system", "streams", "requests", "tokens_per_s", "cpu_us_per_token", "errors", "parts")
BASE_COLUMNS = tuple(column for column in COLUMNS if column.key in SHOWN)


def turns(number: int) -> tuple[str, ...]:
    """The order within round `number` (from 0): ABBA and BAAB in turn."""
    return TURNS if number % 2 == 0 else tuple(BASE if name == THIS else THIS for name in TURNS)


def compare(run: ProgramRun, bound: float, options: GatewayOptions) -> int:
    """Measure, show and keep; 1 if a bound is missed. Raises WrongArguments, LoadFailed, Died: a comparison that lacks
    a round is not judged."""
    played, total = GatewayReadings(), options.rounds * len(options.levels) * len(TURNS)
    with (
        TemporaryDirectory(prefix="penstock-trees-") as copies,
        Testbed(run.console, "copying both trees", total) as stage,
    ):
        this = copy_of_this(Path(copies, THIS))
        base = export(run.args.base, Path(copies, BASE))
        systems = [PenstockGateway(THIS, tree=this.path), PenstockGateway(BASE, tree=base.path)]
        for number in range(options.rounds):
            _round(systems, number, options, stage, played)
    return run.keep(report(run, played, {THIS: this.version, BASE: base.version}, bound, options))


def _round(
    systems: Sequence[GatewaySystem],
    number: int,
    options: GatewayOptions,
    stage: Testbed,
    played: GatewayReadings,
) -> None:
    title = f"round {number + 1}/{options.rounds}"
    stage.say(f"{title}: starting both trees")
    with ExitStack() as stack:
        serving: dict[str, ServingGateway] = {}
        for system in systems if number % 2 == 0 else reversed(systems):
            folder = stage.room(f"{system.name}-{number + 1}")
            serving[system.name] = stack.enter_context(system.serve(folder, options.engine))
        time.sleep(SETTLE_S)
        for streams in options.levels:
            for name in turns(number):
                stage.say(f"{title}: {name}, c={streams}")
                played.note(name, streams, measure(options.plan(serving[name], streams)))
                stage.done()
                serving[name].check()


def report(
    run: ProgramRun, played: GatewayReadings, versions: Mapping[str, str], bound: float, options: GatewayOptions
) -> Report:
    """The verdict: one ratio for each level, judged where there were rounds enough."""
    readings = played.readings
    found = sorted(rows(readings, [THIS, BASE]), key=lambda row: int(row["streams"]))
    for row in found:
        row["rounds"] = options.rounds  # and not turns
    judged = bound if options.rounds >= MIN_ROUNDS else None
    ratios = [of_level(readings, streams, versions[BASE], judged) for streams in options.levels]
    failed = sum(reading.errors for (name, _), each in readings.items() for reading in each if name == THIS)
    ratios.append(Ratio.none("failed requests of this tree", failed))
    title = f"CPU of all processes: this tree ({versions[THIS]}) and {versions[BASE]}, {options.step_ms:g} ms steps"
    settings = msgspec.to_builtins(options) | {"versions": dict(versions), "bound": bound}
    said = (_how_to_read(options.rounds), *notes((), played, found))
    return run.result(NAME, title, BASE_COLUMNS, found, ratios, said, **settings)


def of_level(readings: Readings, streams: int, base: str, bound: float | None) -> Ratio:
    """The median over the rounds of this/base, with its interval; without value if a round has no token of one tree."""
    what = f"c={streams}: CPU per token, this tree / {base}"
    mine, theirs = (per_round(readings[name, streams]) for name in (THIS, BASE))
    ratios = tuple(a / b for a, b in zip(mine, theirs, strict=True) if a is not None and b is not None)
    if len(ratios) < len(mine):
        return Ratio(what=what, value=None, at_most=bound, digits=3)
    found = median_interval(ratios)
    interval = (found.low, found.high)
    return Ratio(what=what, value=found.median, at_most=bound, digits=3, rounds=ratios, interval=interval)


def per_round(readings: Sequence[StreamReading]) -> list[float | None]:
    """CPU microseconds per token of each round, over both its turns; None for a round without a token."""
    pairs = zip(readings[::2], readings[1::2], strict=True)
    return [_us_per_token(first, second) for first, second in pairs]


def _us_per_token(*readings: StreamReading) -> float | None:
    tokens = sum(reading.tokens for reading in readings)
    cpu_s = sum(sum(reading.cpu.values()) for reading in readings)
    return 1e6 * cpu_s / tokens if tokens else None


def _how_to_read(rounds: int) -> str:
    interval = median_interval(range(rounds))
    said = (
        f"Each ratio is the median of {rounds} rounds. In brackets: numbers {interval.rank} and "
        f"{rounds + 1 - interval.rank} of the rounds' ratios in ascending order, an interval that contains the true "
        f"median with probability {100 * interval.coverage:.1f} %."
    )
    if rounds < MIN_ROUNDS:
        return f"{said} With fewer than {MIN_ROUNDS} rounds nothing is judged."
    return f"{said} A bound is missed when the whole interval lies above it, undecided when the interval contains it."
