"""The planner's figures beside those that papers published."""
