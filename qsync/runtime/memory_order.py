"""Memory order: where a rewritten graph has to lay elements out as they were traced.

Kernels of convolutions and of attention return channels-last order. Most calls take any order, so their
operands stay as they lie. Four readers need the traced order: callers of the graph, operators that somebody
registered, calls that fail at other strides, and writes through views.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch._ops
import torch.fx

from qsync.records.graph import Op
from qsync.tracing.inplace_calls import traced_storages, written_by
from qsync.tracing.operator_table import UNSAVED_FUNCTION, call_name, classify, is_torch, names_a_type
from qsync.tracing.segments import Segment

_RESHAPE = {"size": "shape"}  # the argument of a view, as reshape calls it
_VIEWS = ("detach", "as_strided")  # whose kind is not of views
# Torch's calls that fail at another order of elements than was traced. Its other calls take any.
_ASK_FOR_ORDER = ("view", "view_as", "view_as_complex", "view_as_real")


def lies_by_rows(value: torch.Tensor) -> bool:
    """Return whether no dimension of a tensor has a larger stride than one before it."""
    strides = [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size != 1]
    return all(outer >= inner for outer, inner in pairwise(strides))


def by_rows(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor that lies by rows: itself, or a contiguous copy."""
    return value if lies_by_rows(value) else value.contiguous()


def is_image_by_rows(node: torch.fx.Node) -> bool:
    """Return whether a node's result, of three dimensions or more, lay by rows when it was traced."""
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.ndim >= 3 and lies_by_rows(value)


def is_filter_of_open_strides(node: torch.fx.Node, source: torch.fx.Node) -> bool:
    """Return whether an operand is the weight of a convolution, with dimensions of size 1.

    The gradient that torch returns for it lies as the images do, and those may lie otherwise than traced.
    """
    weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    value = source.meta.get("example_value")
    return source is weight and isinstance(value, torch.Tensor) and value.ndim == 4 and 1 in value.shape


def is_registered(node: torch.fx.Node) -> bool:
    """Return whether a call is of an operator that somebody registered, which may ask for any strides."""
    return isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))


def asks_for_order(op: Op, node: torch.fx.Node) -> bool:
    """Return whether a call may depend on the strides that its operands had when it was traced."""
    name = call_name(node).partition(".")[0]
    if name in _ASK_FOR_ORDER:
        return node.target != "view" or names_a_type(node)  # other views become reshape
    return op.kind in ("other", UNSAVED_FUNCTION) and not is_torch(node.target)


def owners_of_order(segment: Segment) -> set[torch.fx.Node]:
    """Return the nodes whose result has to lie as it was traced, as it is written to through views.

    A view of another order is a copy. The first node of a storage decides how all that share it lie.
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
    """Make a call of `view` one of `reshape`: a convolution's result may have another order of elements."""
    if node.op == "call_method" and node.target == "view" and not names_a_type(node):
        node.target = "reshape"
        node.kwargs = {_RESHAPE.get(key, key): value for key, value in node.kwargs.items()}


def viewed(segment: Segment, node: torch.fx.Node) -> torch.fx.Node:
    """Return the node that a node is a view of, of views of views the first; of others the node itself."""
    while node.op in ("call_function", "call_method") and node.all_input_nodes:
        source = node.all_input_nodes[0]
        is_view = classify(node)[0] in ("view", "contiguous", "float") or call_name(node) in _VIEWS
        # Parts are taken from a tuple, which a view has made: of another tuple they are no views.
        is_whole = isinstance(source.meta.get("example_value"), torch.Tensor) or classify(source)[0] == "view"
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
    """Add the calls that made a node from `base` once more, on what `views` has for it; extend `views`."""
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
