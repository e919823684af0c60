"""Indicators from the literature, to compare with.

`qsync_depth`      QSync's: rounding variances weighted by depth
`fisher`           squared first-order change of the loss
`hessian`          loss curvature times squared weight error
`weight_rounding`  squared rounding error of the weights alone
`random_scores`    random numbers, the baseline
"""
