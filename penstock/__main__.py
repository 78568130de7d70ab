"""`python -m penstock`, and the `penstock` command of an installation: the command line of `cli/`."""

from __future__ import annotations

import sys

from penstock import bundle


def main() -> int:
    """Returns the exit code."""
    bundle.add_to_path()
    from cli.__main__ import main as run_command  # noqa: PLC0415 - importable only now

    return run_command()


if __name__ == "__main__":
    sys.exit(main())
