"""Answers in one piece: how long after the engine's last token the client has them."""
