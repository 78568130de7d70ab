"""`penstock up`: starts and supervises the processes of one machine, also in the background.

They are Redis, API, workers, scheduler and the offline process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from api.auth.keys import Keyring, check_exposure, check_keyless
from cli import ports
from cli.deployment import Deployment, environment, load_deployment
from cli.engines import check_plugins, with_upstream
from cli.instance import DataDir, Instance
from cli.log_lines import START
from cli.machine import Machine, console_path
from cli.options import Command, config_option, redis_url_option
from cli.output import DONE, ERROR_INDENT, Problem, note
from cli.progress import ProgressLine
from cli.screen import Screen, show_ready
from penstock import __version__
from penstock.config import ENGINES, FLAGS, ConfigError
from telemetry import logs
from workers.engines.registry import is_plugin

POLL_INTERVAL_S = 0.05
ERROR_BLOCK = re.compile(r"^error: .*\n(?:(?:cause|next): .*\n)*", re.MULTILINE)
"""An error in the output of `up`."""

log = logging.getLogger(__name__)


@click.command(cls=Command)
@click.option("--host", help="Address to listen on [127.0.0.1]; any other needs an API key in the settings.")
@click.option("--port", type=int, help="Port of the API [8000]; 0: any free one.")
@click.option("--data-dir", help="Queue, weights, logs and state [.penstock].")
@redis_url_option("A Redis or Valkey you already have, instead of the embedded one.")
@click.option("--engine", help=f"Engine of the model: {', '.join(ENGINES)}, or a plug-in [llamacpp].")
@click.option("--model", help="Name of the model served.")
@click.option("--upstream", help="Serve this OpenAI-compatible server, e.g. http://127.0.0.1:8080/v1.")
@click.option("--workers", type=click.IntRange(0), help="Workers of every model; 0 starts none.")
@click.option("--api-processes", type=click.IntRange(1, 64), help="API processes sharing the port [1].")
@click.option("--sim-step-ms", type=float, help="Simulated engine: time of one step [15].")
@click.option("--sim-prefill-ms", type=float, help="Simulated engine: time of a prefill [25].")
@click.option("--sim-slots", type=int, help="Simulated engine: requests at once [256].")
@click.option("--sim-kv-tokens", type=int, help="Simulated engine: tokens its KV cache holds.")
@config_option
@click.option("--detach", is_flag=True, help="Return when it is ready; `penstock down` stops it.")
@click.option("-v", "--verbose", is_flag=True, help="Show the logs of all processes.")
def up(config: Path | None, detach: bool, verbose: bool, **flags: Any) -> int:
    """Start Redis (embedded), API, workers and scheduler, and keep them running.

    Settings come from penstock.toml, then PENSTOCK_* variables, then these flags.

    \b
    Examples:
      penstock up
      penstock up --engine sim --workers 2
      penstock up --port 9000 --detach
      penstock up --upstream http://127.0.0.1:8080/v1
      PENSTOCK_REDIS_URL=redis://127.0.0.1:6379/0 penstock up
    """
    note(f"penstock {__version__}")
    flags = with_upstream(flags, os.environ)
    deployment = load_deployment({FLAGS[name]: value for name, value in flags.items()}, os.environ, Path.cwd(), config)
    with deployment.config.naming_sources():
        keyring = Keyring(deployment.keys)
        check_exposure(deployment.api.host, keyring)
        check_keyless(deployment.api, keyring)
        deployment.check_model_files()
        deployment.check_upstreams()
    home = DataDir(deployment.up.data_dir)
    with ProgressLine(sys.stderr, os.environ) as progress:
        if detach:
            url = flags.pop("redis_url")
            return start_detached(home, _again(flags, config), progress, keyed=bool(deployment.keys), redis_url=url)
        with home.lock(), ports.listen(deployment.api.host, deployment.api.port) as listeners:
            return _run(deployment, home, listeners, progress, verbose=verbose)


def _run(
    deployment: Deployment, home: DataDir, listeners: Sequence[socket.socket], progress: ProgressLine, *, verbose: bool
) -> int:
    home.prepare()
    screen = Screen(progress)
    try:
        with home.log("up").open("a") as file:
            logs.setup("up", "info", file)
            log.info(START, __version__)
            try:
                weights = _fetch(home, progress) if deployment.needs_weights else None
                _check_engines(deployment, home, screen)
                machine = Machine(deployment, home, listeners, screen)
                return asyncio.run(machine.run(weights, tail=verbose))
            except (Problem, ConfigError) as error:
                log.error("penstock up ends: %s", _in_a_line(error))
                raise
    finally:
        home.clear()


def _in_a_line(error: Problem | ConfigError) -> str:
    """The error with its cause and fix."""
    if isinstance(error, Problem):
        return "; ".join(filter(None, (error.message, error.cause, error.next_step)))
    return "; ".join(filter(None, (f"{error.key}: {error.problem}", error.source, error.hint)))


def _check_engines(deployment: Deployment, home: DataDir, screen: Screen) -> None:
    """Raises ConfigError for a plug-in that no worker could build."""
    if not any(is_plugin(model.engine) for model in deployment.models.values()):
        return
    screen.phase("checking the engines")
    deployment.config.save(home.settings)
    with deployment.config.naming_sources():
        for found in check_plugins(deployment, home):
            if found.error is not None:
                raise found.error
    screen.phase("")


def _fetch(home: DataDir, progress: ProgressLine) -> Path:
    """Fetch the default model. Ctrl-C or SIGTERM ends the command; the next start resumes the download."""
    from workers.engines.llamacpp.weights import WeightsError, fetch  # noqa: PLC0415 - imports a converter, not needed by other engines

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return fetch(home.weights, progress.amount)
    except WeightsError as error:
        raise Problem(str(error), code="weights") from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _again(flags: Mapping[str, Any], config: Path | None) -> list[str]:
    """The command-line arguments without --detach."""
    given = {"config": config, **flags}
    return [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]


def start_detached(
    home: DataDir, arguments: Sequence[str], progress: ProgressLine, *, keyed: bool, redis_url: str | None
) -> int:
    """Start `up` in a new session. Returns its exit code if it exits, else 0 once it is ready.

    `redis_url` is passed in the environment, because it may hold a password and every user of the machine can read a
    process's arguments.
    """
    environ = environment() if redis_url is None else {**environment(), "PENSTOCK_REDIS_URL": redis_url}
    home.make_private()
    home.logs.mkdir(mode=0o700, exist_ok=True)
    output = home.logs / "up.out"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cli", "up", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environ,
            start_new_session=True,
        )
    told: list[str] = []
    try:
        instance = _wait(process, home, progress, output, told)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    progress.end()
    if instance is None:
        sys.stderr.write(_not_told(output, told))
        return process.returncode
    show_ready(instance, asyncio.run(console_path(home)), detached=True, keyed=keyed)
    return DONE


def _wait(
    process: subprocess.Popen[bytes], home: DataDir, progress: ProgressLine, output: Path, told: list[str]
) -> Instance | None:
    """The instance once it is ready; None if the process has exited. Adds the errors that it shows to `told`."""
    while process.poll() is None:
        for block in ERROR_BLOCK.findall(output.read_text(errors="replace"))[len(told) :]:
            progress.say(block.rstrip(), ERROR_INDENT)
            told.append(block)
        instance = home.read()
        if instance is not None and instance.pid == process.pid:
            if instance.state == "ready":
                return instance
            progress.phase(instance.phase)
        time.sleep(POLL_INTERVAL_S)
    return None


def _not_told(output: Path, told: Sequence[str]) -> str:
    """The output of `up`, without the errors that were shown and its first line, the version, which was, too."""
    text = output.read_text(errors="replace").partition("\n")[2]
    for block in told:
        text = text.replace(block, "", 1)
    return text
