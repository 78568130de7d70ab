"""Workloads: traces in BurstGPT's form, requests made to look like one, and their replay."""
