"""Tokens per second of a real engine through Penstock, over those of the bare engine on as many threads."""
