"""Make in-place calls out of place, so that the copy of a cast never hides a write. Numerics stay exactly.

`x.add_(y)` after x was cast would write to the copy. If no other name of the written storage is read later,
the call becomes `x.add(y)` and later readers of x read its result: the same numbers. Otherwise (a write
through a view, `setitem`) the call stays, and all nodes that share the storage are reported, to stay in the
traced type.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch._C._functorch import is_functorch_wrapped_tensor

from qsync.tracing.operator_table import call_name, classify, functional_name

WAS_IN_PLACE = "qsync_was_in_place"  # a node's note that its author asked for `inplace=True`


def make_out_of_place(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Rewrite in-place calls where that is safe; return the nodes whose storage is still written to."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    storage = _storages(graph)
    written: set[torch.fx.Node] = set()
    for node in list(graph.nodes):
        target = _written_by(node)
        if target is None or not _is_float(target):
            continue
        # Names that the storage has before the write; later ones are made from the result and read that.
        sharers = [other for other in storage[target] if position[other] < position[node]]
        outside = any(other.op in ("placeholder", "get_attr") for other in sharers)
        others = [other for other in sharers if other is not target]
        read_later = any(position[user] > position[node] for other in others for user in other.users)
        if outside or read_later or not _keeps_type(node, target) or not _rewrite(node):
            written |= set(storage[target])
        else:
            target.replace_all_uses_with(node, delete_user_cb=partial(_is_after, position, node))
    return written


def _is_after(position: dict[torch.fx.Node, int], node: torch.fx.Node, user: torch.fx.Node) -> bool:
    return position[user] > position[node]


def _written_by(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the node whose storage a call writes to, None if it writes to none."""
    if node.op not in ("call_function", "call_method"):
        return None
    out = node.kwargs.get("out")
    if isinstance(out, torch.fx.Node):
        return out
    if not node.args or not isinstance(node.args[0], torch.fx.Node):
        return None
    name = call_name(node)
    inplace = name == "setitem" or functional_name(name) is not None or _inplace_flag(node) is not None
    return node.args[0] if inplace else None


def _inplace_flag(node: torch.fx.Node) -> inspect.BoundArguments | None:
    """Return the arguments of a call whose `inplace` argument is true, None of any other."""
    if node.op != "call_function" or getattr(node.target, "__module__", None) != F.__name__:
        return None
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a builtin without a signature has no such argument
        return None
    return bound if bound.arguments.get("inplace", False) else None


def _keeps_type(node: torch.fx.Node, target: torch.fx.Node) -> bool:
    """Return whether the call has the same type out of place: in place, FP32 plus FP64 is FP32."""
    dtype = target.meta["example_value"].dtype
    return all(
        other.meta["example_value"].dtype == dtype for other in node.all_input_nodes if _is_float(other)
    )


def _rewrite(node: torch.fx.Node) -> bool:
    """Give the node its out-of-place spelling; False if it has none."""
    bound = _inplace_flag(node)
    if bound is not None:
        bound.arguments["inplace"] = False
        node.args, node.kwargs = bound.args, bound.kwargs
        node.meta[WAS_IN_PLACE] = True
        return True
    name = functional_name(call_name(node))
    replacement = _find(node, name) if name and "out" not in node.kwargs else None
    if replacement is None:
        return False
    node.target = replacement
    return True


def _find(node: torch.fx.Node, name: str) -> str | Callable[..., Any] | None:
    if node.op == "call_method":
        return name if callable(getattr(torch.Tensor, name, None)) else None
    for module in (operator, torch, F):
        if hasattr(module, name):
            return getattr(module, name)  # type: ignore[no-any-return]
    return None


def _storages(graph: torch.fx.Graph) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """Return for each node all nodes that may share its storage.

    These shared a storage when traced, or are views by their name.
    """
    group: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    owner: dict[int, torch.fx.Node] = {}
    for node in graph.nodes:
        group[node] = [node]
        shares = node.op in ("call_function", "call_method") and (
            classify(node)[0] in ("view", "contiguous", "float") or _written_by(node) is not None
        )
        base = _written_by(node) or (node.args[0] if shares and node.args else None)
        if isinstance(base, torch.fx.Node):
            _unite(group, base, node)
        for storage in traced_storages(node):
            _unite(group, owner.setdefault(storage, node), node)
    return group


def _unite(group: dict[torch.fx.Node, list[torch.fx.Node]], one: torch.fx.Node, other: torch.fx.Node) -> None:
    if group[one] is group[other]:
        return
    group[one].extend(group[other])
    for node in group[other]:
        group[node] = group[one]


def traced_storages(node: torch.fx.Node) -> list[int]:
    """Return the identities of the storages of a node's traced result."""
    value = node.meta.get("example_value")
    values = value if isinstance(value, (tuple, list)) else (value,)
    tensors = [tensor for tensor in values if isinstance(tensor, torch.Tensor)]
    if any(is_functorch_wrapped_tensor(tensor) for tensor in tensors):
        return []  # inside torch.vmap or torch.func: no storage of its own to ask for
    return [tensor.untyped_storage()._cdata for tensor in tensors]


def _is_float(node: torch.fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.is_floating_point()
