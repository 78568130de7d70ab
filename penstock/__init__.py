"""Penstock: the package that other programs may import: version, client, engine protocol, and what processes share."""

__version__ = "0.1.0"
