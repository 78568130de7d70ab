"""llama-server from the wheel of xllamacpp, as a process of its own: `llama_server.py MODEL.gguf PORT [SLOTS [POOLING
[TEMPLATE]]]`. With a pooling (last, rank) it makes vectors or ranks documents too; the template is a file."""

import os
import signal
import sys
from pathlib import Path

os.environ["OMP_WAIT_POLICY"] = "passive"  # read when the library is loaded: its threads must not spin
os.environ["GOMP_SPINCOUNT"] = "0"

import xllamacpp


def main(path: str, port: str, slots: str = "1", pooling: str = "", template: str = "") -> None:
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.hostnames, params.port = ["127.0.0.1"], int(port)
    params.n_parallel, params.n_ctx = int(slots), 2048 * int(slots)
    params.n_batch = params.n_ubatch = 128
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_ram_mib = 0
    params.verbosity = -1
    params.ui = False
    if pooling:
        params.embedding = True
        params.pooling_type = getattr(xllamacpp.llama_pooling_type, f"LLAMA_POOLING_TYPE_{pooling.upper()}")
    if template:
        params.use_jinja = True
        params.chat_template = Path(template).read_text(encoding="utf-8")
    params.endpoint_metrics = params.endpoint_slots = params.endpoint_props = True
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
