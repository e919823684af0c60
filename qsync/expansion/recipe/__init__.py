"""Recipes: which module reads and writes which space.

recipe           `Recipe`, and the lines of its table
shipped_recipes  the recipes that ship with qsync, and `recipe_of`
sizes            the size of every space, before and after growth
module_kinds     the norm that a module computes
"""
