"""Precisions: the number formats of operators, and the types that operands and results have in them.

A *precision* is a plan's choice for an operator (`int8` means INT8 forward and 16-bit backward). A *type* is
a tensor's storage format on an edge of the lowered graph (`fp32`, `bf16`, `int8_row` ...).
"""

from __future__ import annotations

from enum import StrEnum

from qsync.errors import FormatError, shortened


class Precision(StrEnum):
    """A precision that a plan may assign to an adjustable operator, from highest to lowest."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    INT8 = "int8"
    INT8_ALL = "int8_all"

    # Hash of the string that it equals; Enum's own is a slow Python call.
    __hash__ = str.__hash__

    @classmethod
    def parse(cls, text: str) -> Precision:
        """Return the precision called `text`; FormatError lists the known names."""
        try:
            return cls(text)
        except ValueError:
            names = ", ".join(cls)
            raise FormatError(f"unknown precision {shortened(text)}: choose one of {names}") from None


# Rank of each precision, from lowest to highest.
PRECISION_ORDER = {precision: rank for rank, precision in enumerate(reversed(Precision))}

# Explicit mantissa bits of the floating formats. Rounding x to m bits has step 2^(floor(log2|x|) - m).
MANTISSA_BITS = {"fp32": 23, "tf32": 10, "bf16": 7, "fp16": 10, "fp8": 3}

# Largest finite magnitude of each float type: a larger constant would become infinite.
LARGEST = {"fp64": 1.8e308, "fp32": 3.4028234663852886e38, "bf16": 3.3895313892515355e38, "fp16": 65504.0}

# Types that differentiable values may have between operators, widest first.
CARRIED_FLOATS = ("fp64", "fp32", "bf16")

TYPE_BYTES = {
    "fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "int64": 8, "int32": 4, "int16": 2, "uint8": 1, "bool": 1,
    "complex64": 8, "fp8_row": 1, "fp8_col": 1, "int8": 1,
    "int8_row": 1, "int8_col": 1, "int8_inner": 1, "int8_image": 1, "int8_channel": 1,
}  # fmt: skip

# Encodings of each kind of product's operands in 8-bit precisions, in the order of Op.inputs: one scale per
# row of the last dimension, per column (of a weight stored transposed: "col"; of batched matrices: "inner"),
# per image, or per output channel (of a convolution's weight). None: the operand stays in FP32 and is added
# in the epilogue (biases).
ENCODED_OPERANDS: dict[str, tuple[str | None, ...]] = {
    "linear": ("row", "row", None),
    "addmm": (None, "row", "col"),
    "conv2d": ("image", "channel", None),
    "conv1d": ("image", "channel", None),
    "matmul": ("row", "inner"),
    "attention": ("row", "row", "row", None),
    "embedding": (None, None),
}


def _all_but(*lacking: Precision) -> tuple[Precision, ...]:
    return tuple(precision for precision in Precision if precision not in lacking)


# Precisions with kernels, by kind of operator. A device class may have fewer.
PRECISIONS_BY_KIND: dict[str, tuple[Precision, ...]] = {
    "linear": tuple(Precision),
    "addmm": tuple(Precision),
    "conv2d": _all_but(Precision.FP8),
    "conv1d": _all_but(Precision.FP8, Precision.INT8_ALL),
    "matmul": _all_but(Precision.FP8, Precision.INT8_ALL),
    "attention": _all_but(Precision.FP8, Precision.INT8_ALL),
    "embedding": (Precision.FP32, Precision.BF16, Precision.INT8),
    **dict.fromkeys(
        ("conv3d", "conv_transpose", "baddbmm"),
        (Precision.FP32, Precision.TF32, Precision.BF16, Precision.FP16),
    ),
    **dict.fromkeys(("rnn", "einsum", "grouped_mm"), (Precision.FP32, Precision.BF16)),
}

# Kinds of operators that are convolutions.
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose")

# Kinds that read FP32 at every precision and round only the elements they read: an embedding rounds looked-up
# rows, while a cast would round the whole table.
ROUNDS_WHAT_IT_READS = ("embedding",)

_ENCODED_PREFIX = {Precision.FP8: "fp8", Precision.INT8: "int8", Precision.INT8_ALL: "int8"}


def operand_type(kind: str, index: int, precision: Precision) -> str:
    """Return the type of the `index`-th input of an operator of this kind at this precision."""
    if precision in (Precision.FP32, Precision.TF32) or kind in ROUNDS_WHAT_IT_READS:
        return "fp32"  # TF32 rounds inside the product
    if precision in (Precision.BF16, Precision.FP16):
        return str(precision)
    layout = ENCODED_OPERANDS[kind][index]
    return "fp32" if layout is None else f"{_ENCODED_PREFIX[precision]}_{layout}"


def rounded_type(kind: str, index: int, precision: Precision) -> str:
    """Return the type to which an operator of this kind rounds its `index`-th input's values.

    An embedding's table is read in FP32, and the looked-up rows are rounded.
    """
    if kind not in ROUNDS_WHAT_IT_READS:
        return operand_type(kind, index, precision)
    return {Precision.BF16: "bf16", Precision.INT8: "int8_row"}.get(precision, "fp32")


def is_encoded(type_name: str) -> bool:
    """Return whether a type is an encoding: operand data for one product only.

    Gradients do not pass through encodings. FP16 is one: gradients leave an FP16 operator in true scale, so
    its inputs and output have wider types.
    """
    return type_name == "fp16" or type_name.startswith(("int8_", "fp8_"))


def type_bytes(type_name: str, num_elements: int) -> int:
    """Return the bytes of `num_elements` elements of a type, without scales."""
    return TYPE_BYTES.get(type_name, 4) * num_elements


def keeps_weight_casts(device: str) -> bool:
    """Return whether a step's passes share one cast of each weight on a kind of device.

    On a GPU a cast is faster than checking from the host whether the weight has changed.

    >>> keeps_weight_casts("cuda")
    False
    """
    return device != "cuda"
