"""Copies of one small model on one GPU, a process each: tokens per second of all, latency of the slowest."""

from __future__ import annotations

import subprocess
import sys
from typing import IO, Any

import msgspec

from bench.gpu.waves import ANSWER, ServedWaves


class ReplicaFailed(RuntimeError):
    """A copy ended before it had served."""


def side_by_side(shape: str, batch: int, copies: int, seconds: float, kind: str) -> dict[str, Any]:
    """A row of figures. `kind`: `graphs` or `eager`. Raises ReplicaFailed."""
    command = [sys.executable, "-m", "bench.gpu.replica", shape, str(batch), str(seconds), kind]
    running = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(copies)]
    try:
        for process in running:
            _line(process)
        for process in running:
            _pipe(process.stdin).write(b"go\n")
            _pipe(process.stdin).flush()
        found = [msgspec.json.decode(_line(process), type=ServedWaves) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return {
        "shape": shape,
        "step": kind,
        "batch": batch,
        "copies": copies,
        "tokens_per_s": sum(each.tokens_per_s for each in found),
        "requests_per_s": sum(each.tokens_per_s for each in found) / ANSWER,
        "latency_s": max(each.latency_s for each in found),
    }


def _line(process: subprocess.Popen[bytes]) -> bytes:
    if line := _pipe(process.stdout).readline():
        return line
    raise ReplicaFailed(f"a copy ended with {process.wait()}")


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None  # asked for above
    return pipe
