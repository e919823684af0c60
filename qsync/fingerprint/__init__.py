"""The fingerprint of a machine, measured on small models (`qsync doctor --report`).

`small_models`  three models with synthetic batches
`in_step`       operators inside a step beside the same alone, with causes of the difference
`measure`       predictions, precisions and operators of one small model
"""
