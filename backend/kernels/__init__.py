"""Kernels of products and attention in every precision.

Each is called as the torch function, with encoded operands.

`linear`           linear layers in INT8, forward alone or in all three products
`linear_bf16`      linear layers in BF16 whose weight's gradient comes from transposed copies
`matmul`           batched products of activations in INT8
`fp8`              linear layers in FP8
`fp32_fast`        products in FP32 by the fastest kernel
`fp16_tf32`        any product in FP16 or TF32; `linear_fp16_tf32`  linear layers, faster
`convolution_bf16`  convolutions in BF16 on CPUs; `convolution_int8`  in INT8
`conv_products`    windows and gradients of both; `conv_strategy`  when windows beat oneDNN
`attention_bf16`   attention in BF16 on CPUs; `attention_int8`  in INT8
`attention_heads`  operands as matrices per head; `softmax`  the passes over scores
`embedding`        lookups in BF16 and INT8
"""
