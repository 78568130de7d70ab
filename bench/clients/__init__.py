"""Clients, agents and load generators of others, each unchanged and in an environment of its own, against Penstock."""
