"""Check low-precision convolutions once per shape on processors with AMX, where oneDNN has bugs.

With AMX oneDNN leaves parts of some results and gradients unwritten: for strided convolutions with a result
one pixel wide, and for patches (stride equal to the filter). torch's own BF16 is wrong there, too (torch
2.13; without AMX all are right). No list of shapes would be complete, so the first call of each shape is
compared, on random numbers, with torch's FP32 kernel without oneDNN.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qsync.backend.devices.amx import has_amx
from qsync.backend.devices.kernel_timing import apart
from qsync.backend.encoding import Operand, encode
from qsync.errors import MiscomputedError
from qsync.operators.precision import Precision
from qsync.operators.registry import is_convolution

Kernel = Callable[..., Tensor]

# Largest allowed error, relative to the largest element. Rounding to 8 bits gives at most a tenth; unwritten
# elements are far off.
_MOST_ERROR = 0.2
# Number of random trials: unwritten memory may hold the last trial's correct values.
_NUM_DRAWS = 3
_MOST_IMAGES = 4


def is_checked(kind: str, precision: Precision, device: torch.device) -> bool:
    """Return whether kernels of this kind must be checked on this machine."""
    rounds_operands = precision not in (Precision.FP32, Precision.TF32)
    return is_convolution(kind) and rounds_operands and has_amx(device)


def checked(kernel: Kernel) -> Kernel:
    """Return the kernel wrapped to raise MiscomputedError for shapes that it computes wrongly here.

    >>> checked(conv2d_bf16)(torch.conv2d, "fp32", x.bfloat16(), weight.bfloat16(), stride=2)
    """
    are_right: dict[Hashable, bool] = {}

    def run(target: Kernel, out_type: str, *args: Any, **kwargs: Any) -> Tensor:
        few = (_few(args[0], args[1]), *args[1:]) if len(args) > 1 else args
        form = (torch.get_num_threads(), *map(_form, few), *((n, _form(v)) for n, v in kwargs.items()))
        if form not in are_right:
            call = partial(_is_right, kernel, target, few, kwargs)
            with torch.random.fork_rng(devices=[]):  # kernels may round at random
                are_right[form] = all(apart(partial(call, seed)) for seed in range(_NUM_DRAWS))
        if not are_right[form]:
            raise MiscomputedError(
                "oneDNN computes this convolution wrongly at these shapes on this processor: keep it in FP32"
            )
        return kernel(target, out_type, *args, **kwargs)

    return run


@contextmanager
def without_onednn() -> Iterator[None]:
    """Make torch use its own kernels; torch.backends.mkldnn.flags would also warn."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _few(images: Any, weight: Any) -> Any:
    """Return a few images of a batch, enough for a check."""
    if isinstance(images, Operand):
        return Operand(_few(images.value, weight.value), images.encoded)
    return images[:_MOST_IMAGES] if images.dim() == weight.dim() else images


def _form(argument: Any) -> Hashable:
    """Return the properties of an argument that a kernel depends on: shape, strides, type."""
    if isinstance(argument, Operand):
        return (argument.encoded.layout, argument.value.shape, argument.encoded.data.stride())
    if isinstance(argument, Tensor):
        return (argument.shape, argument.stride(), argument.dtype)
    return repr(argument)


def _is_right(
    kernel: Kernel, target: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int
) -> bool:
    """Return whether a call's result and gradients agree with FP32's, but for rounding."""
    generator = torch.Generator().manual_seed(seed)
    leaves = [_drawn(argument, generator) for argument in (*args, *kwargs.values())]
    if not all(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)):
        return True
    trained = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def called(run: Callable[..., Tensor], given: list[Any]) -> Tensor:
        return run(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))

    with torch.enable_grad():
        with without_onednn():  # some of oneDNN's FP32 gradients are wrong, too
            expected = called(target, leaves)
            gradient = torch.randn(expected.shape, generator=generator)
            wanted = (expected, *torch.autograd.grad(expected, trained, gradient))
        given = [_as(one, leaf) for one, leaf in zip((*args, *kwargs.values()), leaves, strict=True)]
        result = called(partial(kernel, target, "fp32"), given)
        found = (result, *torch.autograd.grad(result, trained, gradient))
    errors = ((a - b).abs().max() / b.abs().max() for a, b in zip(found, wanted, strict=True))
    return all(error.item() <= _MOST_ERROR for error in errors)  # False for NaN


def _drawn(argument: Any, generator: torch.Generator) -> Any:
    """Return random FP32 numbers with an argument's strides; other arguments unchanged."""
    value = argument.value if isinstance(argument, Operand) else argument
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return torch.empty_like(value, dtype=torch.float32).normal_(generator=generator).requires_grad_()


def _as(argument: Any, leaf: Any) -> Any:
    """Return numbers in the type that a kernel expects them in."""
    if isinstance(argument, Operand):
        layout = argument.encoded.layout
        return Operand(leaf, encode(leaf, "fp16" if layout == "plain" else f"int8_{layout}"))
    return leaf.to(argument.dtype) if isinstance(argument, Tensor) and leaf.requires_grad else leaf
