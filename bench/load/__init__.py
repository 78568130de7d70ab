"""The load generator: streams that ask again as soon as they are answered, and what they saw of every token."""
