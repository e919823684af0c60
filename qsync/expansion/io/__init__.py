"""Save and load expanded models.

save  `save_expanded`, and the expansion of a whole folder
load  `load_expanded`, and the layout of a folder
"""
