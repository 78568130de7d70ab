"""What other tenants wait for while one of them does its worst."""
