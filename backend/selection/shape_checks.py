"""Check convolutions in low precision once a shape, where oneDNN miscomputes some: on processors with AMX.

With AMX oneDNN leaves parts of some results and gradients unwritten: of convolutions with a stride whose
result is one pixel wide, and of patches (strides as long as the filter). torch's own BF16 is wrong there, too
(torch 2.13; without AMX all are right). As no list of shapes would be complete, the first call of each shape
is compared with torch's kernel without oneDNN, in FP32, on numbers drawn for it.
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
from qsync.records.precision import CONVOLUTIONS, Precision

Kernel = Callable[..., Tensor]

# The largest error of an element, of the largest element. Rounding to 8 bits leaves a tenth at the most; what
# is not written is as wrong as it is large.
_MOST_ERROR = 0.2
# Numbers are drawn so often: what a call does not write holds what the one before has written.
_NUM_DRAWS = 3
_MOST_IMAGES = 4


def is_checked(kind: str, precision: Precision, device: torch.device) -> bool:
    """Return whether kernels of this kind are to be checked here."""
    rounds_operands = precision not in (Precision.FP32, Precision.TF32)
    return kind in CONVOLUTIONS and rounds_operands and has_amx(device)


def checked(kernel: Kernel) -> Kernel:
    """Return the kernel, which raises MiscomputedError for calls of forms that it computes wrongly here.

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
            raise MiscomputedError("oneDNN miscomputes it at these shapes on this processor")
        return kernel(target, out_type, *args, **kwargs)

    return run


@contextmanager
def without_onednn() -> Iterator[None]:
    """Let torch compute by its own kernels; torch.backends.mkldnn.flags does so with a warning."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _few(images: Any, weight: Any) -> Any:
    """Return some images of a batch: of many a check would take longer, and find no more."""
    if isinstance(images, Operand):
        return Operand(_few(images.value, weight.value), images.encoded)
    return images[:_MOST_IMAGES] if images.dim() == weight.dim() else images


def _form(argument: Any) -> Hashable:
    """Return what the kernel of an argument depends on."""
    if isinstance(argument, Operand):
        return (argument.encoded.layout, argument.value.shape, argument.encoded.data.stride())
    if isinstance(argument, Tensor):
        return (argument.shape, argument.stride(), argument.dtype)
    return repr(argument)


def _is_right(
    kernel: Kernel, target: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any], seed: int
) -> bool:
    """Return whether result and gradients of a call of this form are those of FP32, but for rounding."""
    generator = torch.Generator().manual_seed(seed)
    leaves = [_drawn(argument, generator) for argument in (*args, *kwargs.values())]
    if not all(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)):
        return True
    trained = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def called(run: Callable[..., Tensor], given: list[Any]) -> Tensor:
        return run(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))

    with torch.enable_grad():
        with without_onednn():  # some of its FP32 gradients are wrong, too
            expected = called(target, leaves)
            gradient = torch.randn(expected.shape, generator=generator)
            wanted = (expected, *torch.autograd.grad(expected, trained, gradient))
        given = [_as(one, leaf) for one, leaf in zip((*args, *kwargs.values()), leaves, strict=True)]
        result = called(partial(kernel, target, "fp32"), given)
        found = (result, *torch.autograd.grad(result, trained, gradient))
    errors = ((a - b).abs().max() / b.abs().max() for a, b in zip(found, wanted, strict=True))
    return all(error.item() <= _MOST_ERROR for error in errors)  # not so for NaN


def _drawn(argument: Any, generator: torch.Generator) -> Any:
    """Return FP32 numbers that lie as an argument does; what is no float as it is."""
    value = argument.value if isinstance(argument, Operand) else argument
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return torch.empty_like(value, dtype=torch.float32).normal_(generator=generator).requires_grad_()


def _as(argument: Any, leaf: Any) -> Any:
    """Return numbers in the type that the kernel takes them in."""
    if isinstance(argument, Operand):
        layout = argument.encoded.layout
        return Operand(leaf, encode(leaf, "fp16" if layout == "plain" else f"int8_{layout}"))
    return leaf.to(argument.dtype) if isinstance(argument, Tensor) and leaf.requires_grad else leaf
