"""The gate: decides whether an engine may take one more text, from what its KV cache and its steps will look like."""
