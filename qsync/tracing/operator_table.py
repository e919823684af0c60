"""Classify torch calls: their kind, their role, and their arguments that are operands.

The tables are allow-lists, never deny-lists: an unlisted call is fixed and runs in its traced type.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch.utils._pytree import tree_leaves

from qsync.operators.declaration import Role
from qsync.operators.norms import BATCH_NORM, FROZEN_BATCH_NORM
from qsync.operators.precision import LARGEST
from qsync.operators.registry import BY_CALL, PRODUCTS, declared
from qsync.operators.structure import FUNCTION, OTHER, UNSAVED_FUNCTION
from qsync.operators.views import VIEW
from qsync.records.graph import num_elements

DTYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.int64: "int64", torch.int32: "int32", torch.int16: "int16", torch.int8: "int8",
    torch.uint8: "uint8", torch.bool: "bool", torch.complex64: "complex64",
}  # fmt: skip

# A user's torch.autograd.Function is one call with two traced graphs. It is a following operator if both
# graphs are elementwise and it has one result.
_FUNCTION = "autograd_function_apply"
# Calls that compute with their integer arguments (integers are sizes and positions in other calls).
_TAKES_NUMBERS = (
    "add", "sub", "rsub", "mul", "div", "truediv", "iadd", "isub", "imul", "itruediv", "add_", "sub_", "mul_",
    "div_", "where", "masked_fill", "masked_fill_", "fill_", "full", "full_like", "new_full",
)  # fmt: skip
_GRAD_MODE, _WAYS = "_set_grad_enabled", 2  # number of a function's graphs: forward, backward
# Products without a low-precision kernel, which run in their traced type. torch does not count their flops.
UNWRITTEN_PRODUCTS = ("addbmm", "grouped_mm", "_grouped_mm")

# Tensor attributes that return views.
_VIEWS = ("T", "mT", "H", "mH", "real", "imag")

# Namespaces of registered operators that are classified by name.
_NAMESPACES = ("aten", "transformers")

# In-place call -> functional call, if its name is not just that with an underscore. `x @= y` writes nothing.
_OPERATOR_INPLACE: dict[str, str] = {
    **{f"i{name}": name for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")},
    **{f"i{name}": f"{name}_" for name in ("and", "or")},
    "ixor": "xor", "ilshift": "lshift", "irshift": "rshift",
}  # fmt: skip

# Dropout -> its default of `training`. A dropout that drops nothing returns its input without a copy.
_DROPOUTS: dict[str, bool] = {
    **{name: True for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout")},
    **{name: False for name in ("alpha_dropout", "feature_alpha_dropout")},
}


def call_name(node: torch.fx.Node) -> str:
    """Return the bare name of a call (`linear`, `add_`), with an in-place call's underscore."""
    if node.op == "call_method":
        return str(node.target)
    name = getattr(node.target, "__name__", str(node.target))
    return str(name).removesuffix(".default")  # overload suffix of ATen's operators


def bare_name(node: torch.fx.Node) -> str:
    """Return the bare name of a call, without the library that registered it: `grouped_mm_fallback`."""
    if isinstance(node.target, torch._ops.OpOverload):  # as aten.slice.Tensor
        return str(node.target.overloadpacket.__name__)
    return call_name(node).rpartition(".")[2]


def functional_name(name: str) -> str | None:
    """Return the out-of-place name of an in-place call; None for the name of another call."""
    operator = name[2:-2] if name.startswith("__") and name.endswith("__") else name
    if operator in _OPERATOR_INPLACE:
        return _OPERATOR_INPLACE[operator]
    if name.endswith("_") and not name.endswith("__"):
        return name[:-1]
    return None


def classify(node: torch.fx.Node) -> tuple[str, Role]:
    """Return kind and role of a call from its name; its tensors may still make it fixed later."""
    name = call_name(node)
    if name == _FUNCTION:
        results, bodies = tree_leaves(node.meta.get("example_value")), bodies_of(node)
        follows = len(results) == 1 and len(bodies) == _WAYS and all(map(_computes_elements, bodies))
        found = FUNCTION if follows else OTHER
        saves = len(bodies) < _WAYS or _saves_values(bodies[0])
        return (found if saves else UNSAVED_FUNCTION).kind, found.role
    if not is_torch(node.target):
        return OTHER.kind, Role.FIXED
    if name in BY_CALL:
        found = BY_CALL[name]
        return _by_arguments(node, found.kind), Role.FIXED if name in found.fixed_calls else found.role
    if name == "getattr" and node.args[1] in _VIEWS:
        return VIEW.kind, Role.FIXED
    return OTHER.kind, Role.FIXED


def _by_arguments(node: torch.fx.Node, kind: str) -> str:
    """Return the kind of a call, refined by its arguments."""
    if kind == BATCH_NORM.kind and not _argument(node, 5, "training", False):
        return FROZEN_BATCH_NORM.kind
    return kind


def bodies_of(node: torch.fx.Node) -> list[torch.fx.Graph]:
    """Return the forward and backward graphs of a user's torch.autograd.Function call."""
    named = [
        argument
        for argument in node.args
        if isinstance(argument, torch.fx.Node) and argument.op == "get_attr"
    ]
    found = [getattr(node.graph.owning_module, str(argument.target), None) for argument in named]
    return [body.graph for body in found if isinstance(body, torch.fx.GraphModule)]


def _saves_values(forward: torch.fx.Graph) -> bool:
    """Return whether the forward of a user's function saves tensors, its second return value."""
    (returned,) = forward.output_node().args
    is_known = isinstance(returned, (tuple, list)) and len(returned) == 2
    return not is_known or not isinstance(returned[1], (tuple, list)) or len(returned[1]) > 0  # type: ignore[index]


def _computes_elements(body: torch.fx.Graph) -> bool:
    """Return whether all calls of a graph are elementwise, in any float type."""
    return all(
        node.op in ("placeholder", "output")
        or call_name(node) == _GRAD_MODE
        or (
            declared(classify(node)[0]).is_elementwise
            and not names_a_type(node)
            and not large_constants(node)
        )
        for node in body.nodes
    )


def operands(node: torch.fx.Node, kind: str) -> list[torch.fx.Node]:
    """Return the operand nodes of a call, in the order of Op.inputs."""
    if declared(kind).counts_repeats:
        return named_operands(node)
    called = BY_CALL.get(call_name(node))
    names = called.calls.get(call_name(node), ()) if called is not None else ()
    if not names:
        return list(node.all_input_nodes)
    found = [node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in enumerate(names)]
    return [argument for argument in found if isinstance(argument, torch.fx.Node)]


def named_operands(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the nodes among a call's arguments, in order, with repetitions."""
    found: list[torch.fx.Node] = []
    torch.fx.map_arg((node.args, node.kwargs), found.append)
    return found


def large_constants(node: torch.fx.Node) -> list[float]:
    """Return the magnitudes of a call's finite constants that exceed the range of FP16.

    Integers count only in _TAKES_NUMBERS; in other calls they are sizes and positions.
    """
    name, arguments = bare_name(node), (node.args, node.kwargs)
    if name in ("full", "new_full"):
        place = 1 if name == "full" else 2
        arguments = ((_argument(node, place, "fill_value", 0.0),), {})
    types = (int, float) if name in _TAKES_NUMBERS else (float,)
    numbers = [float(v) for v in tree_leaves(arguments) if isinstance(v, types) and not isinstance(v, bool)]
    return [abs(number) for number in numbers if LARGEST["fp16"] < abs(number) < math.inf]


def draws(node: torch.fx.Node, kind: str) -> bool:
    """Return whether a call returns random numbers; a dropout selects from its input instead."""
    packet = getattr(torch.ops.aten, bare_name(node).strip("_"), None)
    if kind == "dropout" or not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    overloads = [getattr(packet, name) for name in packet.overloads()]  # type: ignore[no-untyped-call]
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


def names_a_type(node: torch.fx.Node) -> bool:
    """Return whether a call names a type, as `softmax(x, dtype=torch.float32)`, which then is kept."""
    return any(isinstance(value, torch.dtype) for value in (*node.args, *node.kwargs.values()))


def dropped(node: torch.fx.Node, kind: str) -> float:
    """Return the dropout probability of a dropout or attention call; 0 for other calls."""
    if kind == "attention":
        return _number(_argument(node, 4, "dropout_p", 0.0))
    if kind != "dropout":
        return 0.0
    training = _argument(node, 2, "training", True) and node.kwargs.get("train", True)
    return _number(_argument(node, 1, "p", 0.5)) if training else 0.0


def may_return_input(node: torch.fx.Node) -> bool:
    """Return whether a call is a dropout that may return its input (in evaluation, or with p=0)."""
    name = call_name(node)
    if name not in _DROPOUTS or not is_torch(node.target):
        return False
    trains = node.kwargs.get("train", _argument(node, 2, "training", _DROPOUTS[name]))
    share = _argument(node, 1, "p", 0.5)
    return not trains or isinstance(share, torch.fx.Node) or share == 0


def _number(value: Any) -> float:
    """Return a number argument of a call; for a graph input, its traced number."""
    if isinstance(value, torch.fx.Node):
        value = value.meta.get("example_value", 1.0)
    return float(value.node.hint) if isinstance(value, torch.SymFloat) else float(value)


def is_dilated(node: torch.fx.Node) -> bool:
    """Return whether a convolution call is dilated."""
    dilation = _argument(node, 5, "dilation", 1)
    return any(size != 1 for size in (dilation if isinstance(dilation, (tuple, list)) else (dilation,)))


def why_traced_as_is(node: torch.fx.Node, kind: str) -> str:
    """Return why a call of a product or an embedding must keep its traced type; empty if it need not."""
    if kind == "addmm" and (node.kwargs.get("beta", 1) != 1 or node.kwargs.get("alpha", 1) != 1):
        return "it scales its operands (alpha, beta)"
    if kind == "einsum" and len(named_operands(node)) < 2:
        return "it multiplies no two values"
    if kind == "embedding":
        if node.target is not torch.nn.functional.embedding:
            return "it is called as torch.embedding, not as torch.nn.functional.embedding"
        if _argument(node, 3, "max_norm", None) is not None:
            return "max_norm writes to its table"
        if _argument(node, 6, "sparse", False):
            return "its gradient is sparse"
    return ""


def _argument(node: torch.fx.Node, place: int, name: str, default: Any) -> Any:
    return node.args[place] if place < len(node.args) else node.kwargs.get(name, default)


def flops(kind: str, shapes: list[tuple[int, ...]], output: tuple[int, ...]) -> int:
    """Return a product's forward flops, with a multiply-add counted as two; 0 for other kinds."""
    return PRODUCTS[kind].flops(shapes, output) if kind in PRODUCTS else 0


def flops_of_unwritten(node: torch.fx.Node) -> int:
    """Return the forward flops of a product without a low-precision kernel; 0 for other calls."""
    name = bare_name(node)
    values = [other.meta.get("example_value") for other in (node, *node.all_input_nodes)]
    if name not in UNWRITTEN_PRODUCTS:
        return 0
    result, *shapes = [traced_shape(value) if isinstance(value, torch.Tensor) else () for value in values]
    if len(shapes) < 2 or not result:
        return 0
    left = shapes[1] if "bmm" in name else shapes[0]
    return 2 * num_elements(left) * result[-1]


def traced_size(size: int | torch.SymInt) -> int:
    """Return a size as a plain integer; for a symbolic size its traced value, without a guard."""
    return size if isinstance(size, int) else int(size.node.hint)


def traced_shape(value: torch.Tensor) -> tuple[int, ...]:
    """Return the traced sizes of a tensor as plain integers."""
    return tuple(map(traced_size, value.shape))


def traced_type(value: torch.Tensor) -> str:
    """Return the name of a tensor's type."""
    return DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))


def runs_code_of_users(node: torch.fx.Node) -> bool:
    """Return whether a call of torch's runs a function of users, or communicates between ranks."""
    module = getattr(node.target, "__module__", None) or ""
    return call_name(node) == _FUNCTION or "c10d" in module or "distributed" in module


def is_torch(target: str | Callable[..., Any]) -> bool:
    """Return whether a call is torch's or Python's own, and not a user's of the same name."""
    if isinstance(target, str):
        return True
    module = getattr(target, "__module__", None) or ""
    if module.startswith("torch._ops."):  # registered operators
        return module.split(".")[2] in _NAMESPACES
    return module.startswith(("torch", "_operator", "operator")) or module in ("math", "builtins", "")
