"""Sensitivity: the gradient variance that each precision of each operator adds, estimated or measured.

`calibration`        the input of both indicators, and its training steps
`variance`           the default indicator, from two steps per batch
`directional_probe`  the movement of the gradient by each rounding, for `variance`
`empirical`          the reference: gradient errors measured with the real kernels
`rounding`           the rounding error of each element, as the kernels round
"""
