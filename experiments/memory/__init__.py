"""Measure the memory model's errors.

`memory_error`    the experiment, and the margin of every plan
`memory_runs`     training models under plans, on one rank and on two
"""
