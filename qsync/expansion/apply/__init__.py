"""Apply a model map.

grow             build the grown model
edits            carry over what was edited in the small model
verification     compare the functions of the small and the grown model
optimizer_state  expand the optimizer state
lr_schedule      the learning-rate schedule of a grown model
"""
