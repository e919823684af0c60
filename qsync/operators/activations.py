"""Activations and dropout."""

from __future__ import annotations

from qsync.operators.declaration import following

RELU = following("relu", is_elementwise=True, is_exact=True, saves_less=("plain", "bits"), is_epilogue=True)
GELU = following("gelu", is_elementwise=True, saves_less=("output", "codes"), is_epilogue=True)
SILU = following("silu", is_elementwise=True, saves_less=("codes", "codes"))
DROPOUT = following(
    "dropout",
    is_exact=True,
    saves_nothing=True,
    saves_by_rule=True,
    saves_less=("bits", "bits"),
    is_replaced=True,
)

OPERATORS = (
    RELU,
    following("relu6", is_elementwise=True, is_exact=True),
    following("leaky_relu", is_elementwise=True),
    GELU,
    SILU,
    following("tanh", is_elementwise=True),
    following("sigmoid", is_elementwise=True),
    following("hardswish", is_elementwise=True),
    following("hardtanh", is_elementwise=True, is_exact=True),
    following("elu"),
    following("selu"),
    following("celu"),
    following("mish"),
    following("glu"),
    following("hardsigmoid"),
    DROPOUT,
)
