"""Search over levers other than precision.

`shares`           shares of the batch, chosen together with precisions
`search`           choose levers by optuna, and precisions inside each trial by the solver
`search_space`     the settings of a search, and those tried first
`save_less_steps`  how many operators save less for backward, block by block
"""
