"""Predictor: the cost of each precision in accuracy, time and memory.

`sensitivity/`  the gradient variance that each precision of each operator adds
`profiling/`    measured times of operators, casts, links and loaders
`memory/`       the memory peak of a step
`cost_model/`   times of operators that were not measured
"""
