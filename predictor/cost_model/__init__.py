"""Cost model: the time of operators that were not measured.

`model`         the learned model, its stated error, and prices of many calls
`roofline_law`  time as a launch, products and bytes: a linear fit
`op_calls`      an operator as a call with shapes; its operations, bytes and roofline
`samples`       measured calls from profiles; which calls to measure
`shape_pool`    random calls with the shapes of models
`sheet_profile` profiles of devices of which nothing was measured
`fill_profile`  profiles of other batch sizes, grown models and simulated devices
"""
