"""`python -m bench.audit`: what a release has to pass beside its tests. Exits 1 for anything found, and for anything
that could not be looked at; 2 if a tool is missing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from bench import program
from bench.audit import locks, pth, sbom, secrets
from bench.audit.tools import FOLDER, AuditTools
from bench.program import ProgramRun

ROOT = Path(__file__).parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    return program.play(_parser(), argv, _run, OSError)


def _run(run: ProgramRun) -> int:
    args = run.args
    tools = AuditTools(args.root, args.tools)
    parts: dict[str, Callable[[], list[str]]] = {
        "pth": lambda: pth.check(args.path or pth.environments(args.root / args.tools.parent)),
        "sbom": lambda: sbom.write(tools, args.root / args.sbom),
        "secrets": lambda: secrets.check(tools),
        "vulnerabilities": lambda: locks.check(tools, args.advisories),
    }
    wanted = args.parts.split(",") if args.parts else list(parts)
    program.check_names("part", wanted, parts)
    failed = False
    for name in wanted:
        found = parts[name]()
        failed |= bool(found)
        run.console.print(f"{name}: {'FAILED' if found else 'ok'}")
        for each in found:
            run.console.print(f"  {each}", markup=False, soft_wrap=True)
        if name == "secrets" and args.learn:
            run.console.print(msgspec.json.format(msgspec.json.encode(secrets.as_known(found))).decode(), markup=False)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.audit", description=__doc__)
    parser.add_argument("--parts", help="only these: pth, sbom, secrets, vulnerabilities (default: all)")
    parser.add_argument("--advisories", type=Path, help="a copy of the advisory database, instead of the service")
    parser.add_argument(
        "--path", type=Path, action="append", help="packages to look for .pth files in, e.g. an image's"
    )
    parser.add_argument(
        "--learn", action="store_true", help="print what was found as bench/audit/known_secrets.json has it"
    )
    parser.add_argument("--sbom", type=Path, default=Path("build/sbom"), help="default: build/sbom")
    parser.add_argument("--tools", type=Path, default=FOLDER, help=f"default: {FOLDER}")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
