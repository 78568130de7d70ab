"""A short chat of one tenant beside the largest requests that another one may send."""
