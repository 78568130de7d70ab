"""Planted bugs: each is put into a copy of the tree, and the test suite must notice it there."""
