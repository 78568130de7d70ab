"""The table of routes, in the order in which its rows are tried."""

from __future__ import annotations

import re

import pytest

from api.routes import ROUTES, TABLE, AccessTable, Route


def found_itself(table: AccessTable, route: Route) -> bool:
    """By its path with something in place of each parameter."""
    found = table.find(route.method, re.sub(r"{.*?}", "x", route.path))
    return found is not None and found.route is route


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_no_row_takes_the_path_of_a_later_one(route: Route) -> None:
    assert found_itself(TABLE, route)
