"""Workspaces: the memory that kernels need while they run.

`op_workspaces`      the workspace of each kind of operator
`convolution_workspaces`, `attention_workspaces`  the same of these two kinds
`onednn_scratch`     the scratch memory of oneDNN's products
`op_context`         what an operator's record alone does not say of its memory
"""
