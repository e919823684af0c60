"""The example tensors of a traced graph: their memory order, and the calls that copy."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.fx
from torch._C._functorch import is_functorch_wrapped_tensor

from qsync.records.graph import num_elements
from qsync.tracing.inplace_calls import traced_storages
from qsync.tracing.operator_table import call_name, operands, traced_shape, traced_size


def copies(node: torch.fx.Node, kind: str) -> bool | None:
    """Return whether a traced view or `contiguous` copied its input, or a product copies an operand.

    A linear layer copies an input whose rows do not form one dimension, as a transposed one: True, else None.
    Attention in torch's plain kernel copies values whose heads do not form one dimension, or are shared:
    None, or False without a copy. True if keys broadcast to the queries' heads, which only that kernel
    supports. None for any other call.

    A dropout that drops nothing returns its input, though its traced result is a new tensor. On the meta
    device the result is None, since attention's memory order differs there.
    """
    value = example_of(node)
    if value is not None and value.is_meta:
        return None
    if kind == "linear":
        return True if _lies_apart(example_of(operands(node, kind)[0]), 1) else None
    if kind == "attention":
        queries, _, values = map(example_of, operands(node, kind)[:3])
        if queries is not None and values is not None and queries.shape[:-2] != values.shape[:-2]:
            return None if node.kwargs.get("enable_gqa") else True
        return None if _lies_apart(values, 2) else False
    if kind not in ("view", "contiguous") or call_name(node) == "dropout" or not node.all_input_nodes:
        return None
    source = {storage for value in node.all_input_nodes for storage in traced_storages(value)}
    return source.isdisjoint(traced_storages(node)) if source else None


def _lies_apart(value: torch.Tensor | None, kept: int) -> bool:
    """Return whether no view can merge all but the last `kept` dimensions of a tensor into one."""
    if value is None or is_functorch_wrapped_tensor(value):
        return False
    outer = [
        (size, traced_size(stride))  # comparing symbols would add a guard on this size
        for size, stride in zip(traced_shape(value)[:-kept], value.stride()[:-kept], strict=True)
        if size != 1
    ]
    return any(above != below * size for (_, above), (size, below) in pairwise(outer))


def is_channels_last(value: torch.Tensor) -> bool:
    """Return whether a 4-D tensor is in channels-last order, and not also contiguous."""
    if value.ndim != 4 or is_functorch_wrapped_tensor(value):
        return False
    return value.is_contiguous(memory_format=torch.channels_last) and not value.is_contiguous()


def example_of(node: torch.fx.Node) -> torch.Tensor | None:
    """Return the traced result of a call; for several tensors (split) the largest one."""
    value = node.meta.get("example_value")
    if isinstance(value, (tuple, list)) and value and all(isinstance(item, torch.Tensor) for item in value):
        return max(value, key=lambda item: num_elements(traced_shape(item)))  # type: ignore[no-any-return]
    return value if isinstance(value, torch.Tensor) else None
