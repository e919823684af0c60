"""The workspace of each kind of operator: memory in use only while its kernel runs.

Source: the kernels of qsync.backend and of torch, checked against the allocator by
`python -m qsync.experiments.memory.memory_error`. A workspace excludes an operator's inputs, result, saved
tensors, result's gradient, and inputs' gradients in their carried types.
"""

from __future__ import annotations

from qsync.backend.block_sizes import SLOPES_PER_BLOCK
from qsync.lowering.lowered_graph import Run
from qsync.operators.precision import MX_BLOCK, Precision, is_encoded, type_bytes
from qsync.operators.registry import PRODUCTS, declared, is_convolution
from qsync.predictor.memory.expanded_operands import Expanded, expanded
from qsync.predictor.memory.saved_tensors import INT8_MODES
from qsync.predictor.memory.workspaces.attention_workspaces import attention_backward, attention_forward
from qsync.predictor.memory.workspaces.convolution_workspaces import convolution_backward, convolution_forward
from qsync.predictor.memory.workspaces.onednn_scratch import weight_gradient_scratch
from qsync.predictor.memory.workspaces.op_context import OpContext
from qsync.records.graph import Op, num_elements

_FP32, _BF16 = 4, 2
_CONVOLVED = (Precision.FP32, Precision.BF16, *INT8_MODES)
_SAVING_LESS = ("output", "bits", "codes")


def forward_workspace(op: Op, run: Run, context: OpContext) -> int:
    """Return the bytes of workspace that an operator needs in forward."""
    elements = op.num_elements
    if run.form in _SAVING_LESS:
        return _saving_less_forward(op, run)
    if op.kind == "attention":
        return attention_forward(op, run, context)
    if run.mode in INT8_MODES and declared(op.kind).family == "product":
        return 0 if run.output == "fp32" else _FP32 * elements  # sums, which an FP32 result replaces
    if run.mode == Precision.MXFP8:  # both operands decoded, and a result that is not FP32
        decoded = sum(num_elements(context.shapes[factor]) for factor in PRODUCTS[op.kind].factors)
        decoded += sum(each.num_elements for each in _expanded(op, context) if each.is_copied)
        return _FP32 * decoded + (_FP32 - type_bytes(run.output, 1)) * elements
    if is_convolution(op.kind) and context.device == "cpu":
        return convolution_forward(op, run, context)
    if op.kind == "embedding" and run.mode != Precision.FP32:  # the FP32 rows before rounding
        return type_bytes("fp32", elements) + type_bytes("int8", elements) * (run.mode == Precision.INT8)
    if op.kind == "matmul" and len(op.inputs) == 2:
        return _matmul_forward(op, run, context)
    if op.kind == "bilinear" and len(op.inputs) > 2:
        return _between_bilinear(op, run, context) + type_bytes(run.mode, num_elements(context.shapes[2]))
    return 0


def backward_workspace(op: Op, run: Run, context: OpContext) -> int:
    """Return the bytes of workspace that an operator needs in backward."""
    if run.form in _SAVING_LESS:
        return _saving_less_backward(op, run)
    if run.mode in INT8_MODES and declared(op.kind).family == "product":
        return _product_int8(op, run, context)
    if run.mode == Precision.BF16 and declared(op.kind).family == "product":
        return _product_bf16(op, context)
    if run.mode == Precision.MXFP8:
        return _block_scaled(op, context)
    if is_convolution(op.kind) and context.device == "cpu" and run.mode in _CONVOLVED:
        return convolution_backward(op, run, context)
    workspace = sum(_gradient_of(j, taken, context) for j, taken in enumerate(run.operands))
    workspace += _derivative(op, run, context)
    if op.kind == "attention":
        return attention_backward(op, run, context, workspace)
    if op.kind == "matmul" and len(op.inputs) == 2:
        return workspace + _matmul_backward(run, context)
    if op.kind == "bilinear" and len(op.inputs) > 2:
        return _bilinear_backward(op, run, context, workspace)
    if op.kind == "cross_entropy":  # the gradient of the log-probabilities
        return workspace + _FP32 * num_elements(context.shapes[0])
    if op.kind == "embedding" and run.mode != Precision.FP32 and run.output != "fp32":
        workspace += type_bytes("fp32", op.num_elements)  # the gradient of the rows, cast to FP32
    if op.kind in ("batch_norm", "frozen_batch_norm") and context.device == "cpu":  # torch allocates dx twice
        workspace += type_bytes(context.gradient, op.num_elements)
    return workspace


def _derivative(op: Op, run: Run, context: OpContext) -> int:
    """Return the workspace bytes of torch's counted derivative, in this run's type; 0 for products."""
    workspace = op.derivative.workspace_bytes if op.derivative is not None else 0
    if op.kind == "rms_norm":  # CUDA has a kernel; a CPU composes it of FP32 calls, after a cast of the input
        casts = _FP32 * op.num_elements if run.mode != Precision.FP32 else 0
        return workspace + casts if context.device == "cpu" else 0
    return workspace * type_bytes(run.mode, 1) // type_bytes(op.dtype, 1)


def _saving_less_forward(op: Op, run: Run) -> int:
    """Return the forward workspace of an operator that saves less (compressed_saves.saved_ops).

    At its peak the result is allocated already, except with codes of slopes.
    """
    n, width = op.num_elements, type_bytes(run.output, 1)
    packing = 3 * n - n // 8  # the mask, its gathered and shifted copies; saved bits are excluded
    if op.kind in ("gelu", "silu"):
        blocks = 3 * _FP32 * min(n, SLOPES_PER_BLOCK)
        return packing if run.form == "output" else max(0, blocks - width * n)
    if op.kind == "dropout":
        return packing + width * n  # includes the noise
    if run.form == "bits":
        return packing
    if run.form == "codes":  # the FP32 value to encode; from 16 bits also the intermediate before it
        return _FP32 * n + (0 if width == _FP32 else (_FP32 - 1) * n)
    return 0


def _saving_less_backward(op: Op, run: Run) -> int:
    """Return the backward workspace of an operator that saves less (compressed_saves.saved_ops)."""
    n, width = op.num_elements, type_bytes(run.output, 1)
    if op.kind in ("gelu", "silu"):
        blocks = 3 * _FP32 * min(n, SLOPES_PER_BLOCK)
        if run.form == "codes":
            return blocks // 3 * (1 if width == _FP32 else 2)
        return (2 * _FP32 - width) * n + blocks  # unpacked bits, and the slope, which becomes the gradient
    if run.form == "bits":
        return n if op.kind == "dropout" else width * n
    if op.kind in ("batch_norm", "frozen_batch_norm"):  # torch allocates dx twice
        return (_FP32 + width) * n
    return _FP32 * n if width == _FP32 or op.kind != "layer_norm" else (_FP32 + _BF16) * n


def _gradient_of(j: int, taken: str, context: OpContext) -> int:
    """Return the bytes of an operand's gradient before its cast or its copy to a bucket; else 0."""
    elements, num_bytes = num_elements(context.shapes[j]), 0
    if context.has_gradient[j]:
        if taken != context.carried[j] and not is_encoded(taken):
            num_bytes += type_bytes(taken, elements)  # before its cast
        if context.is_parameter[j] and context.in_buckets:
            num_bytes += _FP32 * elements  # before its copy into the bucket
    return num_bytes


def _product_bf16(op: Op, context: OpContext) -> int:
    """Return the backward workspace of torch's y = x W' of BF16 tensors on a CPU."""
    x, w = PRODUCTS[op.kind].factors
    inner, weight = num_elements(context.shapes[x]), num_elements(context.shapes[w])
    made = _BF16 * inner if context.has_gradient[x] else 0
    passed_on = type_bytes(context.carried[x], inner) if made else 0
    if not context.has_gradient[w]:
        return 0  # only the input's gradient, whose carried type is at least as wide
    bucket = _FP32 * weight if context.in_buckets else 0
    after = passed_on if context.carried[x] != "bf16" else 0  # cast to the operand's carried type
    return made - passed_on + max(_BF16 * weight + max(_scratch(op, context), bucket), after)


def _product_int8(op: Op, run: Run, context: OpContext) -> int:
    """Return the backward workspace of y = x W' on INT8 codes (qsync.backend.kernels.linear)."""
    x, w = PRODUCTS[op.kind].factors
    elements, inner, weight = (
        op.num_elements,
        num_elements(context.shapes[x]),
        num_elements(context.shapes[w]),
    )
    bucket = _FP32 * weight if context.in_buckets else 0
    passed_on = type_bytes(context.carried[x], inner) if context.has_gradient[x] else 0
    if run.mode == Precision.INT8_ALL:
        # Codes of the gradient, by rows and then by columns; sums, which FP32 results overwrite.
        sums = (_FP32 if context.carried[x] == "fp32" else _FP32 + _BF16) * inner if passed_on else 0
        rows, outputs = elements // max(op.shape[-1], 1), op.shape[-1]
        scales = _FP32 * (2 * (rows + outputs) + inner // max(rows, 1))  # includes the seeds of rounding
        return scales + max(elements + sums - passed_on, 2 * elements, elements + bucket)
    gradient_16bit = _BF16 * elements if context.gradient == "fp32" else 0
    made = _BF16 * inner if passed_on else 0
    cast_dx = passed_on if context.carried[x] != "bf16" else 0
    first = made + _BF16 * inner + _BF16 * weight + _scratch(op, context)  # both products, decoded input
    then = made + cast_dx + _BF16 * weight  # dx is cast to the input's type
    last = passed_on + _BF16 * weight + bucket
    return gradient_16bit + max(first, then, last) - passed_on


def _block_scaled(op: Op, context: OpContext) -> int:
    """Return the backward workspace of an emulated product in MXFP8 (reference_kernels.block_scaled).

    Each gradient multiplies two FP32 matrices: the rounded gradient, and an operand, which is decoded,
    encoded along its other dimension, and decoded again.
    """
    gradient = _FP32 * op.num_elements * (1 if context.gradient == "fp32" else 2)
    batched = _expanded(op, context)
    whole = {each.operand: each.num_elements for each in batched}
    copied = {each.operand: each.num_elements for each in batched if each.is_copied}
    counted, passed_on, peaks = 0, 0, [0]
    for own, other in (PRODUCTS[op.kind].factors, PRODUCTS[op.kind].factors[::-1]):
        if not context.has_gradient[own]:
            continue
        made, read = (num_elements(context.shapes[j]) for j in (own, other))
        again = (2 * _FP32 + 1) * read + (_FP32 + 1) * read // MX_BLOCK  # with the scales
        summed = _FP32 * whole.get(own, 0)  # before its reduction to the operand's shape
        product = _FP32 * (read + copied.get(other, 0)) + (summed or _FP32 * made)
        peaks.append(passed_on + gradient + max(again, product))
        carried = type_bytes(context.carried[own], made)
        peaks.append(passed_on + summed + _FP32 * made + carried * (context.carried[own] != "fp32"))
        passed_on += carried
        counted += 0 if context.is_parameter[own] and context.in_buckets else carried
    return max(peaks) - counted


def _expanded(op: Op, context: OpContext) -> tuple[Expanded, ...]:
    """Return the operands that a product of two values expands; none of a layer's."""
    return expanded(*context.shapes) if len(op.inputs) == 2 else ()


def _matmul_forward(op: Op, run: Run, context: OpContext) -> int:
    """Return the bytes of expanded operands that are not saved; in INT8 of expanded codes and scales."""
    num_bytes = 0
    for each in expanded(*context.shapes):
        if each.is_copied and run.mode in INT8_MODES:
            num_bytes += each.num_elements + _FP32 * each.num_elements // max(context.shapes[0][-1], 1)
        elif each.is_copied and not (op.requires_grad and context.has_gradient[1 - each.operand]):
            num_bytes += type_bytes(run.mode, each.num_elements)
    return num_bytes


def _matmul_backward(run: Run, context: OpContext) -> int:
    """Return the bytes of expanded gradients before their reduction to the operands' shapes.

    INT8 computes one gradient at a time, from the other operand (decoded and expanded), and sums it in FP32.
    """
    found = {each.operand: each for each in expanded(*context.shapes)}
    elements = [found[j].num_elements if j in found and context.has_gradient[j] else 0 for j in (0, 1)]
    if run.mode not in INT8_MODES:
        return sum(type_bytes(run.mode, count) for count in elements)
    copied = [found[j].num_elements if j in found and found[j].is_copied else 0 for j in (0, 1)]
    made = [_BF16 * (elements[j] + copied[1 - j]) if context.has_gradient[j] else 0 for j in (0, 1)]
    return max(*made, *((_BF16 + _FP32) * count for count in elements))


def _between_bilinear(op: Op, run: Run, context: OpContext) -> int:
    """Return the bytes of the product of x with all matrices of a bilinear layer, or of its gradient."""
    return type_bytes(run.mode, op.num_elements * context.shapes[1][-1])


def _bilinear_backward(op: Op, run: Run, context: OpContext, casts: int) -> int:
    """Return a bilinear layer's backward workspace; `casts` are the bytes of gradients before their cast."""
    weight = num_elements(context.shapes[2])
    made, between = type_bytes(run.mode, weight), _between_bilinear(op, run, context)
    if not context.has_gradient[2]:
        return casts + between + made  # the matrices beside each other
    passed_on = 0 if context.in_buckets else type_bytes(context.carried[2], weight)
    return max(casts, between + 2 * made - passed_on)  # the matrices' gradient is put in order


def _scratch(op: Op, context: OpContext) -> int:
    """Return oneDNN's scratch bytes for a weight's gradient in BF16 on one thread; 0 on a GPU."""
    if context.device != "cpu":
        return 0
    outputs, inner = op.shape[-1], context.shapes[PRODUCTS[op.kind].factors[0]][-1]
    return weight_gradient_scratch(op.num_elements // max(outputs, 1), outputs, inner)
