"""Penstock: the package that other programs may import. It holds the version and the engine protocol."""

__version__ = "0.1.0"
