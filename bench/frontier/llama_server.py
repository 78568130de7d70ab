"""`python -m bench.frontier.llama_server PORT MODEL.gguf SLOTS CONTEXT THREADS`: llama-server of the installed wheel.

Its batches are those that llama-server has by itself. It runs until it is ended.
"""

from __future__ import annotations

import os
import signal
import sys

BATCH = 2048
"""Prompt tokens of one step: llama-server's n_batch."""


def main(port: str, path: str, slots: str, context: str, threads: str) -> None:
    """Serve at 127.0.0.1."""
    os.environ["OMP_WAIT_POLICY"] = "passive"  # read when the library is loaded: its threads must not spin
    os.environ["GOMP_SPINCOUNT"] = "0"
    import xllamacpp  # noqa: PLC0415 - an extra

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.hostnames, params.port = ["127.0.0.1"], int(port)
    params.n_parallel, params.n_ctx = int(slots), int(slots) * int(context)
    params.n_batch = BATCH
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    params.cache_ram_mib = 0
    params.verbosity = -1
    params.ui = False
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
