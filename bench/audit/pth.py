"""Files that Python runs at every start: a `.pth` file in an environment that nobody expects is a way in."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from bench.program import WrongArguments

EXPECTED = {
    re.compile(r"_?_editable_(impl_)?penstock\.pth|_penstock\.pth"): re.compile(r"(/[^\n]*\n?)+"),
    re.compile(r"__editable__\.penstock-[0-9.]+\.pth"): re.compile(r"(/[^\n]*\n?)+"),
    re.compile(r"distutils-precedence\.pth"): re.compile(
        r"import os; var = 'SETUPTOOLS_USE_DISTUTILS'; enabled = os\.environ\.get\(var, '[a-z]+'\) == 'local'; "
        r"enabled and __import__\('_distutils_hack'\)(\.add_shim\(\))?;? ?\n?"
    ),
    re.compile(r"a1_coverage\.pth"): re.compile(
        r"import sys; exec\('import os\\n\\nif os\.getenv\(\"COVERAGE_PROCESS_START\"\) or "
        r"os\.getenv\(\"COVERAGE_PROCESS_CONFIG\"\):\\n try:\\n  import coverage\\n except:\\n  pass\\n else:\\n  "
        r"coverage\.process_startup\(slug=\"pth\"\)'\)\n"
    ),
}
"""Names, and all that may be in them: the folder of this project, and what setuptools and coverage bring. Coverage's
does nothing unless one of its variables is set, as `make mutants` does."""


def environments(tools: Path) -> list[Path]:
    """This one's packages, and those of the tools."""
    return [Path(sysconfig.get_path("purelib")), *sorted(tools.glob("lib/python3*/site-packages"))]


def check(folders: list[Path]) -> list[str]:
    """Raises WrongArguments for a folder that is not there: nothing found in nothing would be no finding."""
    found: list[str] = []
    for folder in folders:
        if not folder.is_dir():
            raise WrongArguments(f"{folder} is no folder\nnext:  give the packages of an environment or image")
        found += [str(path) for path in unexpected(folder)]
    return [f"{path} runs at every start of Python and is none of those expected" for path in found]


def unexpected(folder: Path) -> Iterator[Path]:
    """The `.pth` files below it that are not exactly as expected; also what would be imported of itself."""
    for path in sorted(folder.rglob("*.pth")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if not any(name.fullmatch(path.name) and content.fullmatch(text) for name, content in EXPECTED.items()):
            yield path
    for name in ("sitecustomize.py", "usercustomize.py"):
        if (folder / name).exists():
            yield folder / name
