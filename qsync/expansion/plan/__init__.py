"""Plan an expansion from a model and a recipe.

plan     `ExpansionPlan`: a model map that prints itself and builds the grown model
planner  `plan_expansion`: choose the map of every tensor
expand   `expand`: plan and build in one call
"""
