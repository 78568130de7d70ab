"""`penstock down`: stops the instance of a data folder as Ctrl-C does at its terminal."""

from __future__ import annotations

import os
import signal
import sys
import time

import click

from cli.instance import DataDir
from cli.options import Command, Where, where_options
from cli.output import DONE
from cli.progress import ProgressLine

POLL_INTERVAL_S = 0.05


@click.command(cls=Command)
@click.option("--now", "at_once", is_flag=True, help="Do not wait for running jobs; they stay in the queue.")
@where_options(url=False, redis=False)
def down(at_once: bool, where: Where) -> int:
    """Drain and stop the instance that runs in the data folder; returns when it has ended.

    \b
    Examples:
      penstock down
      penstock down --now
      penstock down --data-dir /srv/penstock
    """
    home = where.home()
    instance = home.running()
    os.kill(instance.pid, signal.SIGTERM)
    with ProgressLine(sys.stderr, os.environ) as progress:
        progress.phase("stopping; unfinished jobs stay in the queue" if at_once else "draining")
        if at_once:
            _wait_for_draining(home)
            os.kill(instance.pid, signal.SIGTERM)
        while home.locked():
            if not at_once and (now := home.read()) is not None and now.state == "draining" and now.phase:
                progress.phase(f"draining: {now.phase}")
            time.sleep(POLL_INTERVAL_S)
    return DONE


def _wait_for_draining(home: DataDir) -> None:
    """Send a signal and wait a moment, because two signals sent at once may be delivered as one."""
    while (instance := home.read()) is not None and instance.state != "draining":
        time.sleep(POLL_INTERVAL_S)
