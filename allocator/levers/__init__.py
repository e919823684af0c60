"""Search over levers other than precision.

`shares`      shares of the batch, chosen together with precisions
`bucket_cap`  the size of DDP's buckets
`search`      the settings of a step as a whole, with the solver inside each
"""
