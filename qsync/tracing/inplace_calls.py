"""Make in-place calls out of place, so that no write goes to a cast's copy; keep results bitwise.

After a cast of x, `x.add_(y)` would write to the copy. If no other node of the written storage is read later,
the call becomes `x.add(y)` and later readers of x read its result: the same numbers. Otherwise (a write
through a view, `setitem`) the call stays, and all nodes that share the storage are reported, to stay in the
traced type. A write without gradients to a tensor that has one also stays: `x.add(y)` would have no gradient.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._pytree import tree_leaves

from qsync.operators.registry import declared
from qsync.tracing.operator_table import call_name, classify, functional_name, may_return_input

WAS_IN_PLACE = "qsync_was_in_place"  # meta key of nodes whose call had `inplace=True`


def make_out_of_place(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Rewrite in-place calls if that is safe; return the nodes whose storage is still written to."""
    # `x @= y` makes a new tensor, but FX's code for `imatmul` would also give it to readers of the old x.
    for node in graph.find_nodes(op="call_function", target=operator.imatmul):
        node.target = operator.matmul
    position = {node: i for i, node in enumerate(graph.nodes)}
    storage = _storages(graph)
    untrained = _without_gradients(graph)
    written: set[torch.fx.Node] = set()
    for node in list(graph.nodes):
        targets = [t for t in written_by(node) if any(v.is_floating_point() for v in _tensors(t))]
        if not targets:
            continue
        target = targets[0]
        # Nodes of the storage before the write; later nodes derive from the result and read that.
        sharers = [other for other in storage[target] if position[other] < position[node]]
        outside = any(other.op in ("placeholder", "get_attr") for other in sharers)
        others = [other for other in sharers if other is not target]
        read_later = any(position[user] > position[node] for other in others for user in other.users)
        detaches = node in untrained and any(v.requires_grad for n in storage[target] for v in _tensors(n))
        if outside or read_later or detaches or not _keeps_type(node, targets) or not _rewrite(node):
            written.update(*(storage[target] for target in targets))
        else:
            after = {user for user in target.users if position[user] > position[node]}
            target.replace_all_uses_with(node, delete_user_cb=after.__contains__)
    return written


def _without_gradients(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Return the nodes in the parts of a graph in which gradients are off."""
    untrained: set[torch.fx.Node] = set()
    trains, outer = True, [True]
    for node in graph.nodes:
        name = call_name(node)
        if name == "_set_grad_enabled":
            trains = bool(node.args[0])
        elif name == "_enter_inference_mode":
            outer.append(trains)
            trains = not (node.args[0] if node.args else True)
        elif name == "_exit_inference_mode":
            trains = outer.pop()
        elif not trains:
            untrained.add(node)
    return untrained


def written_by(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the nodes whose storage a call writes to."""
    if node.op not in ("call_function", "call_method"):
        return []
    name = call_name(node)
    written = [node.kwargs.get("out"), *_named_by_schema(node)]
    bound = _inplace_flag(node)
    if bound is not None:
        written.extend(bound.args[:1])
    elif name.strip("_") == "setitem" or functional_name(name) is not None:
        named = [node.kwargs[key] for key in ("input", "self") if key in node.kwargs]
        written.extend((*node.args, *named)[:1])
    nodes = [value for value in tree_leaves(written) if isinstance(value, torch.fx.Node)]
    return list(dict.fromkeys(nodes))


def _named_by_schema(node: torch.fx.Node) -> list[Any]:
    """Return the arguments that a registered operator writes to, by its schema."""
    overloads: list[Any] = []
    if isinstance(node.target, torch._ops.OpOverload):
        overloads = [node.target]
    elif isinstance(node.target, torch._ops.OpOverloadPacket):
        names = node.target.overloads()  # type: ignore[no-untyped-call]
        overloads = [getattr(node.target, name) for name in names]
    written = []
    for overload in overloads:
        for place, argument in enumerate(overload._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            is_given = place < len(node.args) and not argument.kwarg_only
            written.append(node.args[place] if is_given else node.kwargs.get(argument.name))
    return written


def _inplace_flag(node: torch.fx.Node) -> inspect.BoundArguments | None:
    """Return the arguments of a call with `inplace=True`; None for other calls."""
    if node.op != "call_function" or getattr(node.target, "__module__", None) != F.__name__:
        return None
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a builtin without a signature has no such argument
        return None
    return bound if bound.arguments.get("inplace", False) else None


def _keeps_type(node: torch.fx.Node, targets: list[torch.fx.Node]) -> bool:
    """Return whether a call's result has the same type out of place (in place, FP32 + FP64 is FP32).

    The result is False for a call that writes to several tensors.
    """
    if len(targets) > 1 or not _is_float(targets[0]):
        return False
    dtype = targets[0].meta["example_value"].dtype
    return all(
        other.meta["example_value"].dtype == dtype for other in node.all_input_nodes if _is_float(other)
    )


def _rewrite(node: torch.fx.Node) -> bool:
    """Convert a node to its out-of-place call; return False if it has none."""
    bound = _inplace_flag(node)
    if bound is not None:
        bound.arguments["inplace"] = False
        node.args, node.kwargs = bound.args, bound.kwargs
        node.meta[WAS_IN_PLACE] = True
        return True
    name = functional_name(call_name(node))
    takes_list = any(isinstance(value, (tuple, list)) for value in node.args[:1])
    replacement = _find(node, name) if name and "out" not in node.kwargs and not takes_list else None
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

    Nodes share storage if their traced tensors did, or if a call's name marks it as a view.
    """
    group: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    owner: dict[int, torch.fx.Node] = {}
    for node in graph.nodes:
        group[node] = [node]
        bases = list(written_by(node))
        if node.op in ("call_function", "call_method") and (
            declared(classify(node)[0]).may_alias or may_return_input(node)
        ):
            bases.extend(node.all_input_nodes[:1])
        for base in bases:
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
        return []  # inside torch.vmap or torch.func, tensors have no accessible storage
    return [tensor.untyped_storage()._cdata for tensor in tensors]


def _is_float(node: torch.fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _tensors(node: torch.fx.Node) -> list[torch.Tensor]:
    values = tree_leaves(node.meta.get("example_value"))
    return [value for value in values if isinstance(value, torch.Tensor)]
