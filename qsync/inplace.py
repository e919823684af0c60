"""In-place calls made out of place, so that a cast copy never hides a write. Keeps numerics exactly.

`x.add_(y)` after x was cast would write to the copy. Where nobody reads the written storage under another name, the call
becomes `x.add(y)` and later readers of x read its result: the same numbers. Where somebody does (a write through a view,
`setitem`), the call stays, and everything that shares the storage is reported so that it is kept in the traced type.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F

from qsync.operators import call_name, classify, functional_name

_INPLACE_FLAG = {F.relu, F.dropout, F.relu6, F.leaky_relu, F.silu, F.hardtanh, F.elu, F.hardswish, F.mish, F.selu, F.celu}


def make_out_of_place(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Rewrite in-place calls of `graph` where that is safe; the nodes whose storage is still written to."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    storage = _storages(graph)
    written: set[torch.fx.Node] = set()
    for node in list(graph.nodes):
        target = _written_by(node)
        if target is None or not _is_float(target):
            continue
        sharers = [other for other in storage[target] if other is not target and other is not node]
        read_later = any(position[user] > position[node] for other in sharers for user in other.users)
        if target.op in ("placeholder", "get_attr") or read_later or not _rewrite(node):
            written |= set(storage[target])
        else:
            target.replace_all_uses_with(node, delete_user_cb=lambda user, after=node: position[user] > position[after])
    return written


def _written_by(node: torch.fx.Node) -> torch.fx.Node | None:
    """The node whose storage a call writes to, None if it writes to none."""
    if node.op not in ("call_function", "call_method") or not node.args or not isinstance(node.args[0], torch.fx.Node):
        return None
    name = call_name(node)
    inplace = name == "setitem" or functional_name(name) is not None or _inplace_flag(node)
    return node.args[0] if inplace else None


def _inplace_flag(node: torch.fx.Node) -> bool:
    if node.target not in _INPLACE_FLAG:
        return False
    return bool(inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments.get("inplace", False))


def _rewrite(node: torch.fx.Node) -> bool:
    """Give the node its out-of-place spelling; False if it has none."""
    if _inplace_flag(node):
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
        bound.arguments["inplace"] = False
        node.args, node.kwargs = bound.args, bound.kwargs
        return True
    name = functional_name(call_name(node))
    replacement = _find(node, name) if name else None
    if replacement is None:
        return False
    node.target = replacement
    return True


def _find(node: torch.fx.Node, name: str) -> str | Callable[..., Any] | None:
    if node.op == "call_method":
        return name if hasattr(torch.Tensor, name) else None
    for module in (operator, torch, F):
        if hasattr(module, name):
            return getattr(module, name)  # type: ignore[no-any-return]
    return None


def _storages(graph: torch.fx.Graph) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """For each node, all nodes that may share its storage (views and what they view)."""
    group: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        group[node] = [node]
        shares = node.op in ("call_function", "call_method") and (
            classify(node)[0] in ("view", "contiguous", "float") or _written_by(node) is not None
        )
        base = node.args[0] if shares and node.args else None
        if isinstance(base, torch.fx.Node):
            group[base].append(node)
            group[node] = group[base]
    return group


def _is_float(node: torch.fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.is_floating_point()
