"""The two tenants of every row, with an API key each: no byte of one may reach the other (I6)."""

from __future__ import annotations

import hashlib

FIRST, SECOND = "first", "second"
TENANTS = (FIRST, SECOND)


def key_of(tenant: str) -> str:
    """The API key of a tenant."""
    return f"sk-chaos-{tenant}"


def other(tenant: str) -> str:
    """The other one."""
    return SECOND if tenant == FIRST else FIRST


def authorization(tenant: str) -> dict[str, str]:
    """The header a tenant sends."""
    return {"Authorization": f"Bearer {key_of(tenant)}"}


def configuration() -> str:
    """Rows of penstock.toml. The first tenant may look after dead letters."""
    return "".join(
        f'[keys.{tenant}]\nsha256 = "{hashlib.sha256(key_of(tenant).encode()).hexdigest()}"\n'
        f'tenant = "{tenant}"\nadmin = {"true" if tenant == FIRST else "false"}\n'
        for tenant in TENANTS
    )
