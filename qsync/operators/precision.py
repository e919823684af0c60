"""Precisions, and the types that tensors have in them: widths, ranges, bytes.

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


FLOATS = (Precision.FP32, Precision.TF32, Precision.BF16, Precision.FP16)

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
