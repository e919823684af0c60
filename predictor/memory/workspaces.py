"""What operators need for a moment, beside their results and what they keep: by kind, as the kernels have it.

Read off the kernels (`qsync.backend`) and torch's own, and held against the allocator by
`python -m qsync.experiments.memory.memory_error`. Bytes beyond an operator's inputs, its result, what it keeps, the
gradient of its result and the gradients of its inputs in the types in which those are carried.
"""

from __future__ import annotations

from dataclasses import dataclass

from qsync.backend.kernels.conv_strategy import windows_bytes
from qsync.lowering.lowered_graph import Run
from qsync.records.graph import Op, num_elements
from qsync.records.precision import Precision, is_encoded, type_bytes

_FP32, _BF16 = 4, 2
# Blocks in which kernels on CPUs go through long tensors: qsync.backend.compressed_saves.activation_slopes and .attention.
_SLOPE_BLOCK = _SCORES_AT_A_TIME = 1 << 17
# What oneDNN works in to make a product of BF16 operands forward, at most (as `_scratch`).
_FORWARD_SCRATCH = 197_632
_CONVOLVED = (Precision.FP32, Precision.BF16, Precision.INT8)
_INT8 = (Precision.INT8, Precision.INT8_ALL)
_SAVING_LESS = ("output", "bits", "codes")


@dataclass(frozen=True, slots=True)
class Mask:
    """What attention adds to its scores, or hides of them: its shape, and bytes of an element."""

    shape: tuple[int, ...]
    width: int


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an operator finds: of its operands and its result the types they are carried in, which have a
    gradient, which are parameters; and whether gradients of parameters are copied into buckets.
    """

    shapes: tuple[tuple[int, ...], ...]
    carried: tuple[str, ...]
    has_gradient: tuple[bool, ...]
    is_parameter: tuple[bool, ...]
    gradient: str  # the type in which the gradient of the result arrives
    in_buckets: bool
    device: str
    masks: tuple[Mask, ...] = ()


def in_forward(op: Op, run: Run, around: Surroundings) -> int:
    """Bytes that forward needs for a moment."""
    elements = op.num_elements
    if run.form in _SAVING_LESS:
        return _saving_less_forward(op, run)
    if op.kind == "attention" and run.mode == Precision.INT8:
        return _attention_int8(op, around, backward=False)
    if op.kind == "attention" and run.mode == Precision.BF16 and around.device == "cpu":
        return _attention_bf16(op, around, backward=False)
    if op.kind == "attention" and around.device == "cpu" and op.dropout:
        mask = sum(type_bytes(run.mode, num_elements(mask.shape)) for mask in around.masks)
        return mask + _written_out(op, backward=False)
    if run.mode in _INT8 and op.kind in ("linear", "addmm"):
        return 0 if run.output == "fp32" else _FP32 * elements  # sums; FP32 takes their place
    if op.kind == "conv2d" and around.device == "cpu":
        return _convolution_forward(op, run, around)
    if op.kind == "embedding" and run.mode != Precision.FP32:  # the rows in FP32 before they are rounded
        return type_bytes("fp32", elements) + type_bytes("int8", elements) * (run.mode == Precision.INT8)
    return 0


def in_backward(op: Op, run: Run, around: Surroundings) -> int:
    """Bytes that backward needs for a moment."""
    if run.form in _SAVING_LESS:
        return _saving_less_backward(op, run)
    if run.mode in _INT8 and op.kind in ("linear", "addmm"):
        return _product_int8(op, run, around)
    if op.kind == "attention" and run.mode == Precision.INT8:
        return _attention_int8(op, around, backward=True)
    if run.mode == Precision.BF16 and op.kind in ("linear", "addmm"):
        return _product_bf16(op, around)
    if (
        op.kind == "conv2d"
        and around.device == "cpu"
        and run.mode in ("fp32", Precision.BF16, Precision.INT8)
    ):
        return _convolution_backward(op, run, around)
    moment = sum(_gradient_of(j, taken, around) for j, taken in enumerate(run.operands))
    if op.kind == "attention" and run.mode == Precision.BF16 and around.device == "cpu":
        return moment + _attention_bf16(op, around, backward=True)
    if op.kind == "attention" and around.device == "cpu" and op.dropout:
        return moment + _written_out(op, backward=True)
    if op.kind == "embedding" and run.mode != Precision.FP32 and run.output != "fp32":
        moment += type_bytes("fp32", op.num_elements)  # the gradient of the rows once it is widened
    if op.kind == "batch_norm" and around.device == "cpu":  # torch makes room for dx twice
        moment += type_bytes(around.gradient, op.num_elements)
    return moment


def _saving_less_forward(op: Op, run: Run) -> int:
    """See qsync.backend.compressed_saves.saved_ops: the result is there already, or, for codes of slopes, is not yet."""
    n, width = op.num_elements, type_bytes(run.output, 1)
    packing = 3 * n - n // 8  # the mask, it gathered, and it shifted; the bits themselves are kept
    if op.kind in ("gelu", "silu"):
        blocks = 3 * _FP32 * min(n, _SLOPE_BLOCK)
        return packing if run.form == "output" else max(0, blocks - width * n)
    if op.kind == "dropout":
        return packing + width * n  # and the noise
    if run.form == "bits":
        return packing
    if run.form == "codes":  # what is encoded, in FP32; the step before it, if that is FP32 only now
        return _FP32 * n + (0 if width == _FP32 else (_FP32 - 1) * n)
    return 0


def _saving_less_backward(op: Op, run: Run) -> int:
    n, width = op.num_elements, type_bytes(run.output, 1)
    if op.kind in ("gelu", "silu"):
        blocks = 3 * _FP32 * min(n, _SLOPE_BLOCK)
        if run.form == "codes":
            return blocks // 3 * (1 if width == _FP32 else 2)
        return (
            2 * _FP32 - width
        ) * n + blocks  # the bits as numbers, and the slope, which becomes the gradient
    if run.form == "bits":
        return n if op.kind == "dropout" else width * n
    if op.kind == "batch_norm":  # torch makes room for dx twice
        return (_FP32 + width) * n
    return _FP32 * n if width == _FP32 or op.kind != "layer_norm" else (_FP32 + _BF16) * n


def _gradient_of(j: int, taken: str, around: Surroundings) -> int:
    """The gradient of an operand as it is made, where that is not yet the tensor that is handed on."""
    elements, num_bytes = num_elements(around.shapes[j]), 0
    if around.has_gradient[j]:
        if taken != around.carried[j] and not is_encoded(taken):
            num_bytes += type_bytes(taken, elements)  # before it is cast
        if around.is_parameter[j] and around.in_buckets:
            num_bytes += _FP32 * elements  # made here, then copied into its bucket
    return num_bytes


def _product_bf16(op: Op, around: Surroundings) -> int:
    """Y = x W' of BF16 tensors on a CPU, by torch."""
    x, w = _operands(op)
    inner, weight = num_elements(around.shapes[x]), num_elements(around.shapes[w])
    made = _BF16 * inner if around.has_gradient[x] else 0
    handed_on = type_bytes(around.carried[x], inner) if made else 0
    if not around.has_gradient[w]:
        return max(0, made - handed_on)
    bucket = _FP32 * weight if around.in_buckets else 0
    after = handed_on if around.carried[x] != "bf16" else 0  # brought to the operand's own type
    return made - handed_on + max(_BF16 * weight + max(_scratch(op, around), bucket), after)


def _product_int8(op: Op, run: Run, around: Surroundings) -> int:
    """Y = x W' of INT8 codes: see qsync.backend.kernels.linear."""
    x, w = _operands(op)
    elements, inner, weight = op.num_elements, num_elements(around.shapes[x]), num_elements(around.shapes[w])
    bucket = _FP32 * weight if around.in_buckets else 0
    handed_on = type_bytes(around.carried[x], inner) if around.has_gradient[x] else 0
    if run.mode == Precision.INT8_ALL:
        # Codes of the gradient, in rows then in columns; sums, which FP32 results take the place of.
        sums = (_FP32 if around.carried[x] == "fp32" else _FP32 + _BF16) * inner if handed_on else 0
        rows, outputs = elements // max(op.shape[-1], 1), op.shape[-1]
        scales = _FP32 * (2 * (rows + outputs) + inner // max(rows, 1))  # and the seeds of rounding
        return scales + max(elements + sums - handed_on, 2 * elements, elements + bucket)
    narrow = _BF16 * elements if around.gradient == "fp32" else 0
    made = _BF16 * inner if handed_on else 0
    widened = handed_on if around.carried[x] != "bf16" else 0
    first = made + _BF16 * inner + _BF16 * weight + _scratch(op, around)  # both products, the input decoded
    then = made + widened + _BF16 * weight  # dx is brought to the input's type
    last = handed_on + _BF16 * weight + bucket
    return narrow + max(first, then, last) - handed_on


def _operands(op: Op) -> tuple[int, int]:
    """The places of x and of the weight."""
    return (1, 2) if op.kind == "addmm" else (0, 1)


def _scratch(op: Op, around: Surroundings) -> int:
    """What oneDNN works in to make a weight's gradient of BF16 operands on one thread."""
    if around.device != "cpu":
        return 0
    outputs = op.shape[-1]
    return _scratch_of(op.num_elements // max(outputs, 1), outputs, around.shapes[_operands(op)[0]][-1])


def _scratch_of(rows: int, outputs: int, inner: int) -> int:
    """DW = g' x of g (rows, outputs) and x (rows, inner), by blocks of at most 256 outputs and 1024 inputs.

    Exact for 20 shapes of at least 512 rows, at most 100 KB too much for 8 with fewer (bytes found, torch
    2.13).
    """
    outputs, inner = min(outputs, 256), min(inner, 1024)
    at_once = (2 * min(rows, 512) + 320) * outputs + 66_688
    in_pieces = (_FP32 * inner + 1088) * outputs + 66_688  # rows in pieces, whose sums are kept in FP32
    return at_once if rows <= 512 else in_pieces if rows >= 1024 else max(at_once, in_pieces)


def _convolution_forward(op: Op, run: Run, around: Surroundings) -> int:
    """conv2d on a CPU: see qsync.backend.kernels.convolution; in FP32 torch's, which brings operands in order."""
    x, w, y = num_elements(around.shapes[0]), num_elements(around.shapes[1]), op.num_elements
    one_channel = around.shapes[1][1] == 1
    if run.mode == Precision.INT8:
        windows = windows_bytes("int8", around.shapes[0], around.shapes[1], op.shape)[0]
        return windows + (0 if run.output == "fp32" else _FP32 * y)
    if run.mode == Precision.BF16:
        windows = windows_bytes("bf16", around.shapes[0], around.shapes[1], op.shape)[0]
        in_order = 0 if run.channels_last or one_channel else _BF16 * x
        return windows + max(in_order - _BF16 * y, _FORWARD_SCRATCH) if windows else in_order + 2 * _BF16 * w
    if one_channel:  # the result comes with channels last, and is put in order
        return _FP32 * y
    return 2 * _FP32 * w if run.channels_last else _FP32 * (x + w)


def _convolution_backward(op: Op, run: Run, around: Surroundings) -> int:
    x, w, y = num_elements(around.shapes[0]), num_elements(around.shapes[1]), op.num_elements
    wanted = around.has_gradient[0]
    handed_on = type_bytes(around.carried[0], x) if wanted else 0
    bucket = _FP32 * w if around.in_buckets else 0  # the weight's gradient, before it is copied
    widened = handed_on if around.carried[0] != "bf16" else 0
    if run.mode == Precision.FP32:
        made = _FP32 * x if wanted else 0
        moment = 3 * _FP32 * w if run.channels_last else max(2 * made - _FP32 * w, _FP32 * (x + y), _FP32 * w)
        return max(made + moment + bucket, made + widened * (around.carried[0] != "fp32")) - handed_on
    windows = windows_bytes(run.mode, around.shapes[0], around.shapes[1], op.shape)[1]
    scratch = _scratch_of(y // max(op.shape[1], 1), op.shape[1], num_elements(around.shapes[1][1:]))
    made = _BF16 * x if wanted else 0
    if run.mode == Precision.BF16:
        in_order = 0 if run.channels_last or windows else _BF16 * x
        products = in_order + (windows + scratch + made if windows else 4 * _BF16 * w)
        turned_back = 0 if run.channels_last else made  # dx goes back in the order in which x came
        return made + _BF16 * w + max(products, bucket, widened, turned_back) - handed_on
    # The gradient in 16 bits, x and W decoded; dx of windows is summed in FP32.
    base = _BF16 * (x + y + w * wanted)
    first = _BF16 * w + (windows + scratch + _FP32 * x * wanted if windows else made)
    then = (handed_on if windows and widened else made + widened) + _BF16 * w
    turned_back = 0 if run.channels_last else handed_on
    last = handed_on + _BF16 * w + max(bucket, turned_back)
    return base + max(first, then, last) - handed_on


def _written_out(op: Op, backward: bool) -> int:
    """Torch's plain attention in FP32; backward lets go of what was kept on its way.

    Fitted to 5 shapes (bytes found, torch 2.13).
    """
    n, scores = op.num_elements, num_elements(op.shape[:-1]) * op.shape[-2]
    return max(0, 8 * scores - 20 * n) if backward else 4 * n


def _attention_bf16(op: Op, around: Surroundings, backward: bool) -> int:
    """See qsync.backend.kernels.attention_bf16: operands as one matrix per head, some scores at a time.

    torch's own kernel, where that is the faster one, needs less.
    """
    queries, keys = op.shape[-2], around.shapes[1][-2]
    heads = num_elements(op.shape[:-2])
    q, k = heads * queries * around.shapes[0][-1], heads * keys * around.shapes[0][-1]
    v, y = heads * keys * op.shape[-1], op.num_elements
    rows = max(min(queries, _SCORES_AT_A_TIME // max(keys, 1)), 1)
    chunk = min(max(_SCORES_AT_A_TIME // (rows * max(keys, 1)), 1), heads) * rows * keys
    matrices = _BF16 * (q + k + v)
    beside = _BF16 * chunk * (len(around.masks) + (op.dropout > 0))  # the mask, and what dropout keeps
    if not backward:  # scores as two numbers, probabilities, and those of the piece before
        return matrices + _BF16 * y + max(0, 4 * _BF16 * chunk + beside - type_bytes(around.gradient, y))
    sums = (_FP32 - _BF16) * (k + v) if rows < queries else 0  # gradients to which pieces add up
    return max(3 * _FP32 * y, matrices + _BF16 * y + 6 * _BF16 * chunk + beside + sums)


def _attention_int8(op: Op, around: Surroundings, backward: bool) -> int:
    """See qsync.backend.kernels.attention_int8: operands as one matrix per head, scores of some heads at a time."""
    queries, keys = op.shape[-2], around.shapes[1][-2]
    heads = num_elements(op.shape[:-2])
    q, k = heads * queries * around.shapes[0][-1], heads * keys * around.shapes[0][-1]
    v, y = heads * keys * op.shape[-1], op.num_elements
    chunk = min(max(_SCORES_AT_A_TIME // max(queries * keys, 1), 1), heads) * queries * keys
    base = q + k + 2 * _FP32 * heads * max(queries, keys)  # codes, heads in front, and scales
    for mask in around.masks:
        base += heads * queries * keys * mask.width if num_elements(mask.shape[:-2]) > 1 else 0
    if not backward:
        passes = 3 if op.dropout else 2
        base += _BF16 * (v + y)
        return base + max(
            passes * _FP32 * chunk - type_bytes(around.gradient, y), _FP32 * y * (around.gradient == "fp32")
        )
    base += 2 * _BF16 * (q + k + v) + _BF16 * y  # decoded, their gradients, and the result's in 16 bits
    handed_on = sum(
        type_bytes(carried, num_elements(shape))
        for carried, shape, wanted in zip(
            around.carried[:3], around.shapes[:3], around.has_gradient[:3], strict=True
        )
        if wanted
    )
    left = 14 * chunk  # probabilities, their gradient, that of the scores, and it in 16 bits
    again = chunk * (
        (26 if op.dropout else 22) if heads * queries * keys > chunk else 16 if op.dropout else 14
    )
    widened = handed_on if around.carried[0] != "bf16" else 0
    return base + max(again, left + widened) - handed_on
