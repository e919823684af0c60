"""Precisions, and the types that tensors have in them: widths, ranges, bytes.

A *precision* is a plan's choice for an operator (`int8` means INT8 forward and 16-bit backward). A *type* is
a tensor's storage format on an edge of the lowered graph (`fp32`, `bf16`, `int8_row` ...). Everything that is
known of a precision beside its kernels is declared here, once (`FACTS`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from qsync.errors import FormatError, shortened


class Precision(StrEnum):
    """A precision that a plan may assign to an adjustable operator, from highest to lowest."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    MXFP8 = "mxfp8"
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

    @property
    def facts(self) -> Facts:
        """Return the declaration of this precision."""
        return FACTS[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The declaration of a precision: all that qsync knows of it beside its kernels.

    `operand` is the type of its operands, or the form of their 8-bit codes, to which an operator adds where
    the scales are ("int8" becomes "int8_row"). `bits` are the operands' explicit mantissa bits; for integers
    those of equal rounding error on rows of Gaussian values. `gradient` is the type to which backward rounds
    the gradient of the result before it is multiplied.

    `products` are the types that the hardware multiplies forward and backward (`DEVICE_16BIT`: the device's
    16-bit float). `capability` is the least compute capability of NVIDIA's tensor cores for them;
    `not_on_cpu` says why CPUs do not have the precision. `falls_back` lists the higher precisions that
    replace it, in order of preference, below FP32. `priced_like`: the precision whose learned law prices it
    if it has no samples. `block`: elements of the summed dimension that share one scale of one byte;
    None: all of them share an FP32 scale.
    """

    operand: str
    bits: int
    gradient: str
    products: tuple[str, str]
    colour: str  # of figures
    capability: tuple[int, int] = (0, 0)
    not_on_cpu: str | None = None
    emulated_on: tuple[str, ...] = ()  # devices where kernels compute it in a wider type, far slower
    on_request: bool = False  # profiled only if it is named
    falls_back: tuple[str, ...] = ()
    priced_like: str | None = None
    block: int | None = None
    layouts: tuple[str, ...] = ("row", "col", "inner", "image", "channel")

    @property
    def is_coded(self) -> bool:
        """Return whether operands are 8-bit codes with scales."""
        return self.operand not in LARGEST


DEVICE_16BIT = "16-bit"  # the 16-bit float of a device, in declarations
MX_BLOCK = 32  # elements that share a scale in the OCP Microscaling Formats (MX) 1.0
STOCHASTIC = "int8_stochastic"  # type of gradients rounded to INT8 stochastically, once for each product

# Largest finite magnitude of each float type: a larger constant would become infinite.
LARGEST = {"fp64": 1.8e308, "fp32": 3.4028234663852886e38, "bf16": 3.3895313892515355e38, "fp16": 65504.0}

# Tensor cores multiply TF32 and BF16 since Ampere, INT8 since Turing (Volta's four-byte dot products are no
# faster than its FP16), FP8 since Ada, FP8 with a scale per block since Blackwell.
# Colours are Okabe and Ito's (their yellow darker); FP32 is grey, so that lowered operators stand out.
FACTS: dict[Precision, Facts] = {
    Precision.FP32: Facts(
        operand="fp32", bits=23, gradient="fp32", products=("fp32", "fp32"), colour="#d5dae0"
    ),
    Precision.TF32: Facts(
        operand="fp32",  # rounded inside the product
        bits=10, gradient="tf32", products=("tf32", "tf32"), colour="#56b4e9", capability=(8, 0),
        not_on_cpu="TF32 needs NVIDIA tensor cores", priced_like="fp32",
    ),
    Precision.BF16: Facts(
        operand="bf16", bits=7, gradient="bf16", products=("bf16", "bf16"), colour="#0072b2",
        capability=(8, 0),
    ),
    Precision.FP16: Facts(
        operand="fp16", bits=10, gradient="fp16", products=("fp16", "fp16"), colour="#009e73",
        emulated_on=("cpu",), priced_like="bf16",
    ),
    Precision.MXFP8: Facts(
        operand="mxfp8", bits=3, gradient="mxfp8_row", products=("fp8", "fp8"), colour="#b8a900",
        capability=(10, 0), emulated_on=("cpu", "cuda"), on_request=True, falls_back=(DEVICE_16BIT,),
        priced_like="int8", block=MX_BLOCK, layouts=("row", "col", "inner"),
    ),
    Precision.FP8: Facts(
        operand="fp8", bits=3, gradient="e5m2", products=("fp8", "fp8"), colour="#cc79a7", capability=(8, 9),
        not_on_cpu="no CPU multiplies FP8", falls_back=(DEVICE_16BIT,), priced_like="int8",
    ),
    Precision.INT8: Facts(
        operand="int8", bits=6, gradient="bf16", products=("int8", DEVICE_16BIT), colour="#e69f00",
        capability=(7, 5), falls_back=(DEVICE_16BIT,),
    ),
    Precision.INT8_ALL: Facts(
        operand="int8", bits=6, gradient=STOCHASTIC, products=("int8", "int8"), colour="#d55e00",
        capability=(7, 5), on_request=True, falls_back=("int8", DEVICE_16BIT), priced_like="int8",
    ),
}  # fmt: skip

FLOATS = tuple(precision for precision in Precision if not precision.facts.is_coded)
EIGHT_BIT = tuple(precision for precision in Precision if precision.facts.is_coded)

# Rank of each precision, from lowest to highest.
PRECISION_ORDER = {precision: rank for rank, precision in enumerate(reversed(Precision))}

# Explicit mantissa bits of float types. Rounding x to m bits has step 2^(floor(log2|x|) - m).
MANTISSA_BITS = {"e5m2": 2, **{str(precision): precision.facts.bits for precision in FLOATS}}

# Types that differentiable values may have between operators, widest first.
CARRIED_FLOATS = ("fp64", "fp32", "bf16")

# Types of 8-bit codes: their form, and what their scales are of: rows of the last dimension, columns (of a
# weight stored transposed: "col"; of batched matrices: "inner"), images, or output channels.
_CODES = {
    f"{facts.operand}_{layout}": facts
    for facts in FACTS.values()
    for layout in facts.layouts
    if facts.is_coded
}

TYPE_BYTES = {
    "fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "int64": 8, "int32": 4, "int16": 2, "uint8": 1, "bool": 1,
    "complex64": 8, "int8": 1, **dict.fromkeys(_CODES, 1),
}  # fmt: skip


def code_types() -> tuple[str, ...]:
    """Return the types of 8-bit codes."""
    return tuple(_CODES)


def block_of(type_name: str) -> int | None:
    """Return how many elements share a scale in a type of 8-bit codes; None: all that are summed."""
    return _CODES[type_name].block


def is_encoded(type_name: str) -> bool:
    """Return whether a type is an encoding: operand data for one product only.

    Gradients do not pass through encodings. FP16 is one: gradients leave an FP16 operator in true scale, so
    its inputs and output have wider types.
    """
    return type_name == "fp16" or type_name in _CODES


def type_bytes(type_name: str, num_elements: int) -> int:
    """Return the bytes of `num_elements` elements of a type, without scales."""
    return TYPE_BYTES.get(type_name, 4) * num_elements


def scale_bytes(type_name: str, shape: Sequence[int]) -> int:
    """Return the bytes of the scales of a tensor of this type and shape; 0 if it has none.

    >>> scale_bytes("int8_row", (8, 128))
    32
    """
    layout = type_name.partition("_")[2]
    if type_name not in _CODES or not shape:
        return 0
    scaled = {
        "row": shape[:-1],
        "col": shape[-1:],
        "inner": (*shape[:-2], *shape[-1:]) if len(shape) > 1 else (),
        "image": shape[:1],
        "channel": shape[:1],
    }
    rows, block = math.prod(scaled[layout]), _CODES[type_name].block
    if block is None or not rows:
        return 4 * rows
    return rows * math.ceil(math.prod(shape) / rows / block)


def keeps_weight_casts(device: str) -> bool:
    """Return whether a step's passes share one cast of each weight on a kind of device.

    On a GPU a cast is faster than checking from the host whether the weight has changed.

    >>> keeps_weight_casts("cuda")
    False
    """
    return device != "cuda"
