"""The effect of products, attention, norms, pools and losses on axes and on the table."""

from __future__ import annotations

import torch

from qsync.expansion.derivation.axis_unification import (
    Axis,
    FixedReason,
    UnificationError,
    axis,
    fix_axis,
    regroup,
    size_of,
    unify,
)
from qsync.expansion.derivation.op_rules import PIXELS, ROWS, RULES, Call, rule
from qsync.expansion.derivation.recorder import Recorder
from qsync.expansion.derivation.trace_records import Attention, Operand, ParameterUse, Scores, Value, Writer
from qsync.operators.registry import CONTRACTIONS

EXPERT = "e"  # the letter of an axis that numbers experts
KERNEL = FixedReason("it is a kernel's", True)
EXPERTS = FixedReason("it numbers experts", True)
CLASSES = FixedReason("it numbers classes", True)


# -- products --


def _product(recorder: Recorder, a: Value, b: Value, inner: tuple[Axis, Axis], axes: list[Axis]) -> Value:
    """Multiply a and b, summed over `inner`: a matrix of the model, or two values that meet."""
    unify(*inner)
    for matrix, columns, rows, dim in ((b, inner[1], axes[-1], -1), (a, inner[0], axes[-2], -2)):
        if matrix.param is not None:
            own = recorder.parameters[matrix.param].axes
            rows_first = len(own) < 2 or own[-2] is not columns
            use = ParameterUse(
                recorder.clock, recorder.path, matrix.param, "product", columns, rows, rows_first
            )
            recorder.uses.append(use)
            return Value(axes, None, True, _writer(matrix, columns, axes, dim))
    weights, other = (a, b) if a.scores and a.scores.is_softmaxed else (b, a)
    if weights.scores and weights.scores.is_softmaxed:
        known, values = weights.scores, Operand.of(other, is_transposed=other is a)
        recorder.attentions.append(Attention(recorder.path, known.query, known.key, values))
        return Value(axes, None, True)
    recorder.event("multiplies along", "matmul", [inner[0]])
    return Value(axes, None, True, None, Scores(Operand.of(a), Operand.of(b, is_transposed=True)))


def _writer(matrix: Value, columns: Axis, axes: list[Axis], dim: int) -> Writer:
    """Return the writer of a product with a matrix, whose rows lie along `dim` of the result."""
    assert matrix.param is not None
    shape, size = [size_of(one) for one in axes], size_of(axes[dim])
    number = torch.arange(size, dtype=torch.float64)
    known = matrix.writer.rows if matrix.writer else None
    if known is not None and known.dim() == 2:
        at = next(i for i, one in enumerate(matrix.axes) if one is columns)
        own = known.select(at, 0)  # a part of a matrix has other rows
        number = own if bool(own.diff().any()) else number
    return Writer(matrix.param, (number if dim == -1 else number[:, None]).expand(shape))


@rule(*CONTRACTIONS)
def _contraction(recorder: Recorder, call: Call) -> list[Value]:
    """Multiply two factors along the axes that their declaration gives letters."""
    product, declared = CONTRACTIONS[call.name]
    *terms, result = declared.replace(" ->", ",").split(", ")
    values = [recorder.value(tensor) for _, tensor in zip(terms, call.tensors, strict=False)]
    a, b = (
        dict(zip(terms[i][::-1], values[i].axes[::-1], strict=False)) for i in product.factors
    )  # "*" stands for any number of axes in front
    (inner,) = (a.keys() & b.keys()) - {*result}
    for letter in (a.keys() & b.keys()) - {inner}:
        unify(a[letter], b[letter])
    if EXPERT in b:
        fix_axis(b[EXPERT], EXPERTS)
    first, second = (values[i] for i in product.factors)
    named = [(b | a)[letter] for letter in result.lstrip("*")]
    axes = [*first.axes[: 1 - len(result)], *named] if result[0] == "*" else named
    found = _product(recorder, first, second, (a[inner], b[inner]), axes)
    for value in values:
        if value is not first and value is not second:
            _onto(value, axes)
    return [found]


def _onto(value: Value, axes: list[Axis]) -> None:
    """Unify the axes of an addend with those of a product, counted from the last."""
    for one, other in zip(value.axes[::-1], axes[::-1], strict=False):
        if size_of(one) > 1:
            unify(one, other)


@rule("convolution")
def _convolution(recorder: Recorder, call: Call) -> list[Value]:
    x, weight = recorder.value(call["input"]), recorder.value(call["weight"])
    for kernel in weight.axes[2:]:
        fix_axis(kernel, KERNEL)
    rows, columns = weight.axes[:2]
    if call["transposed"]:
        rows, columns = columns, rows
    if call["groups"] == 1:
        unify(x.axes[1], columns)
    elif size_of(columns) == 1 and size_of(rows) == size_of(x.axes[1]):
        unify(x.axes[1], rows)  # one filter per channel
        columns = rows
        recorder.event("acts on", call.name, [rows])
        recorder.event("moves zero", call.name, [rows])
    else:
        raise UnificationError
    if call["bias"] is not None:
        unify(recorder.value(call["bias"]).axes[0], rows)
    axes = [x.axes[0], rows, *(axis(size, [PIXELS]) for size in call.out.shape[2:])]
    writer = None
    if weight.param is not None:
        recorder.uses.append(
            ParameterUse(recorder.clock, recorder.path, weight.param, "product", columns, rows)
        )
        number = torch.arange(size_of(rows), dtype=torch.float64)
        number = number.view(-1, *[1] * (call.out.dim() - 2))
        writer = Writer(weight.param, number.expand(call.out.shape))
    return [Value(axes, None, True, writer)]


@rule("embedding")
def _embedding(recorder: Recorder, call: Call) -> list[Value]:
    weight, indices = recorder.value(call["weight"]), recorder.value(call["indices"])
    fix_axis(weight.axes[0], ROWS)
    width = weight.axes[1]
    if weight.param is not None:
        width = recorder.embedding_axis(weight.param, size_of(width))
        recorder.uses.append(ParameterUse(recorder.clock, recorder.path, weight.param, "lookup", [], width))
    return [Value([*indices.axes, width], None, True)]


# -- attention --


@rule("_softmax", "_safe_softmax", "_log_softmax")
def _softmax(recorder: Recorder, call: Call) -> list[Value]:
    value, dim = recorder.value(call.tensors[0]), call.dim()
    if value.scores is None:
        recorder.event("sums over", call.name, [value.axes[dim]])
        return [value]
    query, key = value.scores.query, value.scores.key
    if dim != len(value.axes) - 1:
        query, key = key, query  # softmax weights sum to 1 over the keys
    return [Value(value.axes, None, True, None, Scores(query, key, True))]


def _attention(recorder: Recorder, call: Call) -> list[Value]:
    """Unify the axes of fused attention: queries (..., heads, T, D), keys (..., kv_heads, S, D)."""
    q, k, v = (recorder.value(call[name]) for name in ("query", "key", "value"))
    for one, other in ((q.axes[-1], k.axes[-1]), (k.axes[-2], v.axes[-2])):
        unify(one, other)
    for batch_q, batch_k, batch_v in zip(q.axes[:-2], k.axes[:-2], v.axes[:-2], strict=True):
        unify(batch_k, batch_v)
        if size_of(batch_k) == size_of(batch_q):
            unify(batch_k, batch_q)
        elif size_of(batch_k) > 1:
            # Grouped queries: each key serves adjacent heads.
            groups, _ = regroup([batch_q], (size_of(batch_k), size_of(batch_q) // size_of(batch_k)))
            unify(groups, batch_k)
    for name in ("attn_mask", "attn_bias"):
        if call.arguments.get(name) is not None:
            _onto(recorder.value(call[name]), [*q.axes[:-1], k.axes[-2]])
    recorder.attentions.append(Attention(recorder.path, *map(Operand.of, (q, k, v))))
    mixed = Value([*q.axes[:-1], v.axes[-1]], None, True)
    rest = [Value([axis(size, [PIXELS]) for size in out.shape]) for out in call.outs[1:]]
    return [mixed, *rest]


RULES |= {
    f"_scaled_dot_product_{kind}": _attention
    for kind in (
        "flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention",
        "fused_attention_overrideable",
    )
}  # fmt: skip


# -- norms, pools, losses --


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm")
def _norm(recorder: Recorder, call: Call) -> list[Value]:
    value = recorder.value(call["input"])
    dims = len(call["normalized_shape"])
    for name in ("weight", "bias"):
        if call.arguments.get(name) is not None:
            _onto(recorder.value(call[name]), value.axes)
    recorder.frames[-1].normalised.append((call.name, value.axes[-dims:]))
    means = [Value([axis(size, [PIXELS]) for size in out.shape]) for out in call.outs[1:]]
    return [value, *means]


@rule("native_group_norm")
def _group_norm(recorder: Recorder, call: Call) -> list[Value]:
    """Norm all channels and positions of a sample, or each channel by itself."""
    value, num_groups = recorder.value(call["input"]), call["group"]
    channels = value.axes[1]
    if num_groups not in (1, size_of(channels)):
        raise UnificationError
    for name in ("weight", "bias"):
        if call.arguments.get(name) is not None:
            unify(recorder.value(call[name]).axes[0], channels)
    if num_groups == 1:
        recorder.event("averages", call.name, [channels])
        recorder.frames[-1].normalised.append(("native_layer_norm", [channels]))
    else:
        recorder.uses.append(
            ParameterUse(recorder.clock, recorder.path, "", "batch_norm", channels, channels)
        )
    means = [Value([axis(size, [PIXELS]) for size in out.shape]) for out in call.outs[1:]]
    return [value, *means]


@rule(
    "native_batch_norm", "_native_batch_norm_legit_no_training", "_batch_norm_no_update", "cudnn_batch_norm",
    "miopen_batch_norm", "batch_norm",
)  # fmt: skip
def _batch_norm(recorder: Recorder, call: Call) -> list[Value]:
    """Unify the channels with the weights and running statistics, which grow with them."""
    value = recorder.value(call["input"])
    for name in ("weight", "bias", "running_mean", "running_var"):
        if call.arguments.get(name) is not None:
            unify(recorder.value(call[name], held=False).axes[0], value.axes[1])
    recorder.uses.append(
        ParameterUse(recorder.clock, recorder.path, "", "batch_norm", value.axes[1], value.axes[1])
    )
    means = [Value([axis(size, [PIXELS]) for size in out.shape]) for out in call.outs[1:]]
    return [value, *means]


@rule(
    "max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool1d", "avg_pool2d", "avg_pool3d",
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "upsample_nearest2d",
    "upsample_bilinear2d", "upsample_bicubic2d",
)  # fmt: skip
def _pool(recorder: Recorder, call: Call) -> list[Value]:
    """Keep batch and channels; replace positions."""
    value = recorder.value(call.tensors[0])
    num_kept = min(2, len(value.axes) - 1)
    found = []
    if "max" in call.name:
        recorder.event("acts on", call.name, value.axes[1:num_kept])
    for out in call.outs:
        positions = [axis(size, [PIXELS]) for size in out.shape[num_kept:]]
        found.append(value.shaped([*value.axes[:num_kept], *positions]))
    return found


@rule("nll_loss_forward", "nll_loss2d_forward")
def _loss(recorder: Recorder, call: Call) -> list[Value]:
    value = recorder.value(call["self"])
    fix_axis(value.axes[min(1, len(value.axes) - 1)], CLASSES)
    return [Value([axis(size, [CLASSES]) for size in out.shape]) for out in call.outs]


ALL_RULES = RULES  # importing this name registers the rules of this file
