"""The workspace of attention: of qsync's kernels on a CPU, and of torch's plain kernel in FP32.

A workspace is defined as in op_workspaces.
"""

from __future__ import annotations

from qsync.backend.block_sizes import SCORES_PER_BLOCK, scores_per_block
from qsync.backend.kernels.attention.attention_strategy import saves_weights
from qsync.lowering.lowered_graph import Run
from qsync.operators.precision import Precision, type_bytes
from qsync.predictor.memory.workspaces.op_context import OpContext
from qsync.records.graph import Op, num_elements

_FP32, _BF16 = 4, 2


def attention_forward(op: Op, run: Run, context: OpContext) -> int:
    """Return the bytes of workspace that attention needs in forward."""
    if _has_few_keys(op, run, context):
        return _short_forward(op, context)
    if run.mode == Precision.INT8:
        return _int8(op, context, backward=False)
    if run.mode == Precision.BF16 and context.device == "cpu":
        return _bf16(op, context, backward=False)
    return _plain(op, context, backward=False) if context.writes_scores else 0


def attention_backward(op: Op, run: Run, context: OpContext, made: int) -> int:
    """Return the bytes of workspace that attention needs in backward.

    `made` are the bytes of gradients before their cast to the operands' types.
    """
    if _has_few_keys(op, run, context):
        return _short_backward(op, context)
    if run.mode == Precision.INT8:
        return _int8(op, context, backward=True)
    if run.mode == Precision.BF16 and context.device == "cpu":
        return made + _bf16(op, context, backward=True)
    return made + (_plain(op, context, backward=True) if context.writes_scores else 0)


def _plain(op: Op, context: OpContext, backward: bool) -> int:
    """Return the workspace of torch's plain FP32 attention, which frees saved tensors in backward.

    Without dropout, two score matrices are alive at the peak. In forward, one of them is the saved weights.
    In backward, the copy of v and the result's gradient are freed by then, dQ and dK not yet allocated. With
    dropout, the weights after dropout are freed as well. Exact for 14 of 16 shapes with 1 to 24 scores per
    element of q, up to 4 % of the peak too much for the others (measured with torch 2.13).
    """
    _, _, v, scores = _elements(op, context)
    gone = op.num_elements + (0 if op.copies is False else v)
    if op.dropout:
        masks = sum(num_elements(mask.shape) for mask in context.masks)
        return _FP32 * (max(0, scores - gone) if backward else op.num_elements + masks)
    own = num_elements(context.shapes[0]) + num_elements(context.shapes[1])
    return _FP32 * max(0, 2 * scores - gone - own) if backward else _FP32 * scores


def _has_few_keys(op: Op, run: Run, context: OpContext) -> bool:
    lowered = run.mode in (Precision.INT8, Precision.BF16) and context.device == "cpu"
    return lowered and saves_weights(context.shapes[1][-2], op.dropout)


def _short_forward(op: Op, context: OpContext) -> int:
    """Return the forward workspace of the kernel `attention_short`, without its saved weights."""
    q, k, v, scores = _elements(op, context)
    y, result = op.num_elements, type_bytes(context.gradient, op.num_elements)
    weights = _BF16 * scores
    operands = max(2 * q, q + 2 * k)  # a second copy of one operand at a time
    before = _FP32 * max(operands, 2 * q + k + scores) - weights
    cast = _FP32 * y * (context.gradient == "fp32")
    return max(before - result, 2 * _FP32 * scores - result, _BF16 * (v + y) - result, _BF16 * y + cast)


def _short_backward(op: Op, context: OpContext) -> int:
    """Return the backward workspace of the kernel `attention_short`."""
    q, k, v, scores = _elements(op, context)
    made = _BF16 * (q + k + v)
    base = made + _BF16 * op.num_elements
    return base + max(2 * _BF16 * scores, _BF16 * scores + made) - _passed_on(context)


def _bf16(op: Op, context: OpContext, backward: bool) -> int:
    """Return the workspace of the kernel `attention_bf16`: a matrix per head, scores in chunks.

    If torch's own kernel is faster and runs instead, it needs less.
    """
    queries, keys, heads = op.shape[-2], context.shapes[1][-2], num_elements(op.shape[:-2])
    q, k, v, _ = _elements(op, context)
    y = op.num_elements
    rows = max(min(queries, SCORES_PER_BLOCK // max(keys, 1)), 1)
    chunk = min(max(SCORES_PER_BLOCK // (rows * max(keys, 1)), 1), heads) * rows * keys
    matrices = _BF16 * (q + k + v)
    masks_bytes = _BF16 * chunk * (len(context.masks) + (op.dropout > 0))  # attention's masks, and dropout's
    if not backward:  # scores in two numbers, probabilities, and the previous chunk's probabilities
        return (
            matrices + _BF16 * y + max(0, 4 * _BF16 * chunk + masks_bytes - type_bytes(context.gradient, y))
        )
    sums = (_FP32 - _BF16) * (k + v) if rows < queries else 0  # FP32 sums of chunks' gradients
    return max(3 * _FP32 * y, matrices + _BF16 * y + 6 * _BF16 * chunk + masks_bytes + sums)


def _int8(op: Op, context: OpContext, backward: bool) -> int:
    """Return the workspace of the kernel `attention_int8`: a matrix per head, scores in chunks."""
    queries, keys, heads = op.shape[-2], context.shapes[1][-2], num_elements(op.shape[:-2])
    q, k, v, scores = _elements(op, context)
    y = op.num_elements
    most = scores_per_block(context.device)
    chunk = min(max(most // max(queries * keys, 1), 1), heads) * queries * keys
    base = q + k + 2 * _FP32 * heads * max(queries, keys)  # codes with heads in front, and scales
    for mask in context.masks:
        base += scores * mask.width if num_elements(mask.shape[:-2]) > 1 else 0
    if not backward:
        passes = 3 if op.dropout else 2
        base += _BF16 * (v + y)
        return base + max(
            passes * _FP32 * chunk - type_bytes(context.gradient, y), _FP32 * y * (context.gradient == "fp32")
        )
    base += 2 * _BF16 * (q + k + v) + _BF16 * y  # decoded q, k, v, their gradients, and the result's gradient
    passed_on = _passed_on(context)
    left = 14 * chunk  # probabilities and their gradients, scores' gradients in FP32 and in 16 bits
    again = chunk * ((26 if op.dropout else 22) if scores > chunk else 16 if op.dropout else 14)
    cast_dx = passed_on if context.carried[0] != "bf16" else 0
    return base + max(again, left + cast_dx) - passed_on


def _elements(op: Op, context: OpContext) -> tuple[int, int, int, int]:
    """Return the numbers of elements of attention's q, k, v (one matrix per head) and scores."""
    queries, keys, heads = op.shape[-2], context.shapes[1][-2], num_elements(op.shape[:-2])
    width = context.shapes[0][-1]
    return heads * queries * width, heads * keys * width, heads * keys * op.shape[-1], heads * queries * keys


def _passed_on(context: OpContext) -> int:
    """Return the bytes of the gradients of q, k and v, in the carried types of these operands."""
    found = zip(context.carried[:3], context.shapes[:3], context.has_gradient[:3], strict=True)
    return sum(type_bytes(carried, num_elements(shape)) for carried, shape, has_dx in found if has_dx)
