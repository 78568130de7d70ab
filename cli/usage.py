"""`penstock usage`: what a tenant, or all of them, have used, by day (UTC), key and model."""

from __future__ import annotations

import csv
import os
import sys
from typing import Any

import click

from cli.client import Client
from cli.options import command
from cli.output import CommandResult, note, print_table, styled

BAR = 10
"""Columns of the longest bar."""
PLACES = {"cost": 4}


@command("usage")
@click.option("--from", "first", help="First day, in UTC, such as 2026-11-01 [29 days before the last].", metavar="DAY")
@click.option("--to", "last", help="Last day, in UTC [today].", metavar="DAY")
@click.option("--by", default="day", show_default=True, help="Columns that tell rows apart: day, tenant, key, model.")
@click.option("--tenant", help="Of this tenant, with an admin key [your own].")
@click.option("--all", "everyone", is_flag=True, help="Of all tenants, with an admin key.")
@click.option("--csv", "as_csv", is_flag=True, help="A table for spreadsheets.")
def usage(client: Client, everyone: bool, tenant: str | None, as_csv: bool, **query: str | None) -> CommandResult:
    """Show how many requests and tokens your tenant has used. A request counts on the day of its end, in UTC.

    \b
    Examples:
      penstock usage
      penstock usage --by key,model --from 2026-11-01
      penstock usage --all --by tenant,day --csv
    """
    asked: dict[str, Any] = {"from": query["first"], "to": query["last"], "by": query["by"], "tenant": tenant}
    found = client.get("/admin/usage" if everyone or tenant else "/v1/usage", **asked)
    rows, by = found["data"], found["by"]

    def show() -> None:
        if as_csv:
            writer = csv.DictWriter(sys.stdout, (*by, *found["total"]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        elif rows:
            _print(rows, by, found["total"])
        else:
            note(f"nothing was used from {found['from']} to {found['to']}")

    return CommandResult(iter(rows), show)


def _print(rows: list[dict[str, Any]], by: list[str], total: dict[str, float]) -> None:
    """Print a table: numbers end in line, and where there is colour, a bar shows each row's tokens."""
    shown = [*rows, {by[0]: "total", **total}] if len(rows) > 1 else rows
    header, columns = [each.upper() for each in by], []
    for name in total:
        column = [name.removesuffix("_tokens").upper(), *(f"{row[name]:,.{PLACES.get(name, 0)}f}" for row in shown)]
        title, *numbers = [each.rjust(max(map(len, column))) for each in column]
        header.append(title)
        columns.append(numbers)
    if styled(sys.stdout, os.environ):
        most = max(1, *(row["total_tokens"] for row in rows))
        columns.append(["▇" * -(-BAR * row["total_tokens"] // most) for row in rows] + [""] * (len(shown) - len(rows)))
        header.append("TOKENS")
    print_table(
        header, [[*(row.get(name) or "-" for name in by), *cells] for row, *cells in zip(shown, *columns, strict=True)]
    )
