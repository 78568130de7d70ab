"""Frame of a measuring program: its options, SIGTERM as Ctrl-C, errors in one line, figures told and kept."""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import sys
import tempfile
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench import plots, report

T = TypeVar("T")


def side_by_side(calls: Iterable[Callable[[], T]], jobs: int) -> Iterator[T]:
    """Raises what a call raises; those that have not begun are then given up, and those that have are waited for."""
    pool = ThreadPoolExecutor(jobs)
    try:
        for future in as_completed([pool.submit(call) for call in calls]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)  # nothing that a call has started is left behind


def in_processes(call: Callable[..., T], tasks: Sequence[tuple[Any, ...]], jobs: int) -> list[T]:
    """What `call` returns for each task, its arguments, in their order; in so many processes."""
    if jobs == 1:
        return [call(*task) for task in tasks]
    with ProcessPoolExecutor(jobs) as pool:
        return list(pool.map(call, *zip(*tasks, strict=True)))


class WrongArguments(Exception):
    """The words ask for something that is not there."""


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """One run of a program."""

    args: argparse.Namespace
    command: str
    """Repeats it, wherever its figures went."""
    console: Console

    def result(
        self,
        name: str,
        title: str,
        columns: tuple[report.Column, ...],
        rows: list[dict[str, Any]],
        ratios: Iterable[report.Ratio] = (),
        notes: Iterable[str] = (),
        **settings: Any,
    ) -> report.Report:
        """What this run found; a quick run's figures do not take the place of a full one's."""
        return report.Report(
            name=f"{name}-quick" if getattr(self.args, "quick", False) else name,
            title=title,
            command=self.command,
            settings=settings,
            columns=columns,
            rows=rows,
            ratios=tuple(ratios),
            notes=tuple(notes),
        )

    def keep(self, found: report.Report, draw: Callable[[report.Report, Path], list[Path]] | None = None) -> int:
        """The table; its JSON file in the folder of --out, with the commit; the plots that `draw` makes in the folder
        of --plots, unless the run is quick. Returns 1 for a missed goal, else 0."""
        found = msgspec.structs.replace(found, commit=report.commit())
        self.console.print(report.table(found))
        self.console.print(f"figures: {report.write(self.args.out / f'{found.name}.json', found.small)}")
        if draw and not getattr(self.args, "quick", False):
            drawn = draw(found, self.args.plots)
            self.console.print(f"plots: {', '.join(map(str, drawn))}" if drawn else plots.missing())
        return int(found.missed)

    def complain(self, error: Exception) -> None:
        """One line, however long."""
        self.console.print(f"error: {error}", markup=False, soft_wrap=True)


class Option:
    """One option of a program, as argparse takes it."""

    def __init__(self, *flags: str, **settings: Any) -> None:
        self.flags, self.settings = flags, settings


OUT = Option("--out", type=Path, default=report.RESULTS, help="folder of the JSON file")
PLOTS = Option("--plots", type=Path, default=plots.PLOTS, help="folder of the plots")


class _HelpFormatter(argparse.HelpFormatter):
    """Keeps the lines of a description, and wraps those that the terminal has no room for."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(textwrap.fill(line, width, initial_indent=indent) for line in text.splitlines())


class BenchProgram:
    """A measuring program, to be called with its arguments; `errors` are told in one line."""

    def __init__(self, prog: str, doc: str | None, work: Callable[[ProgramRun], int], *errors: type[Exception]) -> None:
        self.parser = argparse.ArgumentParser(prog=prog, description=doc, formatter_class=_HelpFormatter)
        self._work, self._errors = work, errors

    def taking(self, *options: Option) -> BenchProgram:
        """The program with these options."""
        for option in options:
            self.parser.add_argument(*option.flags, **option.settings)
        return self

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """The exit code: what `work` returns; 1 after a known error, 2 if it refused the words, 130 if it was stopped.

        `work` has to end what it started whatever happens. Raises SystemExit for words the parser does not know.
        """
        words = list(sys.argv[1:] if argv is None else argv)
        command = shlex.join([*self.parser.prog.split(), *_of_the_run(words)])
        run = ProgramRun(self.parser.parse_args(words), command, report.console())
        report.commit()  # of the tree that begins to run
        before = signal.signal(signal.SIGTERM, _interrupted)
        try:
            return self._work(run)
        except WrongArguments as error:
            run.complain(error)
            return 2
        except self._errors as error:
            run.complain(error)
            return 1
        except KeyboardInterrupt:
            run.console.print("stopped; every process has ended")
            return 130
        finally:
            signal.signal(signal.SIGTERM, before)

    def exit(self) -> NoReturn:
        """Run with the words of the command line, and end the process."""
        sys.exit(self())


def _of_the_run(words: Sequence[str]) -> list[str]:
    """The words without those that only say where on this machine its figures go."""
    places = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    places.add_argument("--out")
    places.add_argument("--plots")
    return places.parse_known_args(words)[1]


def _interrupted(number: int, frame: FrameType | None) -> None:
    """What Ctrl-C does now: while asyncio runs it cancels the main task, which can then take its processes down."""
    interrupt = signal.getsignal(signal.SIGINT)
    if not callable(interrupt):  # a shell's background jobs ignore Ctrl-C
        raise KeyboardInterrupt
    interrupt(number, frame)


def check_names(what: str, wanted: Iterable[str], known: Collection[str]) -> None:
    """Raises WrongArguments for a name nobody has."""
    if unknown := [name for name in wanted if name not in known]:
        raise WrongArguments(f"no {what} {', '.join(map(repr, unknown))}; there are {', '.join(known)}")


def count(word: str) -> int:
    """An argument: a number that is 1 or more."""
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def counts(words: str) -> list[int]:
    """An argument: such numbers, separated by commas; in order, each once."""
    return sorted({count(word) for word in words.split(",")})


class Testbed:
    """As a context: the folder is removed at the end, unless `keep` was called."""

    def __init__(self, console: Console, title: str, total: int) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task(title, total=total)
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
        self._kept = False

    def __enter__(self) -> Testbed:
        self._bar.start()
        self.say(self._bar.tasks[0].description)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._bar.stop()
        if self._kept or kind is not None:
            self._console.print(f"logs: {self.folder}")
        else:
            shutil.rmtree(self.folder, ignore_errors=True)

    def room(self, *names: object) -> Path:
        """A new folder in it."""
        folder = self.folder / "-".join(map(str, names)).replace(" ", "-")
        folder.mkdir()
        return folder

    def say(self, what: str) -> None:
        """What is being done now; a line on stderr where no terminal shows the bar."""
        self._bar.update(self._task, description=what)
        if not self._console.is_terminal:
            sys.stderr.write(f"{self._bar.tasks[0].completed:.0f}/{self._bar.tasks[0].total:.0f} {what}\n")
            sys.stderr.flush()

    def done(self) -> None:
        """One measurement is over."""
        self._bar.advance(self._task)

    def keep(self) -> None:
        """Something went wrong: the logs are wanted."""
        self._kept = True
