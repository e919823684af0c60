"""Search over levers other than precision.

`shares`  shares of the batch, chosen together with precisions
`search`  the settings of a step as a whole, with the solver inside each
"""
