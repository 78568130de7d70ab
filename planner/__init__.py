"""The planner: arithmetic and a simulator that say which GPU, how many, which batch and which parallelism a load needs.

Pure: no Redis, no HTTP, no clock; only the plans of the command line (commands/) read records, and time this CPU. Sizes
are bytes, times seconds, rates per second.
"""
