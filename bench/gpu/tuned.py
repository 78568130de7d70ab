"""What `penstock tune frontier` says of a running server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu.loads import Unanswered
from bench.table1.client import TargetServer
from planner.load import RequestLengths


def tuned_frontier(
    server: TargetServer, lengths: RequestLengths, folder: Path, words: Sequence[str] = ()
) -> dict[str, Any]:
    """Its JSON, of requests of these lengths; `words` are further options. Raises Unanswered."""
    mix = folder / "mix.csv"
    mix.write_text("".join(["prompt,answer\n", *(f"{prompt},{answer}\n" for prompt, answer in lengths.mix)]))
    url = f"http://{server.host}:{server.port}{server.path}"
    command = [sys.executable, "-m", "cli", "tune", "frontier", "--url", url, "--workload", str(mix), *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unanswered(f"penstock tune frontier ended with {done.returncode}: {done.stderr[-500:]}")
    return dict(json.loads(done.stdout))
