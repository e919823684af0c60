"""The tensors that operators save for backward.

Tracing counted the tensors that torch's derivatives save. For products, norms and dropout, rules follow their
kernels. Source: torch's kernels and those of qsync.backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qsync.backend.kernels.attention.attention_strategy import saves_weights, torch_fuses
from qsync.lowering.lowered_graph import FUSED
from qsync.operators.precision import EIGHT_BIT, LARGEST, Precision, type_bytes
from qsync.operators.registry import EPILOGUES, PRODUCTS, declared
from qsync.predictor.memory.expanded_operands import expanded
from qsync.predictor.memory.layout import Layout
from qsync.records.graph import Derivative, Op, num_elements

# Modes in which torch's own linear kernel runs, on values in their given memory order.
PLAIN = ("fp32", "bf16")
INT8_MODES = (Precision.INT8, Precision.INT8_ALL)
FP32_BYTES = 4
_LSTM_GATES = 4
# Forms in which operators save the same tensors as in separate kernels: a product its operands, gelu its
# input, relu its result.
SAVES_AS_TORCH = ("plain", FUSED, *EPILOGUES)


@dataclass(frozen=True, slots=True)
class Saved:
    """The tensors saved by an operator: inputs (by index), its result, kept values (by name)."""

    inputs: tuple[int, ...] = ()
    output: bool = False
    indices: tuple[str, ...] = ()


def saved_by_op(op: Op, at: Layout, form: str = "plain", mode: str = "fp32", device: str = "cpu") -> Saved:
    """Return the tensors that an operator saves for backward in a form and mode of lowering.

    >>> saved_by_op(graph.ops[0], layout(graph))
    Saved(inputs=(0, 1), output=False, indices=())
    """
    if not op.requires_grad:
        return Saved()
    if form not in SAVES_AS_TORCH:
        return Saved(output=form == "output")
    everything = tuple(range(len(op.inputs)))
    if op.derivative is not None and not declared(op.kind).saves_statistics:
        return _as_counted(op, op.derivative)
    product = PRODUCTS.get(op.kind)
    if product is not None and product.saves_factors and len(op.inputs) > max(product.factors):
        pair = product.factors
        # torch's convolutions always save both factors.
        if product.saves_both and mode not in INT8_MODES:
            return Saved(pair)
        if op.kind == "linear" and op.copies and mode in PLAIN:  # the copy counts in `made_for_backward`
            return Saved((1,) if at.has_gradient[op.inputs[0]] else ())
        copied = dict(copied_operands(op, at, mode))  # counted in `made_for_backward`
        saved = (a for a, b in (pair, pair[::-1]) if at.has_gradient[op.inputs[b]])
        return Saved(tuple(a for a in saved if a not in copied))
    if op.kind == "attention" and writes_scores(op, at, mode, device):
        return Saved((2,) if op.copies is False else ())
    if op.kind == "attention" and saves_weights_of(op, at, mode, device):
        return Saved((0, 1, 2))
    if op.kind == "attention":  # it saves a numeric copy of a Boolean mask, except in INT8
        bools = tuple(value for value in (*op.inputs, *op.kept) if at.dtype[value] == "bool")
        floats = tuple(j for j in everything if at.dtype[op.inputs[j]] in LARGEST)
        return Saved(floats, indices=bools) if mode == "int8" else Saved(floats, output=True)
    if op.kind == "rnn":
        return Saved(everything, output=True)
    if op.kind == "embedding":
        return Saved(indices=tuple(v for v in (*op.inputs, *op.kept) if at.dtype[v] not in LARGEST))
    if declared(op.kind).saves_nothing or (op.kind == "rms_norm" and (device, mode) == ("cpu", "bf16")):
        return Saved()
    if product is not None and not product.saves_factors and product.saved is not None:
        return Saved(tuple(j for j in product.saved if j in everything))
    return Saved(everything)  # an overestimate for unknown kinds


def _as_counted(op: Op, derivative: Derivative) -> Saved:
    """Return what torch's derivative saves: operands, result and kept values, as traced."""
    first_kept = len(op.inputs)
    operands = tuple(k for k in derivative.saved if k < first_kept)
    kept = tuple(v for k, v in enumerate(op.kept, first_kept) if k in derivative.saved)
    return Saved(operands, derivative.saves_result, kept)


def made_for_backward(op: Op, at: Layout, form: str, mode: str, device: str) -> Iterator[int]:
    """Yield the bytes of each further tensor saved for backward: masks, indices, statistics."""
    if form not in SAVES_AS_TORCH:
        yield from _made_saving_less(op, form)
    elif op.derivative is not None and not declared(op.kind).saves_statistics:
        for dtype, elements in op.derivative.besides:
            yield type_bytes(mode if dtype == op.dtype else dtype, elements)
    elif op.kind == "dropout":
        # The CPU multiplies by a mask in the type of the input; CUDA's fused kernel saves one byte per
        # element.
        yield op.num_elements if device == "cuda" else type_bytes(mode, op.num_elements)
    elif op.kind == "linear" and op.copies and mode in PLAIN and at.has_gradient[op.inputs[1]]:
        yield type_bytes(mode, num_elements(at.shape[op.inputs[0]]))
    elif op.kind == "matmul":
        for _, elements in copied_operands(op, at, mode):
            yield type_bytes(mode, elements)
    elif op.kind == "attention" and saves_weights_of(op, at, mode, device):
        yield type_bytes("bf16", num_elements(scores_shape(op, at)))
    elif op.kind == "attention" and mode == "int8":  # backward recomputes everything else
        yield num_elements(scores_shape(op, at)) if op.dropout else 0
    elif op.kind == "attention" and writes_scores(op, at, mode, device):
        # Probabilities (with dropout also its mask and the probabilities after it), scaled q and k, and a
        # copy of v with the heads in front, unless v has that order. Each query group (GQA) has its own.
        scores, width = scores_shape(op, at), at.shape[op.inputs[0]][-1]
        yield (3 if op.dropout else 1) * FP32_BYTES * num_elements(scores)
        rows = num_elements(scores[:-1]) * width, num_elements((*scores[:-2], scores[-1])) * width
        yield FP32_BYTES * (rows[0] + rows[1])
        yield 0 if op.copies is False else FP32_BYTES * rows[1] * op.shape[-1] // width
    elif op.kind == "attention":
        yield FP32_BYTES * num_elements(op.shape[:-1])  # log of the sum of exponentials, per row
        yield num_elements(scores_shape(op, at)) if op.dropout and device == "cpu" else 0
        masks = [value for value in (*op.inputs[3:], *op.kept) if at.dtype[value] == "bool"]
        yield sum(type_bytes(mode, num_elements(at.shape[value])) for value in masks)
    elif op.kind == "rnn":
        yield from _recurrent(mode, [at.shape[value] for value in op.inputs], device)
    elif op.kind == "rms_norm":
        yield FP32_BYTES * _rows(op)  # deviation
        if device == "cpu":  # composed of FP32 calls, which save the normalized values and the cast input
            yield FP32_BYTES * op.num_elements * (bool(op.kept) + (mode != "fp32"))
    elif declared(op.kind).saves_statistics:
        yield 2 * FP32_BYTES * _rows(op)  # mean and deviation


def copied_operands(op: Op, at: Layout, mode: str) -> Iterator[tuple[int, int]]:
    """Yield (operand index, elements) of each operand of which a product saves an expanded copy.

    Codes are saved as they are.
    """
    if op.kind == "matmul" and len(op.inputs) == 2 and mode not in EIGHT_BIT:
        for each in expanded(*(at.shape[value] for value in op.inputs)):
            if each.is_copied and at.has_gradient[op.inputs[1 - each.operand]]:
                yield each.operand, each.num_elements


def _recurrent(mode: str, shapes: list[tuple[int, ...]], device: str) -> Iterator[int]:
    """Yield the bytes that the layers of a recurrent network save for backward.

    Each layer but the last passes its result to the next. The workspace of oneDNN's LSTM holds the gates,
    states and state gradients of all steps (the bytes were measured with torch 2.13). Other kernels save the
    gates, the states, and the factors of products of each step.
    """
    tokens, rows = num_elements(shapes[0][:-1]), shapes[1][1]
    weights = [shape for shape in shapes if len(shape) == 2]
    last = None
    for own, state in zip(weights[::2], weights[1::2], strict=False):
        hidden = state[1]
        gates = own[0] // hidden
        if device == "cpu" and gates == _LSTM_GATES:
            per_hidden, per_width = (22, 20) if mode == "bf16" else (36, 24)
            yield (per_hidden * hidden + per_width * max(own[1], hidden)) * (tokens + rows)
        elif device == "cpu" and gates == 1:  # its states; in BF16 also a cast of the previous layer's states
            yield type_bytes(mode, hidden * tokens)
            if mode == "bf16" and last is not None:
                yield type_bytes(mode, hidden * (tokens + 2 * rows))
        else:
            yield type_bytes(mode, (2 * gates + 2) * hidden * tokens)
        if last is not None:
            yield type_bytes(mode, last * tokens)
        last = hidden


def writes_scores(op: Op, at: Layout, mode: str, device: str) -> bool:
    """Return whether attention runs torch's plain kernel, which stores all scores in FP32.

    torch's fused CPU kernel supports no broadcast heads, and no operands that `torch_fuses` rejects. qsync's
    BF16 and INT8 kernels support all of these.
    """
    if device != "cpu" or mode in ("int8", "bf16"):
        return False
    masks = ((len(at.shape[mask]), at.has_gradient[mask]) for mask in (*op.inputs[3:], *op.kept))
    return op.copies is True or not torch_fuses(at.shape[op.inputs[0]], op.shape[-1], op.dropout, masks)


def saves_weights_of(op: Op, at: Layout, mode: str, device: str) -> bool:
    """Return whether attention runs qsync's kernel for few keys, which saves its weights in BF16."""
    keys = at.shape[op.inputs[1]][-2]
    return device == "cpu" and mode in ("int8", "bf16") and saves_weights(keys, op.dropout)


def scores_shape(op: Op, at: Layout) -> tuple[int, ...]:
    """Return the shape of attention's scores: (..., heads, queries, keys)."""
    return (*op.shape[:-1], at.shape[op.inputs[1]][-2])


def _made_saving_less(op: Op, form: str) -> Iterator[int]:
    """Yield the bytes that an operator saves in a form that saves less (compressed_saves.saved_ops)."""
    elements = op.num_elements
    if form == "bits" or (form == "output" and op.kind == "gelu"):
        yield (elements + 7) // 8
    if form == "codes":
        yield elements
    if declared(op.kind).saves_statistics:
        yield FP32_BYTES * _rows(op)  # deviation
    if form == "codes" and op.kind not in ("gelu", "silu"):
        yield FP32_BYTES * (op.shape[0] if op.kind == "batch_norm" else num_elements(op.shape[:-1]))  # scales


def _rows(op: Op) -> int:
    """Return the number of a norm's means (and deviations); for group norms an upper bound."""
    if op.kind == "group_norm":
        return num_elements(op.shape[:2])
    return op.shape[1] if op.kind == "batch_norm" and len(op.shape) > 1 else num_elements(op.shape[:-1])
