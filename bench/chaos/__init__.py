"""The fault matrix, shown: real processes, injected faults, a record of what clients saw, and its judge."""
