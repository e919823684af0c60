"""Batches of unequal size, and in several passes: the gradient stays the mean over all samples of a step.

DDP averages over ranks, which is the mean over samples only where all ranks have equally many. Here rank r
computes the mean over its own b_r samples (in k_r passes, whose gradients autograd adds up) and scales it by

    b_r / (k_r B),   B = sum over ranks of b_r

The sum of the scaled gradients is the gradient of the mean over all B samples, exactly. B itself travels
before the first bucket that is all-reduced, so that every step may have other numbers: of samples, or of
tokens that `token_mean` counts. Gradients are scaled by the B that is expected, and once more only where
another one arrives: a pass over all gradients after their exchange is one that nothing hides.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from copy import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import PackedSequence

from qsync.distributed import accelerate_state
from qsync.distributed.agreement import agree, check_same
from qsync.distributed.data_parallel import HybridDDP, comm_hook_of, ddp_of, one_hook
from qsync.errors import FormatError, MismatchError, UnsupportedError, shortened
from qsync.runtime.wrapping import wrapped_module
from qsync.tracing.replaced_forward import untraced


class GradientHook:
    """The stages of DDP's communication hook: weigh gradients, exchange them, divide by the weights.

    It holds what this rank's gradients of a step are the mean over.

    `num_counted` is the number of tokens that `token_mean` has counted since the last all-reduce.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.samples, self.passes = 1, 1
        self.expected = 1.0  # the sum of all ranks' samples, if it is known; the same on every rank
        self.num_counted: torch.Tensor | None = None
        # Whether forward has run since the last all-reduce: not on a rank that has joined. None: not known.
        self.has_run: bool | None = None
        self.loss_is_divided = False  # by the number of passes, before backward
        self._factor, self._divisor = 1.0, 1.0  # of this step's gradients, and what of it all ranks share
        self._first: Any = None  # the all-reduce of the step's weights
        self._is_empty: torch.Tensor | None = None  # whether this rank's step has no token; None: not counted

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "group": None, "_first": None, "_is_empty": None, "num_counted": None}

    @untraced("it only counts")
    def begin(self, parallel: torch.nn.Module, *_: Any) -> None:
        """Note that the model runs: a hook before its forward."""
        self.has_run = self.has_run or torch.is_grad_enabled()
        if self.num_counted is not None and all(p.grad is None for p in parallel.parameters()):
            self.num_counted = None  # of passes whose gradients were dropped
        self.loss_is_divided = accelerate_state.divides_loss(parallel)

    def count(self, num_tokens: torch.Tensor) -> None:
        """Count the tokens of one pass, in its backward."""
        self.num_counted = num_tokens if self.num_counted is None else self.num_counted + num_tokens

    def _take(self, gradients: torch.Tensor) -> tuple[float, torch.Tensor | float, bool]:
        """Return the factor of this step's gradients, their weight, and whether it is counted; begin anew."""
        counted, has_run = self.num_counted, self.has_run
        if has_run is None:
            has_run = bool(gradients.any())
        self.num_counted, self.has_run = None, False
        if counted is not None:  # token_mean has multiplied the losses
            return 1.0, counted, True
        passes = 1 if self.loss_is_divided else self.passes
        return self.samples / passes, float(self.samples if has_run else 0), False

    def exchange(self, sent: torch.Tensor) -> torch.futures.Future[list[torch.Tensor]]:
        """Sum a tensor over the ranks, in place."""
        future: torch.futures.Future[list[torch.Tensor]] = dist.all_reduce(
            sent, group=self.group, async_op=True
        ).get_future()
        return future

    def reduce(self, buffer: torch.Tensor, is_first: bool) -> torch.futures.Future[torch.Tensor]:
        """Sum a bucket's weighted gradients over ranks and divide by the sum of the weights."""
        sparse = buffer.is_sparse
        gradients = buffer.coalesce() if sparse else buffer
        numbers = gradients.values() if sparse else buffer
        if is_first:
            self._factor, weight, is_counted = self._take(numbers)
            self._divisor = 1.0 if is_counted else self.expected
            self._factor /= self._divisor
            self._is_empty = torch.as_tensor(weight, device=buffer.device) == 0 if is_counted else None
        if self._is_empty is not None:  # the mean over no token may be 0 / 0, and its gradients NaN
            numbers.masked_fill_(self._is_empty, 0.0)
        if is_first:
            # On their own: behind the gradients, the whole bucket would be copied to make room for them.
            weights = torch.stack([torch.as_tensor(weight, dtype=torch.float64, device=buffer.device)] * 2)
            self._first = self.exchange(weights if is_counted else weights * weights.new_tensor([1.0, 0.0]))
        numbers.mul_(self._factor)
        future, first, divisor = self.exchange(gradients), self._first, self._divisor

        def mean(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            total, counted = first.wait()[0]
            torch._assert_async((counted == 0) | (counted == total), _MIXED)
            found, rest = done.value()[0], (total / divisor).clamp(min=torch.finfo(torch.float32).tiny)
            if rest.device.type == "cpu" and rest == 1.0:  # a GPU would have to wait to know
                return buffer.copy_(found)
            return buffer.copy_(found / rest) if sparse else buffer.copy_(found).div_(rest)

        averaged: torch.futures.Future[torch.Tensor] = future.then(mean)
        return averaged


_MIXED = "token_mean was called on some ranks only; call it on every rank, before backward of every loss"


def _weights_of(parallel: DistributedDataParallel) -> GradientHook:
    """Return the weights of a model in DDP; with its hook, which takes effect from the next backward on."""
    for _, state in parallel._comm_hooks:
        if isinstance(state, GradientHook):
            return state
    if hook := comm_hook_of(parallel):
        raise UnsupportedError(
            f"gradients are weighed in DDP's communication hook, of which it takes one, and this DDP has "
            f"{hook}; leave that one out"
        )
    weights = GradientHook(parallel.process_group)
    parallel.register_comm_hook(weights, average_bucket)
    if not isinstance(parallel, HybridDDP):  # which refuses others itself
        parallel.register_comm_hook = parallel._register_builtin_comm_hook = _refuse_hook  # type: ignore[method-assign]
    parallel.register_forward_pre_hook(weights.begin)
    return weights


def _refuse_hook(*_: Any, **__: Any) -> None:
    """Refuse another communication hook: stands in place of DDP's methods."""
    raise UnsupportedError(one_hook("qsync's, which weighs gradients (token_mean, weigh_gradients)"))


def weigh_gradients(
    model: torch.nn.Module, samples: int, *, passes: int = 1, total: int | None = None
) -> torch.nn.Module:
    """Make DDP's gradient the mean over all samples of a step, however many of them this rank has.

    Called on every rank; again when the shares change. The loss must be a mean over samples. Warns where the
    model holds BatchNorm, whose statistics are those of one rank and pass. Where every step has other
    numbers, count them: `qsync.token_mean`.

    Args:
        model: in DistributedDataParallel.
        samples: how many samples this rank has per optimizer step.
        passes: in how many micro-batches of equal size it takes them (see `micro_batches`). Under Accelerate,
            which divides losses by its own number of passes, they are not divided again.
        total: how many samples all ranks should have together, as a plan says; checked if given.

    Returns:
        The model.

    Raises:
        UnsupportedError: the model is not in DistributedDataParallel, or that has a communication hook.
        FormatError: no samples or passes, or samples that the passes do not divide.
        MismatchError: the ranks do not have `total` samples.
        Every rank raises the same error.

    Example:
        >>> model = qsync.weigh_gradients(DistributedDataParallel(model), samples=12 if strong else 4)
    """
    parallel = ddp_of(model)
    group = parallel.process_group if parallel is not None else None

    def own() -> int:
        _weights_of(_in_ddp(model))
        check_share(samples, passes)
        return samples

    each = agree("weighing gradients", own, group)
    check_same({"the samples that all ranks are to have": total}, group)
    if total is not None and sum(each) != total:
        raise MismatchError(
            f"the ranks have {' + '.join(map(str, each))} = {sum(each)} samples a step, to be {total}; give "
            "each rank the samples of its class in the plan"
        )
    set_share(model, samples, passes, sum(each))
    if passes > 1 or len(set(each)) > 1:
        warn_of_batch_norm(model)
    return model


def set_share(model: torch.nn.Module, samples: int, passes: int, expected: int) -> None:
    """Weigh the gradients of this rank by its samples, of `expected` ones on all ranks.

    Every rank must expect the same, as of a plan. Where they have more or fewer, gradients are scaled again.
    """
    weights = _weights_of(_in_ddp(model))
    weights.samples, weights.passes, weights.expected = samples, passes, float(expected)
    note_share(model, samples, passes)


# The samples that this rank takes a step, and in how many passes, by model.
_shares: weakref.WeakKeyDictionary[torch.nn.Module, tuple[int, int]] = weakref.WeakKeyDictionary()


def note_share(model: torch.nn.Module, samples: int, passes: int = 1) -> None:
    """Remember what this rank takes a step, of a model or of the one in DDP."""
    _shares[wrapped_module(model)] = (samples, passes)


def samples_of(model: torch.nn.Module) -> int:
    """Return how many samples this rank takes a step, of a model that `qsync.hybrid` planned.

    For loops that draw them themselves, as from a dataset without a length; others have a
    `qsync.ShareSampler`.

    Raises:
        MismatchError: nothing was planned for the model, nor set by `weigh_gradients`.

    Example:
        >>> batch = torch.stack([next(stream) for _ in range(qsync.samples_of(model))])
    """
    found = _shares.get(wrapped_module(model))
    if found is None:
        raise MismatchError(
            f"nothing says how many samples {type(model).__name__} takes a step; give what qsync.hybrid "
            "returned, or call qsync.weigh_gradients"
        )
    return found[0]


def _in_ddp(model: torch.nn.Module) -> DistributedDataParallel:
    parallel = ddp_of(model)
    if parallel is None:
        raise UnsupportedError(
            f"gradients are weighed where they are averaged: give the model in DistributedDataParallel, "
            f"found {type(model).__name__}"
        )
    return parallel


def token_mean(model: torch.nn.Module, loss: torch.Tensor, num_tokens: int | torch.Tensor) -> torch.Tensor:
    """Make the gradient of a step the mean over its tokens, on all ranks and in all passes.

    A loss that is a mean over tokens weighs ranks and passes with few tokens as much as those with many. This
    returns `loss * num_tokens`. The counts travel before the first gradients that are all-reduced, and the
    sum of gradients is divided by the sum of counts. Call it on every rank, for every
    loss, before its backward; do not divide losses by the number of passes. A loss without a backward counts
    for nothing. Where a rank may have no input at all (`Join`), call `weigh_gradients` first. (As ByteScale,
    arXiv:2502.21231.)

    Args:
        model: what `qsync.hybrid` returned, or any model in DistributedDataParallel.
        loss: the mean over this pass's tokens, a scalar.
        num_tokens: how many they are, at least 0. A pass without tokens counts for nothing; beside other
            passes of its step its gradients must be finite: a mean of one's own divides by at least 1.

    Returns:
        The loss to call backward of.

    Raises:
        UnsupportedError: the model is not in DistributedDataParallel, or that has a communication hook.
        FormatError: a number that is none.

    Example:
        >>> for part in qsync.micro_batches(model, batch, passes=4):
        ...     counted = (part["labels"] != -100).sum()
        ...     qsync.token_mean(model, model(**part).loss, counted).backward()
        >>> optimizer.step()
    """
    parallel = _in_ddp(model)
    weights = _weights_of(parallel)
    if not isinstance(num_tokens, torch.Tensor) and not (type(num_tokens) is int and num_tokens >= 0):
        raise FormatError(f"num_tokens must be a whole number of at least 0, found {shortened(num_tokens)}")
    wide = torch.promote_types(loss.dtype, torch.float32)
    count = torch.as_tensor(num_tokens, device=loss.device).detach().to(wide)
    factor = count * accelerate_state.num_passes() if accelerate_state.divides_loss(parallel) else count
    weighted = torch.where(count > 0, loss * factor, torch.zeros_like(loss))
    if weighted.requires_grad:  # what has no backward counts for nothing: evaluation, a skipped step
        weighted.register_hook(lambda _: weights.count(count))  # type: ignore[no-untyped-call]
    return weighted


def check_share(samples: int, passes: int = 1) -> None:
    """Raise FormatError unless the samples can be taken in passes of equal size."""
    for what, number in (("samples", samples), ("passes", passes)):
        if type(number) is not int or number < 1:
            raise FormatError(f"{what} must be a whole number of at least 1 on every rank, found {number!r}")
    if samples % passes:
        raise FormatError(
            f"{samples} samples cannot be taken in {passes} passes of equal size; choose a divisor"
        )


def micro_batches(model: torch.nn.Module, batch: Any, passes: int | None = None) -> Iterator[Any]:
    """Yield the parts of a batch, one pass each; gradients are exchanged in the last one alone.

    Run forward AND backward of a part before taking the next one, with a loss that is a mean over the part's
    samples. After `weigh_gradients(..., passes=passes)` the sum of the passes is the gradient of the whole.

    Args:
        model: in DistributedDataParallel.
        batch: a tensor, or tuples, lists, mappings and dataclasses of them. Each tensor is cut along its
            first dimension; tensors without dimensions and all else go into every part.
        passes: the number of parts; without it as many as the plan gives this rank.

    Yields:
        The parts, in order, of the batch's own type.

    Raises:
        FormatError: a tensor cannot be cut into equal parts, or the batch holds none to cut.
        UnsupportedError: the model is not in DistributedDataParallel.

    Example:
        >>> for part in qsync.micro_batches(model, batch):
        ...     loss_fn(model, part).backward()
        >>> optimizer.step()
    """
    parallel = ddp_of(model)
    if passes is None:
        passes = _shares.get(wrapped_module(model), (1, 1))[1]
    if parallel is None and passes == 1:  # one process alone
        yield batch
        return
    if parallel is None:
        raise UnsupportedError(
            f"passes are told apart by DDP: give the model in DistributedDataParallel, found "
            f"{type(model).__name__}"
        )
    check_share(passes, passes)
    if passes > 1 and not _has_samples(batch):
        raise FormatError(
            f"the batch ({type(batch).__name__}) holds no tensor to cut into passes; give a tensor, or "
            "tuples, lists, mappings or dataclasses of them"
        )
    for k in range(passes):
        with nullcontext() if k == passes - 1 else parallel.no_sync():
            yield _part(batch, k, passes)


def of_samples(batch: Any, captured: int, samples: int) -> Any:
    """Return a batch of `captured` samples with another number of them: its first ones, or some repeated."""

    def taken(part: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(samples, device=part.device) % captured
        return part[rows] if len(part) == captured else part

    return _each(batch, taken)


def _part(batch: Any, k: int, passes: int) -> Any:
    def cut(part: torch.Tensor) -> torch.Tensor:
        check_share(part.shape[0], passes)
        size = part.shape[0] // passes
        return part[k * size : (k + 1) * size]

    return _each(batch, cut)


def _each(batch: Any, cut: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the batch with each of its tensors that has a dimension cut."""
    if isinstance(batch, torch.Tensor):
        return cut(batch) if batch.ndim else batch
    if isinstance(batch, PackedSequence):
        raise UnsupportedError(
            "a PackedSequence cannot be cut into passes: its first dimension holds all samples of a time "
            "step; cut padded sequences, and pack each part in the loss"
        )
    if isinstance(batch, Mapping):
        return _like(batch, {name: _each(value, cut) for name, value in batch.items()})
    if isinstance(batch, (tuple, list)):
        parts = [_each(value, cut) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if is_dataclass(batch) and not isinstance(batch, type):
        given = {each.name: getattr(batch, each.name) for each in fields(batch) if each.init}
        return replace(batch, **{name: _each(value, cut) for name, value in given.items()})
    return batch


def _like(batch: Mapping[Any, Any], parts: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return the parts as a mapping of the batch's own type; as a dict where that cannot be changed."""
    if type(batch) is dict:
        return parts
    before, own, given = dict(batch), cast("Any", copy(batch)), cast("Any", batch)
    try:
        for name, part in parts.items():
            own[name] = part
    except TypeError:
        return parts
    if all(given[name] is value for name, value in before.items()):
        return own  # type: ignore[no-any-return]
    given.update(before)  # its copy shares the items
    return parts


def _has_samples(batch: Any) -> bool:
    """Return whether a batch holds a tensor with samples."""
    if isinstance(batch, torch.Tensor):
        return batch.ndim > 0
    if isinstance(batch, Mapping):
        return any(map(_has_samples, batch.values()))
    if isinstance(batch, (tuple, list)):
        return any(map(_has_samples, batch))
    if is_dataclass(batch) and not isinstance(batch, type):
        return any(_has_samples(getattr(batch, each.name)) for each in fields(batch))
    return False


def average_bucket(weights: GradientHook, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text
    """Average a bucket by weight: DDP's communication hook."""
    return weights.reduce(bucket.buffer(), bucket.index() == 0)


def batch_norms(model: torch.nn.Module) -> list[str]:
    """Return the paths of the BatchNorms whose statistics are those of one rank and pass."""
    return [
        name for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, torch.nn.SyncBatchNorm)
    ]  # fmt: skip


def warn_of_batch_norm(model: torch.nn.Module) -> None:
    """Warn where the model holds BatchNorm: its statistics change with shares and passes."""
    if norms := batch_norms(model):
        warnings.warn(
            f"the model has {len(norms)} BatchNorm ({norms[0].removeprefix('module.')}), whose statistics "
            "are those of the samples of one rank and pass, and so change with shares and passes; use "
            "SyncBatchNorm or GroupNorm, or leave both off",
            stacklevel=3,
        )
