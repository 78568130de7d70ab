"""Tries the compose deployment as containers."""
