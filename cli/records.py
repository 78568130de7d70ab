"""`penstock records`: exports the records of this machine into a Parquet file, for tools that read tables."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path

import click

from cli.errors import DONE, FAILED, Problem
from cli.help_text import Group
from cli.options import Command, Where, config_option, json_option, moment, where_options
from cli.output import line_result
from cli.progress import ProgressLine
from cli.report import source
from telemetry.records.reader import MissingParquetError, export


@click.group(cls=Group)
def records() -> None:
    """Export the records on the local disk: a line for each request, and samples of each process."""


@records.command("export", cls=Command)
@click.option("--parquet", required=True, type=click.Path(path_type=Path), help="Folder for the Parquet files.")
@click.option("--since", default="7d", help="Begin so long ago, or at this time (UTC) [7d].")
@config_option
@where_options(url=False)
@json_option
def export_command(parquet: Path, since: str, config: Path | None, where: Where, as_json: bool) -> int:
    """Write requests.parquet, deliveries.parquet and samples.parquet, with the fields of docs/records.md."""
    folder, _ = source(where, config)
    now = time.time()
    try:
        with ProgressLine(sys.stderr, os.environ, quiet=as_json, delay_s=1.0) as progress:
            counts = export(folder, parquet, moment(since, now), now, partial(progress.amount, "exporting records"))
    except MissingParquetError as error:
        raise Problem(str(error), next_step='pip install "penstock[parquet]"', exit_code=FAILED) from error
    except OSError as error:
        raise Problem(f"{parquet} cannot be written", cause=error.strerror or str(error), exit_code=FAILED) from error
    words = ", ".join(f"{number} {name}" for name, number in counts.items())
    line_result({"folder": str(parquet), **counts}, f"{words} in {parquet}").print(as_json=as_json)
    return DONE
