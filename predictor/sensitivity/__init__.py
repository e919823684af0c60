"""Sensitivity: the gradient variance that each precision of each operator adds, by several indicators.

`registry`           the indicators by name
`calibration`        the input of every indicator, and one training step of it
`variance`           the default indicator, from two steps per batch
`directional_probe`  the movement of the gradient by each rounding, from which `variance` is made
`empirical`          the truth: gradient errors measured with the real kernels
`rounding`           the rounding error of each element, as the kernels round
`operand_gradients`  every operand with its gradient, for first-order indicators
`other_indicators/`  indicators from the literature, to compare with
"""
