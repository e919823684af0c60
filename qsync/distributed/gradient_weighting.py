"""Batches of unequal size, and in several passes: the gradient stays the mean over all samples of a step.

DDP averages over ranks, which is the mean over samples only where all ranks have equally many. Here rank r
computes the mean over its own b_r samples (in k_r passes, whose gradients autograd adds up) and scales it by

    b_r / (k_r B),   B = sum over ranks of b_r

The sum of the scaled gradients is the gradient of the mean over all B samples, exactly.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from qsync.distributed.agreement import agree, check_same
from qsync.errors import FormatError, MismatchError, UnsupportedError


class _Share:
    """The state of DDP's hook: the factor of this rank's gradients before they are summed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.factor = 1.0 / group.size()


_shares: weakref.WeakKeyDictionary[DistributedDataParallel, _Share] = weakref.WeakKeyDictionary()


def weigh_gradients(
    model: torch.nn.Module, samples: int, *, passes: int = 1, total: int | None = None
) -> torch.nn.Module:
    """Make DDP's gradient the mean over all samples of a step, however many of them this rank has.

    Called on every rank; again when the shares change (a last, smaller batch). The loss must be a mean over
    samples. Warns where the model holds BatchNorm, whose statistics are those of one rank and pass.

    Args:
        model: in DistributedDataParallel.
        samples: how many samples this rank has per optimizer step.
        passes: in how many micro-batches of equal size it takes them (see `micro_batches`).
        total: how many samples all ranks should have together, as a plan says; checked if given.

    Returns:
        The model.

    Raises:
        UnsupportedError: the model is not in DistributedDataParallel.
        FormatError: no samples or passes, or samples that the passes do not divide.
        MismatchError: the ranks do not have `total` samples.
        Every rank raises the same error.

    Example:
        >>> model = qsync.weigh_gradients(DistributedDataParallel(model), samples=12 if strong else 4)
    """
    group = model.process_group if isinstance(model, DistributedDataParallel) else None

    def own() -> int:
        if not isinstance(model, DistributedDataParallel):
            raise UnsupportedError(
                f"gradients are weighed where they are averaged: give the model in DistributedDataParallel, "
                f"found {type(model).__name__}"
            )
        check_share(samples, passes)
        if model not in _shares:
            share = _Share(model.process_group)
            model.register_comm_hook(share, _sum_scaled)
            _shares[model] = share
        return samples

    each = agree("weighing gradients", own, group)
    check_same({"the samples that all ranks are to have": total}, group)
    if total is not None and sum(each) != total:
        raise MismatchError(
            f"the ranks have {' + '.join(map(str, each))} = {sum(each)} samples a step, to be {total}; give "
            "each rank the samples of its class in the plan"
        )
    assert isinstance(model, DistributedDataParallel)
    _shares[model].factor = samples / (passes * sum(each))
    if passes > 1 or len(set(each)) > 1:
        _warn_of_batch_norm(model)
    return model


def check_share(samples: int, passes: int = 1) -> None:
    """Raise FormatError unless the samples can be taken in passes of equal size."""
    for what, number in (("samples", samples), ("passes", passes)):
        if type(number) is not int or number < 1:
            raise FormatError(f"{what} must be a whole number of at least 1 on every rank, found {number!r}")
    if samples % passes:
        raise FormatError(
            f"{samples} samples cannot be taken in {passes} passes of equal size; choose a divisor"
        )


def micro_batches(model: torch.nn.Module, batch: Any, passes: int) -> Iterator[Any]:
    """Yield the parts of a batch, one pass each; gradients are exchanged in the last one alone.

    Run forward AND backward of a part before taking the next one, with a loss that is a mean over the part's
    samples. After `weigh_gradients(..., passes=passes)` the sum of the passes is the gradient of the whole.

    Args:
        model: in DistributedDataParallel.
        batch: a tensor, or tuples, lists and mappings of them. Each tensor is cut along its first dimension;
            tensors without dimensions and all else go into every part.
        passes: the number of parts.

    Yields:
        The parts, in order, of the batch's own type.

    Raises:
        FormatError: a tensor cannot be cut into equal parts.
        UnsupportedError: the model is not in DistributedDataParallel.

    Example:
        >>> for part in qsync.micro_batches(model, batch, passes=4):
        ...     loss_fn(model, part).backward()
        >>> optimizer.step()
    """
    if not isinstance(model, DistributedDataParallel):
        raise UnsupportedError(
            f"passes are told apart by DDP: give the model in DistributedDataParallel, found "
            f"{type(model).__name__}"
        )
    check_share(passes, passes)
    for k in range(passes):
        with nullcontext() if k == passes - 1 else model.no_sync():
            yield _part(batch, k, passes)


def _part(batch: Any, k: int, passes: int) -> Any:
    if isinstance(batch, torch.Tensor):
        if batch.ndim == 0:
            return batch
        check_share(batch.shape[0], passes)
        size = batch.shape[0] // passes
        return batch[k * size : (k + 1) * size]
    if isinstance(batch, Mapping):
        return {name: _part(value, k, passes) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [_part(value, k, passes) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def _sum_scaled(share: _Share, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text
    """Scale this rank's gradients, then sum over ranks: DDP's communication hook."""
    buffer = bucket.buffer().mul_(share.factor)
    work = dist.all_reduce(buffer, group=share.group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def _warn_of_batch_norm(model: torch.nn.Module) -> None:
    norms = [
        name for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, torch.nn.SyncBatchNorm)
    ]  # fmt: skip
    if norms:
        warnings.warn(
            f"the model has {len(norms)} BatchNorm ({norms[0].removeprefix('module.')}), whose statistics "
            "are those of the samples of one rank and pass, and so change with shares and passes; use "
            "SyncBatchNorm or GroupNorm, or leave both off",
            stacklevel=3,
        )
