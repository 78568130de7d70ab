"""Penstock and other gateways in front of the same simulated engine: what the path costs."""
