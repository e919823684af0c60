"""Features of a call on a device, by which calls are alike. None has a unit.

Of the program: the sizes of its product (rows M, inner K, columns N, batch), their remainders beyond full
vectors, the geometry of convolutions, elements and widths of other kinds, the number of operands that are no
parameters, and of gradients. Of the device: the time of products and bytes of its backward in FP32 at its
peaks, in launches, and the share of its cache that the call fills.
"""

from __future__ import annotations

import math

from qsync.predictor.cost_model.op_calls import Call, moved_bytes, parts
from qsync.records.datasheets import DataSheet
from qsync.records.graph import num_elements

# Kinds of one algorithm, learned together. All other kinds are "rest".
_FAMILIES = {
    "linear": "product", "addmm": "product", "matmul": "matmul", "conv2d": "convolution",
    "conv1d": "convolution", "conv3d": "convolution", "conv_transpose": "convolution",
    "attention": "attention", "grouped_mm": "matmul", "baddbmm": "matmul", "cast": "cast", "view": "view",
}  # fmt: skip

# Kinds of the family "rest" that are distinguished by a feature: they access memory differently.
_REST = ("batch_norm", "layer_norm", "softmax", "gelu", "dropout", "max_pool2d", "add", "mul")
_MAX_HALVINGS = 5  # 2^5 = 32: multiples of it fill every vector


def family(kind: str) -> str:
    """Return the name of the group of kinds that are learned together with this one."""
    return _FAMILIES.get(kind, "rest")


def features(call: Call, sheet: DataSheet) -> list[float]:
    """Return the features of a call: as many for every call of its family.

    >>> features(call, sheet)
    """
    launch, products, memory = parts(call, "fp32", "backward", sheet)
    cached = moved_bytes(call, "fp32", "backward") / sheet.cache_bytes
    found = [_log(products / launch + 0.1), _log(memory / launch + 0.1), _log(cached + 0.01)]
    found += {
        "product": _product, "matmul": _matmul, "convolution": _convolution, "attention": _attention,
    }.get(family(call.kind), _rest)(call)  # fmt: skip
    return [*found, float(call.num_gradients)]


def _product(call: Call) -> list[float]:
    inner = call.inputs[1 if call.kind == "addmm" else 0].shape[-1]
    columns = call.output[-1]
    rows = num_elements(call.output) / max(columns, 1)
    return [
        _log(rows),
        _log(inner),
        _log(columns),
        _halvings(inner),
        _halvings(columns),
        float(len(call.inputs)),
    ]


def _matmul(call: Call) -> list[float]:
    return [_log(num_elements(call.output[:-2])), *_product(Call("matmul", call.inputs, call.output))]


def _convolution(call: Call) -> list[float]:
    x, weight, y = call.inputs[0].shape, call.inputs[1].shape, call.output
    pixels = num_elements(y[2:])
    stride = num_elements(x[2:]) / max(pixels, 1)
    inner, columns = num_elements(weight[1:]), weight[0]
    sizes = (num_elements(y) / max(columns, 1), inner, columns, num_elements(weight[2:]), stride, pixels)
    groups = x[1] / max(weight[1], 1)
    return [*(_log(size) for size in sizes), _log(groups), _halvings(weight[1]), _halvings(columns)]


def _attention(call: Call) -> list[float]:
    query, key = call.inputs[0].shape, call.inputs[1].shape
    sizes = (num_elements(query[:-2]), query[-2], key[-2], query[-1])
    return [*(_log(size) for size in sizes), float(len(call.inputs))]


def _rest(call: Call) -> list[float]:
    width = call.output[-1] if call.output else 1
    fresh = float(sum(not argument.parameter for argument in call.inputs))
    rank = float(len(call.output))
    found = [_log(num_elements(call.output)), _log(width), rank, float(len(call.inputs)), fresh]
    return found + [3.0 * (call.kind == kind) for kind in _REST if family(call.kind) == "rest"]


def _log(size: float) -> float:
    return math.log(max(size, 1e-3))


def _halvings(size: int) -> float:
    """Return how often a size halves evenly, at most 5 times: remainders do not fill a vector."""
    return float(min((size & -size).bit_length() - 1, _MAX_HALVINGS)) if size > 0 else 0.0
