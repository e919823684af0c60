"""The workspace of convolutions on a CPU: of backend/kernels/convolution/, and of torch's FP32 kernels.

A workspace is defined as in op_workspaces.
"""

from __future__ import annotations

from dataclasses import replace

from qsync.backend.kernels.convolution.conv_strategy import int8_gradient_unfolds, windows_bytes
from qsync.lowering.lowered_graph import Run
from qsync.operators.precision import Precision, type_bytes
from qsync.predictor.memory.saved_tensors import INT8_MODES
from qsync.predictor.memory.workspaces.onednn_scratch import FORWARD_SCRATCH, weight_gradient_scratch
from qsync.predictor.memory.workspaces.op_context import OpContext
from qsync.records.graph import Op, num_elements

_FP32, _BF16 = 4, 2
_BLOCK, _SHORT_WINDOW = 16, 3  # oneDNN in FP32: channels of a block; largest short depthwise window


def convolution_forward(op: Op, run: Run, context: OpContext) -> int:
    """Return the bytes of a convolution's forward workspace on a CPU.

    In FP32, torch's kernel runs, which reorders its operands.
    """
    op, context = _with_height(op, context)
    x, w, y = num_elements(context.shapes[0]), num_elements(context.shapes[1]), op.num_elements
    channels_last, one_channel = _is_channels_last(op, run, context), context.shapes[1][1] == 1
    if op.kind == "conv_transpose":  # its result starts in channels-last order, and is copied twice
        return 2 * type_bytes(run.mode, y)
    if run.mode in INT8_MODES:
        windows = _windows_bytes(op, run, context)[0]
        return windows + (0 if run.output == "fp32" else _FP32 * y)
    if run.mode == Precision.BF16:
        windows = _windows_bytes(op, run, context)[0]
        reordered = 0 if channels_last or one_channel else _BF16 * x
        return windows + max(reordered - _BF16 * y, FORWARD_SCRATCH) if windows else reordered + 2 * _BF16 * w
    if _takes_pixels(op, context) and _groups(context) == 1:
        return 0
    return _FP32 * (w + _reordered_weight(context)) if channels_last else _FP32 * max(x + w, y)


def convolution_backward(op: Op, run: Run, context: OpContext) -> int:
    """Return the bytes of a convolution's backward workspace on a CPU."""
    op, context = _with_height(op, context)
    x, w, y = num_elements(context.shapes[0]), num_elements(context.shapes[1]), op.num_elements
    has_dx, channels_last = context.has_gradient[0], _is_channels_last(op, run, context)
    passed_on = type_bytes(context.carried[0], x) if has_dx else 0
    bucket = _FP32 * w if context.in_buckets else 0  # the weight's gradient before its copy to a bucket
    cast_dx = passed_on if context.carried[0] != "bf16" else 0
    if run.mode == Precision.FP32:
        made = _FP32 * x if has_dx else 0
        if _takes_pixels(op, context) and _groups(context) == 1:
            workspace = _FP32 * w
        elif channels_last:  # the weight's gradient in blocks, in rows, and in the weight's order
            workspace = _FP32 * (_in_blocks(op, context) + 2 * w + _reordered_weight(context))
        elif _in_windows(op, context):  # windows of one image, and the weight's gradient in blocks
            windows = num_elements(context.shapes[1][1:]) * num_elements(op.shape[2:])
            workspace = _FP32 * max(5 * w + windows, (y + w) * has_dx, x * has_dx)
        else:  # with a stride, the input's gradient exists in blocks and reordered
            again = 2 * x if has_dx and _is_strided(op, context) and not _is_short(op, context) else 0
            workspace = _FP32 * max(x + y + w, 2 * w, again)
        workspace += bucket - _FP32 * w  # without buckets, the last copy of dW is the gradient
        return max(made + workspace, made + cast_dx * (context.carried[0] != "fp32")) - passed_on
    if run.mode == Precision.INT8_ALL:
        return _convolution_int8_all(op, run, context) - passed_on
    windows = _windows_bytes(op, run, context)[1]
    scratch = weight_gradient_scratch(
        y // max(op.shape[1], 1), op.shape[1], num_elements(context.shapes[1][1:])
    )
    made = _BF16 * x if has_dx else 0
    if run.mode == Precision.BF16:
        signals = op.kind == "conv1d"  # torch reorders signals and gradients; qsync's images are in order
        reordered = 0 if channels_last or windows else _BF16 * (x + y * signals)
        products = reordered + (windows + scratch + made if windows else 4 * _BF16 * w)
        dx_reordered = 0 if channels_last else made  # dx in x's memory format
        return made + _BF16 * w + max(products, bucket, cast_dx, dx_reordered) - passed_on
    # The gradient in 16 bits, and decoded x and W; with windows, dx is summed in FP32.
    base = _BF16 * (x + y + w * has_dx)
    first = _BF16 * w + (windows + scratch + _FP32 * x * has_dx if windows else made)
    then = (passed_on if windows and cast_dx else made + cast_dx) + _BF16 * w
    dx_reordered = 0 if channels_last else passed_on
    last = passed_on + _BF16 * w + max(bucket, dx_reordered)
    return base + max(first, then, last) - passed_on


def _convolution_int8_all(op: Op, run: Run, context: OpContext) -> int:
    """Return the backward workspace of `int8_all`, including the input's gradient in its carried type."""
    (x, w, y), shapes = (num_elements(s) for s in (*context.shapes[:2], op.shape)), context.shapes
    outputs, window = op.shape[1], num_elements(shapes[1][2:])
    pixels, x_pixels = y // max(outputs, 1), x // max(shapes[0][1], 1)
    bucket = _FP32 * w if context.in_buckets else 0
    windows = pixels * num_elements(shapes[1][1:])  # bytes of the input's windows in INT8
    passed_on, first, made = 0, 0, 0
    if context.has_gradient[0]:
        made = passed_on = type_bytes(context.carried[0], x)
        rounded = _BF16 * x if context.carried[0] == "bf16" else 0
        # Codes of the gradient, the product's operands and sums, and the result unless the sums become it.
        if int8_gradient_unfolds(shapes[0], shapes[1], op.shape):
            factors = _FP32 * (y // max(op.shape[0], 1) + x_pixels)
            first = y + factors + x_pixels * window * outputs + w + _FP32 * x + rounded
        elif window == 1 and x_pixels == pixels:
            first = y + _FP32 * x + rounded
        else:
            made = _FP32 * x
            first = y + _BF16 * windows + max(_FP32 * windows, made)
    then = made + y + max(_FP32 * pixels, windows + bucket)
    reordered = _FP32 * w if window > 1 else 0  # the weight's gradient in the weight's memory order
    in_order = _is_channels_last(op, run, context)
    dx_again = passed_on if made != passed_on or not in_order else 0  # dx, cast or reordered
    return max(first, then, made + bucket + max(reordered, dx_again))


def _with_height(op: Op, context: OpContext) -> tuple[Op, OpContext]:
    """Convert a conv1d to a conv2d on images of height 1; return other convolutions unchanged."""
    if op.kind != "conv1d":
        return op, context
    x, w, *others = context.shapes
    n, outputs, length = op.shape
    shapes = ((*x[:2], 1, x[2]), (*w[:2], 1, w[2]), *others)
    return replace(op, shape=(n, outputs, 1, length)), replace(context, shapes=shapes)


def _windows_bytes(op: Op, run: Run, context: OpContext) -> tuple[int, int]:
    """Return the bytes of windows, forward and backward; 0 but for conv2d and INT8 conv1d."""
    if op.kind != "conv2d" and not (op.kind == "conv1d" and run.mode in INT8_MODES):
        return 0, 0
    return windows_bytes(run.mode, context.shapes[0], context.shapes[1], op.shape)


def _takes_pixels(op: Op, context: OpContext) -> bool:
    """Return whether a convolution is pointwise; with one group oneDNN then reorders nothing."""
    x, w = context.shapes[:2]
    return num_elements(w[2:]) == 1 and x[2:] == op.shape[2:]


def _groups(context: OpContext) -> int:
    """Return the number of groups of a convolution's channels."""
    return max(1, context.shapes[0][1] // max(context.shapes[1][1], 1))


def _is_channels_last(op: Op, run: Run, context: OpContext) -> bool:
    """Return whether a convolution runs in channels-last order, as its image or weight determines.

    The operands are checked because a result of one pixel does not show its order.
    """
    return run.channels_last or op.channels_last or any(j in context.in_order for j in (0, 1))


def _reordered_weight(context: OpContext) -> int:
    """Return the elements of the weight if torch copies it to channels-last order, else 0."""
    _, inner, *window = context.shapes[1]
    lies_so = 1 in context.in_order or inner == 1 or num_elements(window) == 1
    return 0 if lies_so else num_elements(context.shapes[1])


def _in_blocks(op: Op, context: OpContext) -> int:
    """Return the elements of a weight's gradient in oneDNN's FP32 layout.

    Grouped convolutions use blocks of 16 by 16 channels per group (AVX-512), except short depthwise windows.
    """
    outputs, inner, *window = context.shapes[1]
    groups = _groups(context)
    if groups == 1 or _is_short(op, context):
        return num_elements(context.shapes[1])
    padded = (-(-outputs // groups // _BLOCK) * -(-inner // _BLOCK)) * _BLOCK**2
    return groups * padded * num_elements(window)


def _is_strided(op: Op, context: OpContext) -> bool:
    """Return whether the result has fewer rows or columns than the image, but more than one."""
    return any(1 < size < of for size, of in zip(op.shape[2:], context.shapes[0][2:], strict=True))


def _in_windows(op: Op, context: OpContext) -> bool:
    """Return whether oneDNN unfolds windows per group: groups narrower than a block, or pointwise."""
    outputs, inner = context.shapes[1][:2]
    few = min(inner, outputs // _groups(context)) < _BLOCK and not _is_short(op, context)
    return op.kind != "conv_transpose" and _groups(context) > 1 and (few or _takes_pixels(op, context))


def _is_short(op: Op, context: OpContext) -> bool:
    """Return whether oneDNN's own kernel runs: for short depthwise windows inside the image."""
    (channels, height), (outputs, inner, *window) = context.shapes[0][1:3], context.shapes[1]
    inside = max(window) <= _SHORT_WINDOW and window[0] + _is_strided(op, context) <= height
    return inner == 1 and outputs == channels and inside
