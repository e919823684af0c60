"""Attention on CPUs.

`attention_bf16`   in BF16, or torch's kernel where that is faster; `attention_int8`  in INT8
`attention_short`  over few keys, for both: all scores at once
`attention_heads`  operands as matrices per head; `softmax`  the passes over scores
"""
