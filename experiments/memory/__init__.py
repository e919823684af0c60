"""Predicted bytes against measured ones.

`memory_error`    the experiment, and the margin of every plan
`memory_runs`     models in training under plans
`memory_ranks`    the same on two real ranks
`saved_bytes`     bytes saved for backward
"""
