"""How long readers wait when a process is killed, and what the others do meanwhile."""
