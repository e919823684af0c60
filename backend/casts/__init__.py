"""Casts: passes over a matrix between products, in plain torch and compiled.

`cast_ops`        quantize, dequantize, convert to BF16, unfold
`epilogues`       casts with an activation
`autotune`        whether a compiled cast is faster on a GPU
`compiled_casts`  load the compiled casts
`build_cpu`, `build_cuda`, `build_process`  compile them; `launching.h` launches them on GPUs
`tvm/`            the compiled casts, in TVM's script
"""
