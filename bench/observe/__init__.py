"""What it costs to see inside: CPU per token with everything on and with everything off, and with an open console."""
