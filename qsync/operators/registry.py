"""All declared operators, by kind and by the torch calls that they stand for."""

from __future__ import annotations

from qsync.operators import (
    activations,
    arithmetic,
    attention,
    convolution,
    embedding,
    linear,
    losses,
    matmul,
    norms,
    recurrent,
    reductions,
    structure,
    views,
)
from qsync.operators.declaration import Operator, Product
from qsync.operators.precision import Precision

_FAMILIES = (
    linear, convolution, matmul, attention, embedding, recurrent, norms, activations, arithmetic, reductions,
    views, losses, structure,
)  # fmt: skip
BY_KIND: dict[str, Operator] = {
    operator.kind: operator for family in _FAMILIES for operator in family.OPERATORS
}
BY_CALL: dict[str, Operator] = {
    name: operator for operator in BY_KIND.values() for name in (*operator.calls, *operator.fixed_calls)
}
PRODUCTS: dict[str, Product] = {
    kind: operator for kind, operator in BY_KIND.items() if isinstance(operator, Product)
}
# Products of two factors whose axes are declared, by the call of torch.ops.aten: the product, and its axes.
CONTRACTIONS: dict[str, tuple[Product, str]] = {
    call: (product, axes) for product in PRODUCTS.values() for call, axes in product.axes.items()
}
# Precisions with kernels, by kind of adjustable operator.
PRECISIONS_BY_KIND: dict[str, tuple[Precision, ...]] = {
    kind: product.precisions for kind, product in PRODUCTS.items()
}
# Forms of saved tensors, by kind of operator that can save less (`Operator.saves_less`).
FORMS: dict[str, tuple[str, str]] = {
    kind: operator.saves_less for kind, operator in BY_KIND.items() if operator.saves_less
}
# Kinds that a product can compute in its epilogue, and kinds that have their own kernel in lowered graphs.
EPILOGUES = tuple(kind for kind, operator in BY_KIND.items() if operator.is_epilogue)
REPLACED = tuple(kind for kind, operator in BY_KIND.items() if operator.is_replaced)


def declared(kind: str) -> Operator:
    """Return the declaration of a kind; that of any other call for a kind that is not declared.

    >>> declared("conv2d").family
    'convolution'
    """
    return BY_KIND.get(kind, structure.OTHER)


def is_convolution(kind: str) -> bool:
    """Return whether a kind is a convolution."""
    return kind in PRODUCTS and PRODUCTS[kind].is_convolution


def has_module(kind: str) -> bool:
    """Return whether torch has a module class of this kind."""
    return kind in PRODUCTS and PRODUCTS[kind].has_module


def reads_fp32(kind: str) -> bool:
    """Return whether a kind reads FP32 at every precision (an embedding's table)."""
    return kind in PRODUCTS and PRODUCTS[kind].reads_fp32


def operand_type(kind: str, index: int, precision: Precision) -> str:
    """Return the type of the `index`-th input of an operator of this kind at this precision."""
    product = PRODUCTS[kind]
    if product.reads_fp32:
        return "fp32"
    facts = precision.facts
    if not facts.is_coded:
        return facts.operand
    scales = product.encodings[index]
    return "fp32" if scales is None else f"{facts.operand}_{scales}"


def rounded_type(kind: str, index: int, precision: Precision) -> str:
    """Return the type to which an operator of this kind rounds its `index`-th input's values.

    An embedding's table is read in FP32, and the looked-up rows are rounded.
    """
    if not PRODUCTS[kind].reads_fp32:
        return operand_type(kind, index, precision)
    return {Precision.BF16: "bf16", Precision.INT8: "int8_row"}.get(precision, "fp32")


def why_unwritten(kind: str, precision: Precision) -> str:
    """Return why no device has a kernel for a combination missing in `PRECISIONS_BY_KIND`.

    >>> why_unwritten("conv2d", Precision.FP8)
    'not written; torch has no convolution in FP8'
    """
    product = PRODUCTS[kind]
    return product.unwritten_in.get(precision, product.unwritten)
