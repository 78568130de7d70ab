"""`penstock plan`: commands that answer planning questions by the arithmetic of `planner/`."""
