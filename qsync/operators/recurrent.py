"""Recurrent networks: all layers and steps of a torch LSTM, GRU or RNN are one call."""

from __future__ import annotations

from qsync.operators.declaration import Product, Shape, Shapes, elements
from qsync.operators.precision import Precision


def _flops(shapes: Shapes, result: Shape) -> int:
    """Count the product of every step of every row with every weight."""
    weights = sum(elements(shape) for shape in shapes if len(shape) == 2)
    return 2 * elements(shapes[0][:-1]) * weights


RNN = Product(
    kind="rnn",
    calls=dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), ()),
    flops=_flops,
    backward=2.0,
    precisions=(Precision.FP32, Precision.BF16),
    unwritten="not written; only its BF16 form is",
    has_module=True,
)

OPERATORS = (RNN,)
