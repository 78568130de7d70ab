"""The audit: known vulnerabilities, secrets, hashes, .pth files, and what everything is made of."""
