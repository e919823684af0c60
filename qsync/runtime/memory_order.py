"""Decide where a rewritten graph must restore the traced memory order.

Kernels of convolutions and of attention return channels-last order. Most calls accept any order, so their
operands keep theirs. Four readers need the traced order: callers of the graph, custom registered operators,
calls that fail at other strides, and writes through views.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch._ops
import torch.fx

from qsync.operators.registry import declared
from qsync.operators.structure import OTHER, UNSAVED_FUNCTION
from qsync.operators.views import VIEW
from qsync.records.graph import Op
from qsync.tracing.inplace_calls import traced_storages, written_by
from qsync.tracing.operator_table import call_name, classify, is_torch, names_a_type
from qsync.tracing.segments import Segment

_RESHAPE = {"size": "shape"}  # the argument of a view, by its name in reshape
_VIEWS = ("detach", "as_strided")  # views that the table of kinds does not list
# torch calls that fail at another memory order than traced; other calls accept any.
_ASK_FOR_ORDER = ("view", "view_as", "view_as_complex", "view_as_real")


def lies_by_rows(value: torch.Tensor) -> bool:
    """Return whether a tensor's strides do not increase from one dimension to the next."""
    strides = [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size != 1]
    return all(outer >= inner for outer, inner in pairwise(strides))


def by_rows(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor in row-major order: itself, or a contiguous copy."""
    return value if lies_by_rows(value) else value.contiguous()


def is_image_by_rows(node: torch.fx.Node) -> bool:
    """Return whether a node's traced result had at least three dimensions in row-major order."""
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.ndim >= 3 and lies_by_rows(value)


def is_filter_of_open_strides(node: torch.fx.Node, source: torch.fx.Node) -> bool:
    """Return whether an operand is a convolution's weight with dimensions of size 1.

    torch's gradient for it follows the images' memory order, which may differ from the traced one.
    """
    weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    value = source.meta.get("example_value")
    return source is weight and isinstance(value, torch.Tensor) and value.ndim == 4 and 1 in value.shape


def is_registered(node: torch.fx.Node) -> bool:
    """Return whether a call is of a custom registered operator, which may require any strides."""
    return isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))


def asks_for_order(op: Op, node: torch.fx.Node) -> bool:
    """Return whether a call may depend on its operands' traced strides."""
    name = call_name(node).partition(".")[0]
    if name in _ASK_FOR_ORDER:
        return node.target != "view" or names_a_type(node)  # other views become reshape
    return op.kind in (OTHER.kind, UNSAVED_FUNCTION.kind) and not is_torch(node.target)


def owners_of_order(segment: Segment) -> set[torch.fx.Node]:
    """Return the nodes whose result must keep the traced order, because views write to it.

    With another order such a view would be a copy. A storage's first node sets the order of all its views.
    """
    shared: set[int] = set()
    for node in segment.module.graph.nodes:
        if written_by(node):
            shared.update(*map(traced_storages, (node, *node.all_input_nodes)))
    owners, seen = set[torch.fx.Node](), set[int]()
    for node in segment.module.graph.nodes:
        storages = set(traced_storages(node))
        is_call = node.op in ("call_function", "call_method")
        if is_call and storages & shared - seen and is_image_by_rows(node):
            owners.add(node)
        seen |= storages
    return owners


def spell_as_reshape(node: torch.fx.Node) -> None:
    """Turn a call of `view` into `reshape`, since a convolution's result may have another order."""
    if node.op == "call_method" and node.target == "view" and not names_a_type(node):
        node.target = "reshape"
        node.kwargs = {_RESHAPE.get(key, key): value for key, value in node.kwargs.items()}


def viewed(segment: Segment, node: torch.fx.Node) -> torch.fx.Node:
    """Return the base node of a view, through views of views; any other node itself."""
    while node.op in ("call_function", "call_method") and node.all_input_nodes:
        source = node.all_input_nodes[0]
        is_view = declared(classify(node)[0]).may_alias or call_name(node) in _VIEWS
        # Parts come from a tuple that a view returned; items of other tuples are no views.
        is_whole = (
            isinstance(source.meta.get("example_value"), torch.Tensor) or classify(source)[0] == VIEW.kind
        )
        shares = not set(traced_storages(node)).isdisjoint(traced_storages(source))
        if source in segment.nested or not (is_view and is_whole and shares):
            break
        node = source
    return node


def viewed_again(
    node: torch.fx.Node,
    base: torch.fx.Node,
    views: dict[torch.fx.Node, torch.fx.Node],
    new: dict[torch.fx.Node, torch.fx.Node],
) -> torch.fx.Node:
    """Return a copy of a view of one node as a view of `base`; `views` caches copies by original node."""
    if node not in views:
        source = node.all_input_nodes[0]
        found = viewed_again(source, base, views, new)
        copied = found.graph.node_copy(node, lambda n: found if n is source else new[n])
        spell_as_reshape(copied)
        traced, whole = node.meta["example_value"], base.meta["example_value"]
        if isinstance(traced, torch.Tensor) and whole.requires_grad and not traced.requires_grad:
            copied = copied.graph.call_method("detach", (copied,))
        views[node] = copied
    return views[node]
