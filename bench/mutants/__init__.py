"""Mutants: small changes of the product drawn by chance, each in a copy of the tree, and which tests notice it."""
