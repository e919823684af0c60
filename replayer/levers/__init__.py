"""Profiles under levers other than precision.

`apply`           the profiles of a cluster under a plan's levers
`batch_size`      another number of samples
`accumulation`    several passes per step
`state_division`  optimizer state divided over the ranks
`recomputation`   blocks computed again in backward
"""
