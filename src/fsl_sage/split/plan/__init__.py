"""What crosses a cut, and which part holds what.

crossing    what must cross, read off a trace
split_plan  the plan of a split as plain data
planner     from what crosses to the plan
analysis    a model's possible cuts and their plans
"""
