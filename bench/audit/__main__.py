"""`python -m bench.audit`: what a release has to pass beside its tests. Exits 1 for anything found, and for anything
that could not be looked at; 2 if a tool is missing."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import msgspec

from bench import program
from bench.audit import locks, secrets, tools
from bench.program import BenchProgram, Option, ProgramRun

ROOT = Path(__file__).parents[2]


def _run(run: ProgramRun) -> int:
    args = run.args
    audit = tools.AuditTools(args.root, args.tools)
    parts: dict[str, Callable[[], list[str]]] = {
        "pth": lambda: tools.check_pth(args.path or tools.environments(args.root / args.tools.parent)),
        "sbom": lambda: tools.write_sbom(audit, args.root / args.sbom),
        "secrets": lambda: secrets.check(audit),
        "vulnerabilities": lambda: locks.check(audit, args.advisories),
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


main = BenchProgram("python -m bench.audit", __doc__, _run, OSError).taking(
    Option("--parts", help="only these: pth, sbom, secrets, vulnerabilities (default: all)"),
    Option("--advisories", type=Path, help="a copy of the advisory database, instead of the service"),
    Option("--path", type=Path, action="append", help="packages to look for .pth files in, e.g. an image's"),
    Option("--learn", action="store_true", help="print what was found as bench/audit/known_secrets.json has it"),
    Option("--sbom", type=Path, default=Path("build/sbom"), help="default: build/sbom"),
    Option("--tools", type=Path, default=tools.FOLDER, help=f"default: {tools.FOLDER}"),
    Option("--root", type=Path, default=ROOT, help=argparse.SUPPRESS),
)

if __name__ == "__main__":
    main.exit()
