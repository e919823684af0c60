"""Plan an expansion from a model and a recipe.

plan     `ExpansionPlan`: a model map that prints itself and builds the grown model
planner  `plan_expansion`: choose the map of every tensor
experts  `plan_experts`: grow a mixture of experts in their number
expand   `expand`: plan and build in one call
"""
