"""Module runner: `python -m penstock.run api` runs the package `api` of a checkout or of an installed wheel.

It starts any module of Penstock: a role (`api`, `workers`, `scheduler`, `offline`) or a program such as `bench.chaos`.
"""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec

from penstock import bundle

USAGE = "usage: python -m penstock.run MODULE [ARGUMENTS], such as: python -m penstock.run api --help\n"


def main() -> None:
    """Run the module that the first argument names, with the other arguments. Exits with 2 if there is none."""
    words = sys.argv[1:]
    bundle.add_to_path()
    if not words or words[0].startswith("-") or not _exists(words[0]):
        sys.stderr.write(USAGE)
        sys.exit(2)
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # its parent package does not exist
        return False


if __name__ == "__main__":
    main()
