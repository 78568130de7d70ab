"""How long a reader waits when the only worker is killed."""
