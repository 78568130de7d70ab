"""The ScaleLLM paper's Table 1: time to first token and between tokens by concurrency, of any OpenAI-like server."""
