"""Draws mutants of Python files with the operators of mutmut and two of its own: a statement left out, a condition
turned round.

Run by the Python of `.venv-audit`, which has mutmut, as a program: `drawn.py SEED COUNT FILE...` writes JSON lines. It
imports nothing of the project. Every place that can be changed is as likely as every other; what happens there is then
drawn among the ways to change it. Not changed: annotations, decorators, texts for people (strings with a space in them,
all of a log line), what only a type checker reads, and `len` and `isinstance`, as mutmut has it.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

LEFT_ALONE = ("len", "isinstance", "TypeVar", "cast", "NewType", "ParamSpec")
LOGS = ("log", "logger")


class MutablePlaces(cst.CSTVisitor):  # type: ignore[misc]  # mutmut is in another environment
    """The nodes of a module that can be changed."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.found: list[cst.CSTNode] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if _is_left_alone(node):
            return False
        place = self.get_metadata(PositionProvider, node, None)  # None: it stands nowhere by itself
        if place is not None and next(changes(node), None) is not None:
            self.found.append(node)
        return True


def changes(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Every way to change a node: what stands there instead."""
    for kind, operator in mutation_operators:
        if isinstance(node, kind):
            yield from operator(node)
    if isinstance(node, cst.SimpleStatementLine) and _is_call(node):
        yield node.with_changes(body=[cst.Pass()])
    if isinstance(node, cst.If):
        turned = cst.UnaryOperation(cst.Not(), node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()]))
        yield node.with_changes(test=turned)


def _is_call(node: cst.SimpleStatementLine) -> bool:
    if len(node.body) != 1 or not isinstance(node.body[0], cst.Expr):
        return False
    value = node.body[0].value
    return isinstance(value.expression if isinstance(value, cst.Await) else value, cst.Call) and not _is_log(value)


def _is_left_alone(node: cst.CSTNode) -> bool:
    if isinstance(node, (cst.Annotation, cst.Decorator, cst.Import, cst.ImportFrom, cst.Assert, cst.TypeAlias)):
        return True
    if isinstance(node, cst.SimpleStatementLine) and isinstance(node.body[0], cst.Expr):
        return isinstance(node.body[0].value, (cst.SimpleString, cst.ConcatenatedString))  # a docstring
    if isinstance(node, (cst.SimpleString, cst.FormattedStringText, cst.ConcatenatedString)):
        return not isinstance(node, cst.SimpleString) or " " in node.value
    if isinstance(node, cst.If):
        return isinstance(node.test, cst.Name) and node.test.value == "TYPE_CHECKING"
    return isinstance(node, cst.Call) and (_is_log(node) or getattr(node.func, "value", None) in LEFT_ALONE)


def _is_log(node: cst.CSTNode) -> bool:
    return (
        isinstance(node, cst.Call)
        and isinstance(node.func, cst.Attribute)
        and isinstance(node.func.value, cst.Name)
        and node.func.value.value in LOGS
    )


def draw(files: Sequence[str], seed: int, count: int) -> Iterator[dict[str, object]]:
    """As many mutants, in an order drawn by chance: the first n of a greater count are those of a smaller one."""
    chance = random.Random(seed)  # noqa: S311 - to be repeated
    modules: dict[str, cst.Module] = {}
    places: list[tuple[str, cst.CSTNode]] = []
    for file in files:
        modules[file], found = _places(Path(file).read_text(encoding="utf-8"))
        places += [(file, node) for node in found]
    print(f"{len(places)} places in {len(files)} files", file=sys.stderr)
    chance.shuffle(places)
    drawn = 0
    for file, node in places:
        if drawn == count:
            return
        text = modules[file].deep_replace(node, chance.choice(list(changes(node)))).code
        if _runs(text):
            drawn += 1
            yield {"file": file, "text": text}


def _places(text: str) -> tuple[cst.Module, list[cst.CSTNode]]:
    wrapper, found = MetadataWrapper(cst.parse_module(text)), MutablePlaces()
    wrapper.visit(found)
    return wrapper.module, found.found


def _runs(text: str) -> bool:
    try:
        compile(text, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def main(words: Sequence[str]) -> None:
    seed, count, *files = words
    for mutant in draw(files, int(seed), int(count)):
        print(json.dumps(mutant))


if __name__ == "__main__":
    main(sys.argv[1:])
