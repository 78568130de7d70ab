"""Plans of the command line: each takes options and returns tables, advice and JSON, which `penstock plan` prints.

They read files and records, and measure this machine's CPU; what they compute with is in `planner/`.
"""
