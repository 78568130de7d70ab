"""`python -m bench.gpu.replica`: one of several copies of a small model on one GPU, a process each.

It says `ready`, waits for a line, serves for so many seconds, and prints its figures as JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from bench.gpu.waves import Waves
from planner.facts import catalogue


def main(words: list[str]) -> None:
    """`words`: model, batch, seconds, and `graphs` or `eager`."""
    shape, batch, seconds, kind = words
    waves = Waves(catalogue.model(shape), int(batch), graphs=kind == "graphs")
    waves.serve(0.5, None)
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(asdict(waves.serve(float(seconds), None))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
