"""Kernels of products, attention and the operators between them, in every precision.

Each is called as the torch function, with encoded operands.

`linear` linear layers in INT8, forward alone or in all three products `linear_bf16` linear layers in BF16
whose weight's gradient comes from transposed copies `matmul` batched products of activations in INT8;
`grouped_matmul` products of experts `fp8` linear layers in FP8 `fp32` products in FP32 by the fastest kernel
`fp16_tf32` any product in FP16 or TF32; `linear_fp16_tf32` linear layers, faster `convolution/` convolutions
in BF16 and INT8, by products of windows or by oneDNN `attention/` attention in BF16 and INT8, some scores at
a time or all at once `embedding` lookups in BF16 and INT8 `norms`, `gelu`, `dropout`, `interpolate` of 16-bit
values, where torch is slow or raises
"""
