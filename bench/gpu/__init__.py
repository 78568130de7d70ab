"""What a GPU does with small models, step by step: the measurements that the planner's formulas are held against."""
