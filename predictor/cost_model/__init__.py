"""Cost model: the time of operators that were not measured.

`model`             the learned model, its stated error, and prices of many calls
`roofline_law`      time as a launch, products and bytes: a linear fit
`gaussian_process`  a smooth correction of the law: Gaussian process regression
`features`          the numbers that the correction is a function of
`op_calls`          an operator as a call with shapes; its operations, bytes and roofline
`samples`           measured calls from profiles; which calls to measure
`shape_pool`        random calls with the shapes of models
`fill_profile`      profiles of other batch sizes, grown models and simulated devices
"""
