"""Simulator: queues, workers and engines in virtual time, with the decisions of the product."""
