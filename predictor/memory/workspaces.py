"""The workspace of each kind of operator: memory that its kernel needs while it runs.

Source: the kernels of qsync.backend and of torch, checked against the allocator by
`python -m qsync.experiments.memory.memory_error`. A workspace has the bytes beyond an operator's inputs, its
result, the tensors it saves, its result's gradient, and its inputs' gradients in their carried types.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from qsync.backend.block_sizes import SCORES_PER_BLOCK, SLOPES_PER_BLOCK, saves_weights, scores_per_block
from qsync.backend.kernels.conv_strategy import int8_gradient_unfolds, windows_bytes
from qsync.lowering.lowered_graph import Run
from qsync.predictor.memory.expanded_operands import expanded
from qsync.predictor.memory.saved_tensors import INT8_MODES
from qsync.records.graph import Op, num_elements
from qsync.records.precision import Precision, is_encoded, type_bytes

_FP32, _BF16 = 4, 2
_BLOCK, _SHORT_WINDOW = 16, 3  # of oneDNN, in FP32: channels in a block, and a depthwise window's size
# The most scratch memory of oneDNN for a forward product of BF16 operands (found as in `_scratch`).
_FORWARD_SCRATCH_BYTES = 197_632
FULL = (Precision.FP32, Precision.FP32_FAST)
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose")
_CONVOLVED = (*FULL, Precision.BF16, *INT8_MODES)
_SAVING_LESS = ("output", "bits", "codes")


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask of attention: its shape, and the bytes of an element."""

    shape: tuple[int, ...]
    width: int


@dataclass(frozen=True, slots=True)
class OpContext:
    """The context of an operator: shapes, carried types and gradients of its operands, and its device.

    With `in_buckets` gradients of parameters are copied into DDP's buckets. `in_order` has the operands that
    lie channels-last by themselves, as a weight does after `model.to(memory_format=torch.channels_last)`.
    `writes_scores`: it is attention in torch's plain kernel.
    """

    shapes: tuple[tuple[int, ...], ...]
    carried: tuple[str, ...]
    has_gradient: tuple[bool, ...]
    is_parameter: tuple[bool, ...]
    gradient: str  # the type in which the gradient of the result arrives
    in_buckets: bool
    device: str
    masks: tuple[Mask, ...] = ()
    in_order: tuple[int, ...] = ()
    writes_scores: bool = False


def forward_workspace(op: Op, run: Run, context: OpContext) -> int:
    """Return the bytes of workspace in forward."""
    elements = op.num_elements
    if run.form in _SAVING_LESS:
        return _saving_less_forward(op, run)
    if op.kind == "attention" and _has_few_keys(op, run, context):
        return _attention_short_forward(op, context)
    if op.kind == "attention" and run.mode == Precision.INT8:
        return _attention_int8(op, context, backward=False)
    if op.kind == "attention" and run.mode == Precision.BF16 and context.device == "cpu":
        return _attention_bf16(op, context, backward=False)
    if context.writes_scores:
        return _attention_plain(op, context, backward=False)
    if run.mode in INT8_MODES and op.kind in ("linear", "addmm"):
        return 0 if run.output == "fp32" else _FP32 * elements  # sums; an FP32 result replaces them
    if op.kind in _CONVOLUTIONS and context.device == "cpu":
        return _convolution_forward(op, run, context)
    if op.kind == "embedding" and run.mode != Precision.FP32:  # the rows in FP32 before they are rounded
        return type_bytes("fp32", elements) + type_bytes("int8", elements) * (run.mode == Precision.INT8)
    if op.kind == "matmul" and len(op.inputs) == 2:
        return _matmul_forward(op, run, context)
    return 0


def backward_workspace(op: Op, run: Run, context: OpContext) -> int:
    """Return the bytes of workspace in backward."""
    if run.form in _SAVING_LESS:
        return _saving_less_backward(op, run)
    if run.mode in INT8_MODES and op.kind in ("linear", "addmm"):
        return _product_int8(op, run, context)
    if op.kind == "attention" and _has_few_keys(op, run, context):
        return _attention_short_backward(op, context)
    if op.kind == "attention" and run.mode == Precision.INT8:
        return _attention_int8(op, context, backward=True)
    if run.mode == Precision.BF16 and op.kind in ("linear", "addmm"):
        return _product_bf16(op, context)
    if op.kind in _CONVOLUTIONS and context.device == "cpu" and run.mode in _CONVOLVED:
        return _convolution_backward(op, run, context)
    workspace = sum(_gradient_of(j, taken, context) for j, taken in enumerate(run.operands))
    if op.kind == "matmul" and len(op.inputs) == 2:
        return workspace + _matmul_backward(run, context)
    if op.kind == "cross_entropy":  # the gradient of its log-probabilities
        return workspace + _FP32 * num_elements(context.shapes[0])
    if op.kind == "attention" and run.mode == Precision.BF16 and context.device == "cpu":
        return workspace + _attention_bf16(op, context, backward=True)
    if context.writes_scores:
        return workspace + _attention_plain(op, context, backward=True)
    if op.kind == "embedding" and run.mode != Precision.FP32 and run.output != "fp32":
        workspace += type_bytes("fp32", op.num_elements)  # the gradient of the rows, cast to FP32
    if op.kind in ("batch_norm", "frozen_batch_norm") and context.device == "cpu":  # torch allocates dx twice
        workspace += type_bytes(context.gradient, op.num_elements)
    return workspace


def _saving_less_forward(op: Op, run: Run) -> int:
    """Return the workspace of qsync.backend.compressed_saves.saved_ops in forward.

    The result exists already; with codes of slopes it does not exist yet.
    """
    n, width = op.num_elements, type_bytes(run.output, 1)
    packing = 3 * n - n // 8  # the mask, gathered, and shifted; the bits themselves are saved
    if op.kind in ("gelu", "silu"):
        blocks = 3 * _FP32 * min(n, SLOPES_PER_BLOCK)
        return packing if run.form == "output" else max(0, blocks - width * n)
    if op.kind == "dropout":
        return packing + width * n  # and the noise
    if run.form == "bits":
        return packing
    if run.form == "codes":  # the encoded value in FP32; the step before it, if that is FP32 only now
        return _FP32 * n + (0 if width == _FP32 else (_FP32 - 1) * n)
    return 0


def _saving_less_backward(op: Op, run: Run) -> int:
    """Return the same in backward."""
    n, width = op.num_elements, type_bytes(run.output, 1)
    if op.kind in ("gelu", "silu"):
        blocks = 3 * _FP32 * min(n, SLOPES_PER_BLOCK)
        if run.form == "codes":
            return blocks // 3 * (1 if width == _FP32 else 2)
        return (
            2 * _FP32 - width
        ) * n + blocks  # the bits as numbers, and the slope, which becomes the gradient
    if run.form == "bits":
        return n if op.kind == "dropout" else width * n
    if op.kind in ("batch_norm", "frozen_batch_norm"):  # torch allocates dx twice
        return (_FP32 + width) * n
    return _FP32 * n if width == _FP32 or op.kind != "layer_norm" else (_FP32 + _BF16) * n


def _gradient_of(j: int, taken: str, context: OpContext) -> int:
    """Return the bytes of an operand's gradient as it is made, where that is not the tensor passed on."""
    elements, num_bytes = num_elements(context.shapes[j]), 0
    if context.has_gradient[j]:
        if taken != context.carried[j] and not is_encoded(taken):
            num_bytes += type_bytes(taken, elements)  # before it is cast
        if context.is_parameter[j] and context.in_buckets:
            num_bytes += _FP32 * elements  # made here, then copied into its bucket
    return num_bytes


def _product_bf16(op: Op, context: OpContext) -> int:
    """Return the backward workspace of torch's y = x W' of BF16 tensors on a CPU."""
    x, w = _operands(op)
    inner, weight = num_elements(context.shapes[x]), num_elements(context.shapes[w])
    made = _BF16 * inner if context.has_gradient[x] else 0
    passed_on = type_bytes(context.carried[x], inner) if made else 0
    if not context.has_gradient[w]:
        return 0  # the input's gradient alone, which is passed on in its own type or a wider one
    bucket = _FP32 * weight if context.in_buckets else 0
    after = passed_on if context.carried[x] != "bf16" else 0  # cast to the operand's own type
    return made - passed_on + max(_BF16 * weight + max(_scratch(op, context), bucket), after)


def _product_int8(op: Op, run: Run, context: OpContext) -> int:
    """Return the backward workspace of y = x W' of INT8 codes: see qsync.backend.kernels.linear."""
    x, w = _operands(op)
    elements, inner, weight = (
        op.num_elements,
        num_elements(context.shapes[x]),
        num_elements(context.shapes[w]),
    )
    bucket = _FP32 * weight if context.in_buckets else 0
    passed_on = type_bytes(context.carried[x], inner) if context.has_gradient[x] else 0
    if run.mode == Precision.INT8_ALL:
        # Codes of the gradient, by rows and then by columns; sums, which FP32 results replace.
        sums = (_FP32 if context.carried[x] == "fp32" else _FP32 + _BF16) * inner if passed_on else 0
        rows, outputs = elements // max(op.shape[-1], 1), op.shape[-1]
        scales = _FP32 * (2 * (rows + outputs) + inner // max(rows, 1))  # and the seeds of rounding
        return scales + max(elements + sums - passed_on, 2 * elements, elements + bucket)
    gradient_16bit = _BF16 * elements if context.gradient == "fp32" else 0
    made = _BF16 * inner if passed_on else 0
    cast_dx = passed_on if context.carried[x] != "bf16" else 0
    first = made + _BF16 * inner + _BF16 * weight + _scratch(op, context)  # both products, the input decoded
    then = made + cast_dx + _BF16 * weight  # dx is cast to the input's type
    last = passed_on + _BF16 * weight + bucket
    return gradient_16bit + max(first, then, last) - passed_on


def _matmul_forward(op: Op, run: Run, context: OpContext) -> int:
    """Return the bytes of expanded operands that are not saved; in INT8 those of codes, with their scales."""
    num_bytes = 0
    for each in expanded(*context.shapes):
        if each.is_copied and run.mode in INT8_MODES:
            num_bytes += each.num_elements + _FP32 * each.num_elements // max(context.shapes[0][-1], 1)
        elif each.is_copied and not (op.requires_grad and context.has_gradient[1 - each.operand]):
            num_bytes += type_bytes(run.mode, each.num_elements)
    return num_bytes


def _matmul_backward(run: Run, context: OpContext) -> int:
    """Return the bytes of expanded gradients, before they are summed.

    INT8 makes them one after the other, from the other operand, decoded and expanded, and sums in FP32.
    """
    found = {each.operand: each for each in expanded(*context.shapes)}
    elements = [found[j].num_elements if j in found and context.has_gradient[j] else 0 for j in (0, 1)]
    if run.mode not in INT8_MODES:
        return sum(type_bytes(run.mode, count) for count in elements)
    copied = [found[j].num_elements if j in found and found[j].is_copied else 0 for j in (0, 1)]
    made = [_BF16 * (elements[j] + copied[1 - j]) if context.has_gradient[j] else 0 for j in (0, 1)]
    return max(*made, *((_BF16 + _FP32) * count for count in elements))


def _operands(op: Op) -> tuple[int, int]:
    """Return the numbers of x and of the weight among the inputs."""
    return (1, 2) if op.kind == "addmm" else (0, 1)


def _scratch(op: Op, context: OpContext) -> int:
    """Return oneDNN's scratch bytes for a weight's gradient of BF16 operands on one thread."""
    if context.device != "cpu":
        return 0
    outputs = op.shape[-1]
    return _scratch_of(op.num_elements // max(outputs, 1), outputs, context.shapes[_operands(op)[0]][-1])


def _scratch_of(rows: int, outputs: int, inner: int) -> int:
    """Return the same for dW = g' x: g (rows, outputs), x (rows, inner), blocks of 256 outputs, 1024 inputs.

    Exact for 20 shapes of at least 512 rows, at most 100 KB too much for 8 with fewer (bytes found, torch
    2.13).
    """
    outputs, inner = min(outputs, 256), min(inner, 1024)
    at_once = (2 * min(rows, 512) + 320) * outputs + 66_688
    in_pieces = (_FP32 * inner + 1088) * outputs + 66_688  # rows in pieces, summed in FP32
    return at_once if rows <= 512 else in_pieces if rows >= 1024 else max(at_once, in_pieces)


def _convolution_forward(op: Op, run: Run, context: OpContext) -> int:
    """Return the forward workspace of conv2d on a CPU: see qsync.backend.kernels.convolution.

    In FP32 it is torch's kernel, which reorders its operands.
    """
    op, context = _with_height(op, context)
    x, w, y = num_elements(context.shapes[0]), num_elements(context.shapes[1]), op.num_elements
    channels_last, one_channel = _is_channels_last(op, run, context), context.shapes[1][1] == 1
    if op.kind == "conv_transpose":  # its result lies in rows of channels at first, and is copied twice
        return 2 * type_bytes(run.mode, y)
    if run.mode in INT8_MODES:
        windows = _windows_bytes(op, run, context)[0]
        return windows + (0 if run.output == "fp32" else _FP32 * y)
    if run.mode == Precision.BF16:
        windows = _windows_bytes(op, run, context)[0]
        reordered = 0 if channels_last or one_channel else _BF16 * x
        return (
            windows + max(reordered - _BF16 * y, _FORWARD_SCRATCH_BYTES)
            if windows
            else reordered + 2 * _BF16 * w
        )
    if _takes_pixels(op, context) and _groups(context) == 1:
        return 0
    return _FP32 * (w + _reordered_weight(context)) if channels_last else _FP32 * max(x + w, y)


def _convolution_backward(op: Op, run: Run, context: OpContext) -> int:
    """Return the backward workspace of conv2d on a CPU."""
    op, context = _with_height(op, context)
    x, w, y = num_elements(context.shapes[0]), num_elements(context.shapes[1]), op.num_elements
    has_dx, channels_last = context.has_gradient[0], _is_channels_last(op, run, context)
    passed_on = type_bytes(context.carried[0], x) if has_dx else 0
    bucket = _FP32 * w if context.in_buckets else 0  # the weight's gradient, before it is copied
    cast_dx = passed_on if context.carried[0] != "bf16" else 0
    if run.mode in FULL:
        made = _FP32 * x if has_dx else 0
        if _takes_pixels(op, context) and _groups(context) == 1:
            workspace = _FP32 * w
        elif channels_last:  # the weight's gradient in blocks, in rows, and in the order of the weight
            workspace = _FP32 * (_in_blocks(op, context) + 2 * w + _reordered_weight(context))
        elif _in_windows(op, context):  # windows of one image, and the weight's gradient in blocks
            windows = num_elements(context.shapes[1][1:]) * num_elements(op.shape[2:])
            workspace = _FP32 * max(5 * w + windows, (y + w) * has_dx, x * has_dx)
        else:  # a stride leaves the input's gradient in blocks while it is put in order
            again = 2 * x if has_dx and _is_strided(op, context) and not _is_short(op, context) else 0
            workspace = _FP32 * max(x + y + w, 2 * w, again)
        workspace += bucket - _FP32 * w  # without buckets the last of them is the gradient
        return max(made + workspace, made + cast_dx * (context.carried[0] != "fp32")) - passed_on
    if run.mode == Precision.INT8_ALL:
        return _convolution_int8_all(op, run, context) - passed_on
    windows = _windows_bytes(op, run, context)[1]
    scratch = _scratch_of(y // max(op.shape[1], 1), op.shape[1], num_elements(context.shapes[1][1:]))
    made = _BF16 * x if has_dx else 0
    if run.mode == Precision.BF16:
        signals = op.kind == "conv1d"  # torch reorders them and their gradients; images qsync has in order
        reordered = 0 if channels_last or windows else _BF16 * (x + y * signals)
        products = reordered + (windows + scratch + made if windows else 4 * _BF16 * w)
        dx_reordered = 0 if channels_last else made  # to the memory format of x
        return made + _BF16 * w + max(products, bucket, cast_dx, dx_reordered) - passed_on
    # The gradient in 16 bits, x and W decoded; dx of windows is summed in FP32.
    base = _BF16 * (x + y + w * has_dx)
    first = _BF16 * w + (windows + scratch + _FP32 * x * has_dx if windows else made)
    then = (passed_on if windows and cast_dx else made + cast_dx) + _BF16 * w
    dx_reordered = 0 if channels_last else passed_on
    last = passed_on + _BF16 * w + max(bucket, dx_reordered)
    return base + max(first, then, last) - passed_on


def _with_height(op: Op, context: OpContext) -> tuple[Op, OpContext]:
    """Return a convolution of signals as one of images of height 1, and any other as it is."""
    if op.kind != "conv1d":
        return op, context
    x, w, *others = context.shapes
    n, outputs, length = op.shape
    shapes = ((*x[:2], 1, x[2]), (*w[:2], 1, w[2]), *others)
    return replace(op, shape=(n, outputs, 1, length)), replace(context, shapes=shapes)


def _windows_bytes(op: Op, run: Run, context: OpContext) -> tuple[int, int]:
    """Return the bytes of a convolution's windows, forward and backward: of images, and of INT8 signals."""
    if op.kind != "conv2d" and not (op.kind == "conv1d" and run.mode in INT8_MODES):
        return 0, 0
    return windows_bytes(run.mode, context.shapes[0], context.shapes[1], op.shape)


def _takes_pixels(op: Op, context: OpContext) -> bool:
    """Return whether a convolution multiplies pixels one by one; of one group oneDNN reorders none."""
    x, w = context.shapes[:2]
    return num_elements(w[2:]) == 1 and x[2:] == op.shape[2:]


def _groups(context: OpContext) -> int:
    """Return the number of groups of a convolution's channels."""
    return max(1, context.shapes[0][1] // max(context.shapes[1][1], 1))


def _is_channels_last(op: Op, run: Run, context: OpContext) -> bool:
    """Return whether a convolution works in rows of channels, as it does if its image or weight lies so.

    A result of one pixel does not show it.
    """
    return run.channels_last or op.channels_last or any(j in context.in_order for j in (0, 1))


def _reordered_weight(context: OpContext) -> int:
    """Return the elements of a weight that torch copies into the order of channels-last images."""
    _, inner, *window = context.shapes[1]
    lies_so = 1 in context.in_order or inner == 1 or num_elements(window) == 1
    return 0 if lies_so else num_elements(context.shapes[1])


def _in_blocks(op: Op, context: OpContext) -> int:
    """Return the elements of a weight's gradient as oneDNN makes it in FP32.

    It is in blocks of 16 by 16 channels of each group (AVX-512), but for a short depthwise window.
    """
    outputs, inner, *window = context.shapes[1]
    groups = _groups(context)
    if groups == 1 or _is_short(op, context):
        return num_elements(context.shapes[1])
    padded = (-(-outputs // groups // _BLOCK) * -(-inner // _BLOCK)) * _BLOCK**2
    return groups * padded * num_elements(window)


def _is_strided(op: Op, context: OpContext) -> bool:
    """Return whether the result has fewer rows or columns than the image, though more than one."""
    return any(1 < size < of for size, of in zip(op.shape[2:], context.shapes[0][2:], strict=True))


def _in_windows(op: Op, context: OpContext) -> bool:
    """Return whether oneDNN multiplies windows of each group, as pixels or of fewer channels than a block."""
    outputs, inner = context.shapes[1][:2]
    few = min(inner, outputs // _groups(context)) < _BLOCK and not _is_short(op, context)
    return op.kind != "conv_transpose" and _groups(context) > 1 and (few or _takes_pixels(op, context))


def _is_short(op: Op, context: OpContext) -> bool:
    """Return whether a window is depthwise, short and inside the image: oneDNN has a kernel of its own."""
    (channels, height), (outputs, inner, *window) = context.shapes[0][1:3], context.shapes[1]
    inside = max(window) <= _SHORT_WINDOW and window[0] + _is_strided(op, context) <= height
    return inner == 1 and outputs == channels and inside


def _convolution_int8_all(op: Op, run: Run, context: OpContext) -> int:
    """Return the same for INT8 gradients, with the input's gradient as it is passed on."""
    (x, w, y), shapes = (num_elements(s) for s in (*context.shapes[:2], op.shape)), context.shapes
    outputs, window = op.shape[1], num_elements(shapes[1][2:])
    pixels, x_pixels = y // max(outputs, 1), x // max(shapes[0][1], 1)
    bucket = _FP32 * w if context.in_buckets else 0
    windows = pixels * num_elements(shapes[1][1:])  # of the input, in bytes
    passed_on, first, made = 0, 0, 0
    if context.has_gradient[0]:
        made = passed_on = type_bytes(context.carried[0], x)
        rounded = _BF16 * x if context.carried[0] == "bf16" else 0
        # Codes of the gradient, operands of the product, its sums, and the result if those do not become it.
        if int8_gradient_unfolds(shapes[0], shapes[1], op.shape):
            factors = _FP32 * (y // max(op.shape[0], 1) + x_pixels)
            first = y + factors + x_pixels * window * outputs + w + _FP32 * x + rounded
        elif window == 1 and x_pixels == pixels:
            first = y + _FP32 * x + rounded
        else:
            made = _FP32 * x
            first = y + _BF16 * windows + max(_FP32 * windows, made)
    then = made + y + max(_FP32 * pixels, windows + bucket)
    reordered = _FP32 * w if window > 1 else 0  # the weight's gradient, to the order of the weight
    in_order = _is_channels_last(op, run, context)
    dx_again = passed_on if made != passed_on or not in_order else 0  # cast, or reordered
    return max(first, then, made + bucket + max(reordered, dx_again))


def _attention_plain(op: Op, context: OpContext, backward: bool) -> int:
    """Return the workspace of torch's plain attention in FP32; backward frees saved tensors on its way.

    Without dropout two matrices of scores are alive once: in forward beside the weights, which are saved, and
    in backward when the copy of v and the result's gradient are gone, and dQ and dK are not made yet. With
    dropout the weights after it are gone as well. Exact for 14 of 16 shapes of 1 to 24 scores an element of
    q, up to 4 % of the peak too much for the others (bytes found, torch 2.13).
    """
    _, _, v, scores = _attention_elements(op, context)
    gone = op.num_elements + (0 if op.copies is False else v)
    if op.dropout:
        masks = sum(num_elements(mask.shape) for mask in context.masks)
        return _FP32 * (max(0, scores - gone) if backward else op.num_elements + masks)
    own = num_elements(context.shapes[0]) + num_elements(context.shapes[1])
    return _FP32 * max(0, 2 * scores - gone - own) if backward else _FP32 * scores


def _has_few_keys(op: Op, run: Run, context: OpContext) -> bool:
    lowered = run.mode in (Precision.INT8, Precision.BF16) and context.device == "cpu"
    return lowered and saves_weights(context.shapes[1][-2], op.dropout)


def _attention_elements(op: Op, context: OpContext) -> tuple[int, int, int, int]:
    """Return the elements of attention's q, k and v, one matrix per head, and of its scores."""
    queries, keys, heads = op.shape[-2], context.shapes[1][-2], num_elements(op.shape[:-2])
    width = context.shapes[0][-1]
    return heads * queries * width, heads * keys * width, heads * keys * op.shape[-1], heads * queries * keys


def _passed_on(context: OpContext) -> int:
    """Return the bytes of the gradients of q, k and v, in the types that they are carried in."""
    found = zip(context.carried[:3], context.shapes[:3], context.has_gradient[:3], strict=True)
    return sum(type_bytes(carried, num_elements(shape)) for carried, shape, has_dx in found if has_dx)


def _attention_short_forward(op: Op, context: OpContext) -> int:
    """Return the forward workspace of qsync.backend.kernels.attention_short; its weights are saved."""
    q, k, v, scores = _attention_elements(op, context)
    y, result = op.num_elements, type_bytes(context.gradient, op.num_elements)
    weights = _BF16 * scores
    operands = max(2 * q, q + 2 * k)  # copied once more, one after the other
    before = _FP32 * max(operands, 2 * q + k + scores) - weights
    cast = _FP32 * y * (context.gradient == "fp32")
    return max(before - result, 2 * _FP32 * scores - result, _BF16 * (v + y) - result, _BF16 * y + cast)


def _attention_short_backward(op: Op, context: OpContext) -> int:
    """Return the same in backward."""
    q, k, v, scores = _attention_elements(op, context)
    made = _BF16 * (q + k + v)
    base = made + _BF16 * op.num_elements
    return base + max(2 * _BF16 * scores, _BF16 * scores + made) - _passed_on(context)


def _attention_bf16(op: Op, context: OpContext, backward: bool) -> int:
    """Return the workspace of qsync.backend.kernels.attention_bf16: a matrix per head, scores in pieces.

    torch's own kernel needs less, where it is the faster one.
    """
    queries, keys, heads = op.shape[-2], context.shapes[1][-2], num_elements(op.shape[:-2])
    q, k, v, _ = _attention_elements(op, context)
    y = op.num_elements
    rows = max(min(queries, SCORES_PER_BLOCK // max(keys, 1)), 1)
    chunk = min(max(SCORES_PER_BLOCK // (rows * max(keys, 1)), 1), heads) * rows * keys
    matrices = _BF16 * (q + k + v)
    masks_bytes = _BF16 * chunk * (len(context.masks) + (op.dropout > 0))  # the mask, and that of dropout
    if not backward:  # scores in two numbers, probabilities, and those of the piece before
        return (
            matrices + _BF16 * y + max(0, 4 * _BF16 * chunk + masks_bytes - type_bytes(context.gradient, y))
        )
    sums = (_FP32 - _BF16) * (k + v) if rows < queries else 0  # gradients to which pieces add up
    return max(3 * _FP32 * y, matrices + _BF16 * y + 6 * _BF16 * chunk + masks_bytes + sums)


def _attention_int8(op: Op, context: OpContext, backward: bool) -> int:
    """Return the workspace of qsync.backend.kernels.attention_int8: a matrix per head, scores in pieces."""
    queries, keys, heads = op.shape[-2], context.shapes[1][-2], num_elements(op.shape[:-2])
    q, k, v, scores = _attention_elements(op, context)
    y = op.num_elements
    most = scores_per_block(context.device)
    chunk = min(max(most // max(queries * keys, 1), 1), heads) * queries * keys
    base = q + k + 2 * _FP32 * heads * max(queries, keys)  # codes, heads in front, and scales
    for mask in context.masks:
        base += scores * mask.width if num_elements(mask.shape[:-2]) > 1 else 0
    if not backward:
        passes = 3 if op.dropout else 2
        base += _BF16 * (v + y)
        return base + max(
            passes * _FP32 * chunk - type_bytes(context.gradient, y), _FP32 * y * (context.gradient == "fp32")
        )
    base += 2 * _BF16 * (q + k + v) + _BF16 * y  # decoded, their gradients, and the result's in 16 bits
    passed_on = _passed_on(context)
    left = 14 * chunk  # probabilities, their gradient, that of the scores in FP32 and in 16 bits
    again = chunk * ((26 if op.dropout else 22) if scores > chunk else 16 if op.dropout else 14)
    cast_dx = passed_on if context.carried[0] != "bf16" else 0
    return base + max(again, left + cast_dx) - passed_on
