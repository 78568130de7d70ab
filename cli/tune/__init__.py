"""`penstock tune`: commands that measure a running server and say which settings it should have."""
