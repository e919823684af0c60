"""Classify torch calls: their kind, their role, and which of their arguments are operands of products.

Allow-lists, never deny-lists: a call nobody classified is fixed and runs in the type it was traced in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch.utils._pytree import tree_leaves

from qsync.records.graph import Role, num_elements
from qsync.records.precision import LARGEST

DTYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.int64: "int64", torch.int32: "int32", torch.int16: "int16", torch.int8: "int8",
    torch.uint8: "uint8", torch.bool: "bool", torch.complex64: "complex64",
}  # fmt: skip

# Adjustable kinds by the name of the torch call, with the names of their operands in the order of Op.inputs.
PRODUCTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "linear": ("linear", ("input", "weight", "bias")),
    "addmm": ("addmm", ("input", "mat1", "mat2")),
    "conv2d": ("conv2d", ("input", "weight", "bias")),
    "conv1d": ("conv1d", ("input", "weight", "bias")),
    "conv3d": ("conv3d", ("input", "weight", "bias")),
    **{f"conv_transpose{n}d": ("conv_transpose", ("input", "weight", "bias")) for n in (1, 2, 3)},
    **{name: ("matmul", ("input", "other")) for name in ("matmul", "linalg_matmul", "__matmul__")},
    "bmm": ("matmul", ("input", "mat2")),
    "mm": ("matmul", ("input", "mat2")),
    "baddbmm": ("baddbmm", ("input", "batch1", "batch2")),
    "scaled_dot_product_attention": ("attention", ("query", "key", "value", "attn_mask")),
    "embedding": ("embedding", ("input", "weight")),
    # All layers of torch's recurrences are one call; without names every tensor of it is an operand.
    **{name: ("rnn", ()) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    "einsum": ("einsum", ()),
    "grouped_mm_fallback": ("grouped_mm", ("input", "weight")),  # of transformers; offsets of groups are kept
}

# Following kinds by the name of the torch call. What matters beyond the name: "view" shares its input's
# storage, and norms take 16-bit input beside FP32 parameters and statistics (they reduce in FP32 inside).
FOLLOWING: dict[str, str] = {
    **{name: name for name in (
        "relu", "relu6", "leaky_relu", "gelu", "silu", "tanh", "sigmoid", "hardswish", "hardtanh", "softmax",
        "elu", "selu", "celu", "mish", "glu", "hardsigmoid", "abs", "dropout", "layer_norm", "rms_norm",
        "group_norm", "batch_norm", "add", "sub", "mul", "div", "neg", "pow", "mean", "contiguous", "cat",
        "stack", "where", "masked_fill", "pad", "clone", "roll", "interpolate", "avg_pool1d", "avg_pool2d",
        *(f"{pool}{n}d" for pool in ("max_pool", "adaptive_avg_pool") for n in (1, 2, 3)),
    )},
    "truediv": "div", "concat": "cat", "repeat_interleave": "clone", "repeat": "clone",
    **{name: "view" for name in (
        "view", "reshape", "transpose", "permute", "flatten", "unflatten", "squeeze", "unsqueeze", "expand",
        "expand_as", "getitem", "chunk", "split", "unbind", "t", "view_as", "reshape_as", "movedim", "narrow",
        "select", "swapaxes",
    )},
}  # fmt: skip

# A user's torch.autograd.Function is one call of two traced graphs. It follows if both compute elements by
# elements, and it has one result.
_FUNCTION = "autograd_function_apply"
_ELEMENTWISE = (
    "relu", "relu6", "leaky_relu", "gelu", "silu", "tanh", "sigmoid", "hardswish", "hardtanh", "add", "sub",
    "mul", "div", "neg", "pow", "where", "clone",
)  # fmt: skip
# Calls that compute with the whole numbers among their arguments.
_TAKES_NUMBERS = (
    "add", "sub", "rsub", "mul", "div", "truediv", "iadd", "isub", "imul", "itruediv", "add_", "sub_", "mul_",
    "div_", "where", "masked_fill", "masked_fill_", "fill_", "full", "full_like", "new_full",
)  # fmt: skip
_GRAD_MODE, _WAYS = "_set_grad_enabled", 2  # forward and backward
UNSAVED_FUNCTION = "unsaved_function"  # one that saves nothing for backward

# Products without a low-precision kernel, which run as traced, and whose operations torch does not count.
UNWRITTEN_PRODUCTS = ("addbmm", "bilinear", "grouped_mm", "_grouped_mm")

# Attributes that are views.
_VIEWS = ("T", "mT", "H", "mH", "real", "imag")

# Fixed kinds worth a name of their own (the memory model reads them); everything else unknown is "other".
FIXED: dict[str, str] = {
    **{
        name: "loss"
        for name in ("mse_loss", "nll_loss", "l1_loss", "binary_cross_entropy_with_logits", "kl_div")
    },
    **{name: name for name in ("cross_entropy", "sum", "cumsum", "exp", "sqrt", "rsqrt", "log_softmax")},
    **{name: "float" for name in ("to", "float", "type_as", "type")},
    "tile": "clone", "broadcast_to": "view",
}  # fmt: skip

FROZEN_NORM = "frozen_batch_norm"  # in evaluation: it has no statistics of its own
NORMS = ("layer_norm", "rms_norm", "group_norm", "batch_norm", FROZEN_NORM)

# Kinds through which a large constant survives: a mask stays a mask when it is reshaped or added.
PASSES_MAGNITUDE = (
    "add", "sub", "mul", "div", "neg", "where", "masked_fill", "view", "contiguous", "cat", "stack", "pad",
    "clone", "interpolate", "float", "input", "other", "sum", "cumsum", "exp", "sqrt", "rsqrt", "log_softmax",
    UNSAVED_FUNCTION,
)  # fmt: skip

# The namespaces of registered operators that are known by their names.
_NAMESPACES = ("aten", "transformers")

# In-place calls whose name is not simply the functional one with an underscore. `x @= y` writes to no tensor.
_OPERATOR_INPLACE: dict[str, str] = {
    **{f"i{name}": name for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")},
    **{f"i{name}": f"{name}_" for name in ("and", "or")},
    "ixor": "xor", "ilshift": "lshift", "irshift": "rshift",
}  # fmt: skip

# Dropouts, with their default of `training`: one that drops nothing returns its input, which is no copy.
_DROPOUTS: dict[str, bool] = {
    **{name: True for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout")},
    **{name: False for name in ("alpha_dropout", "feature_alpha_dropout")},
}


def call_name(node: torch.fx.Node) -> str:
    """Return the bare name of a call: `linear`, `add`, `view`; in place with its underscore."""
    if node.op == "call_method":
        return str(node.target)
    name = getattr(node.target, "__name__", str(node.target))
    return str(name).removesuffix(".default")  # of aten's operators, which have overloads


def bare_name(node: torch.fx.Node) -> str:
    """Return the bare name of a call, without the library that registered it: `grouped_mm_fallback`."""
    if isinstance(node.target, torch._ops.OpOverload):  # aten.slice.Tensor
        return str(node.target.overloadpacket.__name__)
    return call_name(node).rpartition(".")[2]


def functional_name(name: str) -> str | None:
    """Return the out-of-place spelling of an in-place call, None if the name is not one."""
    operator = name[2:-2] if name.startswith("__") and name.endswith("__") else name
    if operator in _OPERATOR_INPLACE:
        return _OPERATOR_INPLACE[operator]
    if name.endswith("_") and not name.endswith("__"):
        return name[:-1]
    return None


def classify(node: torch.fx.Node) -> tuple[str, Role]:
    """Kind and role of a call by its name alone; what its tensors are like can still make it fixed."""
    name = call_name(node)
    if name == _FUNCTION:
        results, bodies = tree_leaves(node.meta.get("example_value")), bodies_of(node)
        follows = len(results) == 1 and len(bodies) == _WAYS and all(map(_computes_elements, bodies))
        kind, role = ("function", Role.FOLLOWING) if follows else ("other", Role.FIXED)
        return (kind if len(bodies) < _WAYS or _saves_values(bodies[0]) else UNSAVED_FUNCTION), role
    if not is_torch(node.target):
        return "other", Role.FIXED
    if name in PRODUCTS:
        return PRODUCTS[name][0], Role.ADJUSTABLE
    if name in FOLLOWING:
        return _by_arguments(node, FOLLOWING[name]), Role.FOLLOWING
    if name == "getattr" and node.args[1] in _VIEWS:
        return "view", Role.FIXED
    return FIXED.get(name, "other"), Role.FIXED


def _by_arguments(node: torch.fx.Node, kind: str) -> str:
    """Return the kind of a following call, as its arguments have it."""
    if kind == "batch_norm" and not _argument(node, 5, "training", False):
        return FROZEN_NORM
    return kind


def bodies_of(node: torch.fx.Node) -> list[torch.fx.Graph]:
    """Return the graphs of a user's function, forward and backward."""
    named = [
        argument
        for argument in node.args
        if isinstance(argument, torch.fx.Node) and argument.op == "get_attr"
    ]
    found = [getattr(node.graph.owning_module, str(argument.target), None) for argument in named]
    return [body.graph for body in found if isinstance(body, torch.fx.GraphModule)]


def _saves_values(forward: torch.fx.Graph) -> bool:
    """Return whether the forward of a user's function saves anything: it returns its results and that."""
    (returned,) = forward.output_node().args
    is_known = isinstance(returned, (tuple, list)) and len(returned) == 2
    return not is_known or not isinstance(returned[1], (tuple, list)) or len(returned[1]) > 0  # type: ignore[index]


def _computes_elements(body: torch.fx.Graph) -> bool:
    """Return whether a graph computes elements from elements, in whatever float type they are."""
    return all(
        node.op in ("placeholder", "output")
        or call_name(node) == _GRAD_MODE
        or (classify(node)[0] in _ELEMENTWISE and not names_a_type(node) and not large_constants(node))
        for node in body.nodes
    )


def operands(node: torch.fx.Node, kind: str) -> list[torch.fx.Node]:
    """Return the nodes that an operator computes on, in the order of Op.inputs."""
    names = PRODUCTS.get(call_name(node), (None, ()))[1]
    if kind in ("mul", "einsum"):  # a square has two factors
        return named_operands(node)
    if not names:
        return list(node.all_input_nodes)
    found = [node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in enumerate(names)]
    return [argument for argument in found if isinstance(argument, torch.fx.Node)]


def named_operands(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the nodes that a call names, in order, each as often as it is named."""
    found: list[torch.fx.Node] = []
    torch.fx.map_arg((node.args, node.kwargs), found.append)
    return found


def large_constants(node: torch.fx.Node) -> list[float]:
    """Return the magnitudes of the finite numbers that a call computes with and FP16 cannot hold.

    Whole numbers are sizes and places in most calls.
    """
    name, arguments = bare_name(node), (node.args, node.kwargs)
    if name in ("full", "new_full"):
        place = 1 if name == "full" else 2
        arguments = ((_argument(node, place, "fill_value", 0.0),), {})
    types = (int, float) if name in _TAKES_NUMBERS else (float,)
    numbers = [float(v) for v in tree_leaves(arguments) if isinstance(v, types) and not isinstance(v, bool)]
    return [abs(number) for number in numbers if LARGEST["fp16"] < abs(number) < math.inf]


def draws(node: torch.fx.Node, kind: str) -> bool:
    """Return whether a call returns random numbers. A dropout draws which of its input's it returns."""
    packet = getattr(torch.ops.aten, bare_name(node).strip("_"), None)
    if kind == "dropout" or not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    overloads = [getattr(packet, name) for name in packet.overloads()]  # type: ignore[no-untyped-call]
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


def names_a_type(node: torch.fx.Node) -> bool:
    """Return whether the author asked for a type, as `softmax(x, dtype=torch.float32)`, which is honoured."""
    return any(isinstance(value, torch.dtype) for value in (*node.args, *node.kwargs.values()))


def dropped(node: torch.fx.Node, kind: str) -> float:
    """Return the part of its elements, or of attention's weights, that a call drops; 0 by default."""
    if kind == "attention":
        return _number(_argument(node, 4, "dropout_p", 0.0))
    if kind != "dropout":
        return 0.0
    training = _argument(node, 2, "training", True) and node.kwargs.get("train", True)
    return _number(_argument(node, 1, "p", 0.5)) if training else 0.0


def may_return_input(node: torch.fx.Node) -> bool:
    """Return whether a call is a dropout that drops nothing, or that may: in evaluation, or of p=0."""
    name = call_name(node)
    if name not in _DROPOUTS or not is_torch(node.target):
        return False
    trains = node.kwargs.get("train", _argument(node, 2, "training", _DROPOUTS[name]))
    share = _argument(node, 1, "p", 0.5)
    return not trains or isinstance(share, torch.fx.Node) or share == 0


def _number(value: Any) -> float:
    """Return a number argument of a call; of one that enters the graph, the number it was traced with."""
    if isinstance(value, torch.fx.Node):
        value = value.meta.get("example_value", 1.0)
    return float(value.node.hint) if isinstance(value, torch.SymFloat) else float(value)


def is_dilated(node: torch.fx.Node) -> bool:
    """Return whether a call of a convolution leaves gaps between the elements of its filter."""
    dilation = _argument(node, 5, "dilation", 1)
    return any(size != 1 for size in (dilation if isinstance(dilation, (tuple, list)) else (dilation,)))


def why_traced_as_is(node: torch.fx.Node, kind: str) -> str:
    """Return why a product or an embedding so called runs as it was traced; empty if it need not."""
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
    """Forward floating-point operations of a product, a multiply-add counted as two; 0 for anything else."""
    if kind in ("linear", "addmm", "baddbmm"):
        return 2 * num_elements(output) * shapes[1][-1]
    if kind in ("conv1d", "conv2d", "conv3d"):
        return 2 * num_elements(output) * num_elements(shapes[1][1:])
    if kind == "conv_transpose":  # every element of the input is multiplied by the filters of its channel
        return 2 * num_elements(shapes[0]) * num_elements(shapes[1][1:])
    if kind in ("matmul", "grouped_mm"):
        return 2 * num_elements(output) * shapes[0][-1]
    if kind == "attention":
        query, key, value = shapes[:3]
        return 2 * num_elements(query[:-1]) * key[-2] * (query[-1] + value[-1])
    if kind == "rnn":  # every step of every row multiplies every weight
        weights = sum(num_elements(shape) for shape in shapes if len(shape) == 2)
        return 2 * num_elements(shapes[0][:-1]) * weights
    return 0


def flops_of_unwritten(node: torch.fx.Node) -> int:
    """Return the forward operations of a product without a low-precision kernel; 0 for any other call."""
    name = bare_name(node)
    values = [other.meta.get("example_value") for other in (node, *node.all_input_nodes)]
    if name not in UNWRITTEN_PRODUCTS:
        return 0
    result, *shapes = [traced_shape(value) if isinstance(value, torch.Tensor) else () for value in values]
    if len(shapes) < 2 or not result:
        return 0
    if name == "bilinear":
        return 2 * num_elements(result) * shapes[0][-1] * shapes[1][-1]
    left = shapes[1] if "bmm" in name else shapes[0]
    return 2 * num_elements(left) * result[-1]


def traced_size(size: int | torch.SymInt) -> int:
    """Return a size as a plain integer; a symbolic size as it was traced, without guarding on it."""
    return size if isinstance(size, int) else int(size.node.hint)


def traced_shape(value: torch.Tensor) -> tuple[int, ...]:
    """Return the sizes of a tensor as plain integers, as it was traced."""
    return tuple(map(traced_size, value.shape))


def traced_type(value: torch.Tensor) -> str:
    """Return the name of a tensor's type."""
    return DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))


def is_torch(target: str | Callable[..., Any]) -> bool:
    """Return whether a call is torch's own or Python's operator module, not a user's of the same name."""
    if isinstance(target, str):
        return True
    module = getattr(target, "__module__", None) or ""
    if module.startswith("torch._ops."):  # registered operators
        return module.split(".")[2] in _NAMESPACES
    return module.startswith(("torch", "_operator", "operator")) or module in ("math", "builtins", "")
