"""Waits: how long a waiting job is expected to wait, how well past estimates held, and who is refused for it."""
