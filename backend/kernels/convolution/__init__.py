"""Convolutions on CPUs.

`convolution_bf16` in BF16; `convolution_int8` in INT8 `conv_products` windows and gradients of both;
`conv_strategy` when windows beat oneDNN `conv_geometry` stride, padding, dilation and groups in numbers;
`image_order` channels first or last
"""
