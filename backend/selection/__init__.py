"""Choose the kernel that computes a product.

`kernel_candidates`  which kernels exist for each product, precision and device
`kernel_selection`   the one that runs: by capability, agreement with the reference, and measured time
`shape_checks`       convolutions compared with FP32 once a shape, where oneDNN miscomputes some
"""
