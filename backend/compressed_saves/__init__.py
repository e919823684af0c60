"""Operators that save compressed tensors for backward.

`saved_ops` the operators, by kind and form `activation_slopes` derivatives of gelu and silu from eight bits,
or from the result and a bit `bitmask` masks at one bit per element `deferred_flags` booleans that a GPU
reports a step later
"""
