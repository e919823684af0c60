"""Predicted bytes against measured ones.

`memory_error`    the experiment, and the margin of every plan
`memory_runs`     models in training under plans, on one rank and on two
"""
