"""The effect of each operator on axes: which ones it passes on, unifies or sums over.

A rule takes the recorder and a call. It returns one Value per tensor that the call returned. Torch's tags
mark elementwise operators and reductions, so that few operators need a rule of their own. The effect of an
operator without a rule is not guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from qsync.expansion.derivation.axis_unification import (  # fmt: skip
    Axis,
    FixedReason,
    UnificationError,
    axis,
    concatenate,
    fix_axis,
    is_known_fixed,
    regroup,
    size_of,
    slice_axis,
    unify,
)
from qsync.expansion.derivation.recorder import Recorder, is_without_values
from qsync.expansion.derivation.trace_records import Value, Writer, combine_values

Rule = Callable[[Recorder, "Call"], list[Value]]
RULES: dict[str, Rule] = {}

PIXELS = FixedReason("it counts positions", True)
CHOICES = FixedReason("the model chooses along it", True)
ROWS = FixedReason("it numbers the rows of an embedding", True)
# Elementwise operators that map the mean of copies to the mean of their results.
LINEAR = ("add", "sub", "rsub", "neg", "mul", "div", "masked_fill", "where")
# Other operators that map 0 to 0; linear ones do as well, unless they add a number.
AT_ZERO = (
    "relu", "gelu", "silu", "tanh", "leaky_relu", "elu", "mish", "hardswish", "erf", "sin", "abs", "sqrt",
    "pow", "sign", "clamp_min", "dropout",
)  # fmt: skip


# Reductions that do not change where each element has as many copies.
AVERAGES = ("mean", "var", "std", "var_mean", "amax", "amin", "max", "min")


class Call:
    """One call of an operator: its arguments by name, its input tensors, the returned tensors."""

    def __init__(self, func: Any, args: Any, kwargs: Any, outs: list[torch.Tensor]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name: str = func.overloadpacket.__name__
        self.outs = outs
        self.out = outs[0]
        self.tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self.arguments: dict[str, Any] = {}
        for index, argument in enumerate(func._schema.arguments):
            if index < len(args):
                self.arguments[argument.name] = args[index]
            elif argument.name in kwargs:
                self.arguments[argument.name] = kwargs[argument.name]
            elif argument.has_default_value():
                self.arguments[argument.name] = argument.default_value

    def __getitem__(self, name: str) -> Any:
        if name not in self.arguments:
            raise UnificationError(f"{self.name} has no argument {name}")  # another version of torch
        return self.arguments[name]

    def dim(self, name: str = "dim", of: torch.Tensor | None = None) -> int:
        """Return a dimension argument, counted from the front."""
        tensor = self.tensors[0] if of is None else of
        return int(self.arguments[name]) % max(tensor.dim(), 1)


# Operators that only move elements, beside views.
_MOVES = (
    "clone", "contiguous", "repeat", "cat", "stack", "index", "index_select", "flip",
    "roll", "split_with_sizes", "chunk", "unsafe_split",
)  # fmt: skip


def move_rows(recorder: Recorder, call: Call, found: list[Value]) -> list[Value]:
    """Apply a call to the rows behind its input's elements (`Writer`), where the result has their writer."""
    known = [tensor for tensor in call.tensors if tensor in recorder.values]
    writers = {id(tensor): writer for tensor in known if (writer := recorder.values[tensor].writer)}
    if not any(value.writer is writer for value in found for writer in writers.values()):
        return found
    moved: list[Any] = [None] * len(found)
    try:
        if call.name in ("view", "_unsafe_view", "reshape"):  # rows may overlap in memory
            moved = [writers[id(call.tensors[0])].rows.reshape(call.out.shape)]
        elif call.func.is_view or call.name in _MOVES:
            args = tree_map_only(
                torch.Tensor, lambda t: writers[id(t)].rows if id(t) in writers else t, call.args
            )
            moved = tree_leaves(call.func(*args, **call.kwargs))
        else:  # elementwise, or along an axis that it keeps
            rows = [value.writer.rows if value.writer else None for value in found]
            moved = [
                None if of is None else of.expand(out.shape) for of, out in zip(rows, call.outs, strict=True)
            ]
    except Exception:  # a call that does not take row numbers may raise anything
        pass
    return [
        replace(value, writer=Writer(value.writer.param, of)) if value.writer else value
        for value, of in zip(found, moved, strict=True)
    ]


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators of these names."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


# -- elementwise, constants, sums --


def pointwise(recorder: Recorder, call: Call) -> list[Value]:
    """Unify the axes that meet, counted from the last; axes of one element meet nothing."""
    inputs = [recorder.value(tensor) for tensor in call.tensors]
    axes: list[Axis] = []
    for index in range(call.out.dim()):
        back = call.out.dim() - index
        met = [value.axes[-back] for value in inputs if len(value.axes) >= back]
        met = [one for one in met if size_of(one) > 1]
        for one in met[1:]:
            unify(met[0], one)
        axes.append(met[0] if met else axis(call.out.shape[index]))
        name = call.name.removesuffix("_")
        if met and (name not in LINEAR or (len(met) > 1 and name in ("mul", "div"))):
            recorder.event("acts on", name, [met[0]])
        if met and (name not in (*LINEAR, *AT_ZERO) or (name in ("add", "sub", "rsub") and len(met) == 1)):
            recorder.event("moves zero", name, [met[0]])
    written, writer, met_written = combine_values(inputs, is_product=call.name.removesuffix("_") == "mul")
    if met_written and call.name.removesuffix("_") in ("add", "sub"):
        recorder.sums.append(recorder.path)
    scores = next((value.scores for value in inputs if value.scores), None)
    return [Value(axes, None, written, writer, scores) for _ in call.outs]


def constant(recorder: Recorder, call: Call) -> list[Value]:
    """Return the axes of a new tensor: equal elements may grow, others may not."""
    alike = call.name in ("zeros", "ones", "full", "empty", "empty_strided", "scalar_tensor")
    why = (
        [] if alike else [FixedReason(f"it meets a constant (aten.{call.name}){recorder.location()}", False)]
    )
    return [Value([axis(size, why) for size in out.shape]) for out in call.outs]


@rule("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")
def _new(recorder: Recorder, call: Call) -> list[Value]:
    return [Value([axis(size) for size in call.out.shape])]


@rule("zeros_like", "ones_like", "full_like", "empty_like", "fill", "zero", "bernoulli")
def _like(recorder: Recorder, call: Call) -> list[Value]:
    return [Value(recorder.value(call.tensors[0]).axes)]


def reduction(recorder: Recorder, call: Call) -> list[Value]:
    """Sum, average, maximize and so on along `dim`."""
    value = recorder.value(call.tensors[0])
    dims = call.arguments.get("dim")
    dims = range(len(value.axes)) if dims is None or dims == [] else dims
    dims = {int(dim) % len(value.axes) for dim in (dims if isinstance(dims, Iterable) else [dims])}
    kind = "averages" if call.name in AVERAGES else "sums over"
    recorder.event(kind, call.name, [value.axes[dim] for dim in dims])
    if call.arguments.get("keepdim"):
        axes = [[] if index in dims else one for index, one in enumerate(value.axes)]
    else:
        axes = [one for index, one in enumerate(value.axes) if index not in dims]
    return [Value(axes, None, value.written, value.writer) for _ in call.outs]


RULES |= dict.fromkeys(("linalg_vector_norm", "norm", "max", "min", "var_mean", "logsumexp"), reduction)


# -- shapes --


@rule("clone", "_to_copy", "detach", "alias", "lift_fresh", "lift_fresh_copy", "contiguous", "native_dropout")
def _same(recorder: Recorder, call: Call) -> list[Value]:
    return [recorder.value(call.tensors[0]) for _ in call.outs]


@rule("copy")
def _copy(recorder: Recorder, call: Call) -> list[Value]:
    target = recorder.value(call["self"])
    return [value.shaped(target.axes) for value in pointwise(recorder, call)]


@rule("view", "_unsafe_view", "reshape", "_reshape_alias")
def _view(recorder: Recorder, call: Call) -> list[Value]:
    value = recorder.value(call.tensors[0])
    return [value.shaped(regroup(value.axes, call.out.shape))]


@rule("roll", "as_strided")
def _in_place(recorder: Recorder, call: Call) -> list[Value]:
    """Keep the axes of a call that moves positions only, or nothing."""
    value, out = recorder.value(call.tensors[0]), call.out
    dims = call.arguments.get("dims") or range(len(value.axes)) if call.name == "roll" else ()
    is_same = out.shape == call.tensors[0].shape and out.is_contiguous()
    if not is_same or not all(is_known_fixed(value.axes[dim]) for dim in dims):
        raise UnificationError
    return [value]


@rule("t", "transpose", "permute", "unsqueeze", "squeeze")
def _reordered(recorder: Recorder, call: Call) -> list[Value]:
    """Reorder axes as the call reorders those of a tensor without values, each of a size of its own."""
    value, shape = recorder.value(call.tensors[0]), call.tensors[0].shape
    sizes = [1 if size == 1 else index + 2 for index, size in enumerate(shape)]
    out = call.func(torch.empty(sizes, device="meta"), *call.args[1:], **call.kwargs)
    by_size = dict(zip(sizes, value.axes, strict=True))
    return [value.shaped([by_size[size] if size > 1 else [] for size in out.shape])]


@rule("expand")
def _expand(recorder: Recorder, call: Call) -> list[Value]:
    value, shape = recorder.value(call.tensors[0]), call.out.shape
    old: list[Axis] = [[] for _ in range(len(shape) - len(value.axes))] + value.axes
    axes = [one if size_of(one) == size else axis(size) for one, size in zip(old, shape, strict=True)]
    return [value.shaped(axes)]


@rule("repeat")
def _repeat(recorder: Recorder, call: Call) -> list[Value]:
    value, times = recorder.value(call.tensors[0]), call["repeats"]
    old: list[Axis] = [[] for _ in range(len(times) - len(value.axes))] + value.axes
    axes = [axis(count) + one for one, count in zip(old, times, strict=True)]
    return [value.shaped(axes)]


def _slice_value(value: Value, dim: int, start: int, length: int) -> Value:
    one = value.axes[dim]
    axes = list(value.axes)
    axes[dim] = slice_axis(one, start, length)
    return value.shaped(axes)


@rule("slice", "narrow")
def _slice(recorder: Recorder, call: Call) -> list[Value]:
    value, dim = recorder.value(call.tensors[0]), call.dim()
    size, step = call.tensors[0].shape[dim], call.arguments.get("step") or 1
    start = min(max((call["start"] or 0) + (size if (call["start"] or 0) < 0 else 0), 0), size)
    if step == 1:
        return [_slice_value(value, dim, start, call.out.shape[dim])]
    if is_known_fixed(value.axes[dim]):
        return [
            value.shaped([*value.axes[:dim], axis(call.out.shape[dim], [PIXELS]), *value.axes[dim + 1 :]])
        ]
    # A step of 2 selects the major factor of pairs.
    major, minor = regroup([value.axes[dim]], (size // step, step))
    if start >= step or size % step:
        raise UnificationError
    slice_axis(minor, start, 1)
    return [value.shaped([*value.axes[:dim], major, *value.axes[dim + 1 :]])]


@rule("select")
def _select(recorder: Recorder, call: Call) -> list[Value]:
    return [_chosen(recorder, call, call["index"] % call.tensors[0].shape[call.dim()])]


@rule("unbind")
def _unbind(recorder: Recorder, call: Call) -> list[Value]:
    return [_chosen(recorder, call, index) for index in range(len(call.outs))]


def _chosen(recorder: Recorder, call: Call, index: int) -> Value:
    """Return one element of an axis.

    Many models only query the shape of such a tensor. The axis therefore becomes a row of parts no earlier
    than the values are used.
    """
    value, dim = recorder.value(call.tensors[0]), call.dim()
    axes = [*value.axes[:dim], *value.axes[dim + 1 :]]
    if is_known_fixed(value.axes[dim]):
        return value.shaped(axes)

    def slice_now() -> Value:
        found = _slice_value(value, dim, index, 1)
        found = found.shaped([*found.axes[:dim], *found.axes[dim + 1 :]])
        if value.writer is None or value.writer.rows is None:
            return found
        return replace(found, writer=Writer(value.writer.param, value.writer.rows.select(dim, index)))

    return Value(axes, resolve=slice_now)


@rule("split", "split_with_sizes", "chunk", "unsafe_split")
def _split(recorder: Recorder, call: Call) -> list[Value]:
    value, dim = recorder.value(call.tensors[0]), call.dim()
    found, start = [], 0
    for out in call.outs:
        found.append(_slice_value(value, dim, start, out.shape[dim]))
        start += out.shape[dim]
    return found


@rule("cat", "stack")
def _cat(recorder: Recorder, call: Call) -> list[Value]:
    """Put the axes along `dim` in a row; a stack first gets one of one element there."""
    tensors = [tensor for tensor in call.tensors if tensor.numel() or tensor.dim() > 1]
    values, dim = [recorder.value(tensor) for tensor in tensors], call.dim(of=call.out)
    is_stack = call.name == "stack"
    rows = [[*v.axes[:dim], *[[]] * is_stack, *v.axes[dim:]] for v in values]
    for row in rows[1:]:
        for index, (one, other) in enumerate(zip(rows[0], row, strict=True)):
            if index != dim:
                unify(one, other)
    axes = [*rows[0][:dim], concatenate([row[dim] for row in rows]), *rows[0][dim + 1 :]]
    written, writer, _ = combine_values(values)
    keeps_scores = not is_stack and is_known_fixed(axes[dim])
    return [Value(axes, None, written, writer, values[0].scores if keeps_scores else None)]


@rule("topk", "gather", "scatter", "sort")
def _choice(recorder: Recorder, call: Call) -> list[Value]:
    """Choose along one axis, as a router does among experts; the axis cannot grow."""
    value, dim = recorder.value(call.tensors[0]), call.dim()
    if call.name == "sort" and not is_known_fixed(value.axes[dim]):
        raise UnificationError
    for tensor in call.tensors:
        fix_axis(recorder.value(tensor).axes[dim], CHOICES)
    axes = [*value.axes[:dim], axis(call.out.shape[dim], [CHOICES]), *value.axes[dim + 1 :]]
    if any(size_of(one) != size for one, size in zip(axes, call.out.shape, strict=True)):
        raise UnificationError
    return [Value(axes, None, value.written) for _ in call.outs]


@rule("glu")
def _glu(recorder: Recorder, call: Call) -> list[Value]:
    value, dim, half = recorder.value(call.tensors[0]), call.dim(), call.out.shape[call.dim()]
    gate, up = _slice_value(value, dim, 0, half), _slice_value(value, dim, half, half)
    unify(gate.axes[dim], up.axes[dim])
    return [Value(gate.axes, None, value.written)]


@rule("view_as_complex")
def _pairs(recorder: Recorder, call: Call) -> list[Value]:
    value = recorder.value(call.tensors[0])
    return [value.shaped(value.axes[:-1])]


@rule("view_as_real")
def _unpaired(recorder: Recorder, call: Call) -> list[Value]:
    value = recorder.value(call.tensors[0])
    return [value.shaped([*value.axes, axis(2)])]


@rule("index_select")
def _index_select(recorder: Recorder, call: Call) -> list[Value]:
    value, dim = recorder.value(call["self"]), call.dim()
    fix_axis(value.axes[dim], ROWS)
    axes = [*value.axes[:dim], axis(call.out.shape[dim], [PIXELS]), *value.axes[dim + 1 :]]
    return [Value(axes, None, value.written)]


@rule("index")
def _index(recorder: Recorder, call: Call) -> list[Value]:
    """Choose elements along some axes; pass on the others."""
    value, indices = recorder.value(call["self"]), call["indices"]
    at = [dim for dim, index in enumerate(indices) if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in indices if index is not None):
        raise UnificationError
    if value.param is not None:
        for dim in at:
            fix_axis(value.axes[dim], ROWS)
    if len(at) == 1 and not is_known_fixed(value.axes[at[0]]):
        numbers = _numbers(indices[at[0]], call["self"].shape[at[0]])
        if numbers and numbers == list(range(numbers[0], numbers[-1] + 1)):
            return [_slice_value(value, at[0], numbers[0], len(numbers))]
    recorder.event("chooses along", call.name, [value.axes[dim] for dim in at])
    kept = [one for dim, one in enumerate(value.axes) if dim not in at]
    first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    num_new = call.out.dim() - len(kept)
    new = [axis(size, [PIXELS]) for size in call.out.shape[first : first + num_new]]
    return [Value([*kept[:first], *new, *kept[first:]], None, value.written)]


def _numbers(index: torch.Tensor, size: int) -> list[int]:
    """Return the elements of an index vector, counted from the front.

    The result is empty for a tensor without values.
    """
    if index.dim() != 1 or is_without_values(index):
        return []
    return [number % size for number in index.tolist()]


@rule("constant_pad_nd")
def _pad(recorder: Recorder, call: Call) -> list[Value]:
    """Pad positions; axes that may grow cannot be padded."""
    value, pad = recorder.value(call["self"]), list(call["pad"])
    axes = list(value.axes)
    for index in range(len(pad) // 2):
        dim = len(axes) - 1 - index
        if pad[2 * index] or pad[2 * index + 1]:
            if not is_known_fixed(axes[dim]):
                raise UnificationError
            axes[dim] = axis(call.out.shape[dim], [PIXELS])
    return [value.shaped(axes)]
