"""Sensitivity: the gradient variance that each precision of each operator adds, estimated or measured.

`calibration`        the input of both indicators, and one training step of it
`variance`           the default indicator, from two steps per batch
`directional_probe`  the movement of the gradient by each rounding, from which `variance` is made
`empirical`          the truth: gradient errors measured with the real kernels
`rounding`           the rounding error of each element, as the kernels round
"""
