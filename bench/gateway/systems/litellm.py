"""The LiteLLM proxy in front of the floor's engine server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.environments import Environment
from bench.gateway.engine import MODEL
from bench.gateway.system import Say, ServingGateway
from bench.gateway.systems.floor import start_engine_server
from bench.ports import free_port
from bench.processes import Processes
from workers.engines.sim.settings import SimSettings

ENVIRONMENT = Environment(name="litellm", packages=("litellm[proxy]==1.106.2",))

CONFIG = """
model_list:
  - model_name: {model}
    litellm_params:
      model: openai/{model}
      api_base: http://127.0.0.1:{port}/v1
      api_key: none
"""

ENVIRON = {
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOG": "ERROR",
    "LITELLM_MODE": "PRODUCTION",
}
"""No keys, as for the others; its list of prices is not fetched; it does not log every request."""


class Litellm:
    """One proxy process, without a database."""

    name = "litellm"
    title = f"LiteLLM proxy ({ENVIRONMENT.packages[0]}) in front of the floor's engine server"

    def prepare(self, say: Say) -> None:
        self._python = ENVIRONMENT.prepare(say)

    @contextmanager
    def serve(self, folder: Path, engine: SimSettings) -> Iterator[ServingGateway]:
        with Processes(folder, {**os.environ, **ENVIRON}) as processes:
            port, config = free_port(), folder / "config.yaml"
            config.write_text(CONFIG.format(model=MODEL, port=start_engine_server(processes, engine)))
            proxy = self._python.parent / "litellm"
            processes.start("litellm", [proxy, "--config", config, "--host", "127.0.0.1", "--port", str(port)])
            processes.wait_port(port)
            yield ServingGateway(port, [processes])
