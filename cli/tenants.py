"""`penstock tenants`: shows each tenant's usage and limits in the store and on the disk."""

from __future__ import annotations

from typing import Any

import click

from cli.client import Client
from cli.errors import DONE
from cli.options import Command, Where, json_option, where_options
from cli.output import print_json, print_rows

COLUMNS = ("tenant", "jobs", "waiting", "running", "job_bytes", "result_bytes", "files", "file_bytes")
LIMITED = ("jobs", "job_bytes", "result_bytes", "file_bytes")


@click.command(cls=Command)
@click.argument("tenant", required=False)
@where_options(url=True)
@json_option
def tenants(tenant: str | None, where: Where, as_json: bool) -> int:
    """Show the usage of all tenants with a key, or of TENANT, as "used/limit"."""
    with Client.find(where) as client:
        found = [client.get(f"/admin/tenants/{tenant}")] if tenant else client.get("/admin/tenants")["data"]
    if tenant and as_json:
        print_json(found[0])
    else:
        print_rows(found if as_json else map(_row, found), COLUMNS, as_json=as_json)
    return DONE


def _row(found: dict[str, Any]) -> dict[str, Any]:
    limits = found["limits"]
    bounded = {name: f"{found[name]}/{limits[name]}" for name in LIMITED if limits[name] is not None}
    return {**found, **bounded}
