"""Batches under kills, at full speed, and beside people."""
