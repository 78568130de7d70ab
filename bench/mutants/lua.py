"""Mutants, and those of the Lua scripts: one operator, number, constant or statement of one line is another one."""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec
from redis import Redis
from redis.exceptions import ResponseError

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
        pairs = enumerate(zip(before.splitlines(), self.text.splitlines(), strict=False), 1)
        at = next((number for number, (old, new) in pairs if old != new), 0)
        old, new = (" / ".join(side) or "nothing" for side in sides)
        return f"{self.file}:{at}: {old} -> {new}"


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
