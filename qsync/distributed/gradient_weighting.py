"""Weight gradients of unequal batches, so that a step's gradient is the mean over all its samples.

DDP averages over ranks, which is the mean over samples only if all ranks have equally many. Here rank r
computes the mean over its own b_r samples (in k_r passes, whose gradients autograd sums) and scales it by

    b_r / (k_r B),   B = sum over ranks of b_r

The sum of the scaled gradients is the gradient of the mean over all B samples, exactly. B is all-reduced
before the first bucket, so the numbers of samples (or of tokens, by `token_mean`) may change in every step.
Gradients are scaled by the expected B, and again only if the actual B differs: a pass over all gradients
after their exchange cannot be overlapped.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import PackedSequence

from qsync.backend.devices.processor import processor
from qsync.distributed import accelerate_state
from qsync.distributed.agreement import agree, check_same
from qsync.distributed.data_parallel import HybridDDP, comm_hook_of, ddp_of, one_hook
from qsync.distributed.gradient_codecs import CompressedExchange, CompressedSum, HostGroups, scattered_sum
from qsync.errors import FormatError, MismatchError, UnsupportedError, shortened
from qsync.records.compression import BLOCK, Compression, part_elements
from qsync.runtime.wrapping import wrapped_module
from qsync.tracing.replaced_forward import untraced


class GradientHook:
    """DDP's communication hook: weight gradients, all-reduce them, divide by the sum of weights.

    It holds what this rank's gradients of a step are the mean over. `num_counted` is the number of tokens
    that `token_mean` has counted since the last all-reduce.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.samples, self.passes = 1, 1
        self.expected = 1.0  # sum of all ranks' samples, if known; equal on every rank
        self.num_counted: torch.Tensor | None = None
        # Whether forward ran since the last all-reduce; False on a joined rank, None if unknown.
        self.has_run: bool | None = None
        self.loss_is_divided = False  # by the number of passes, before backward
        self.kinds: Mapping[str, str] | None = None  # how gradients travel, by parameter
        self.compressed: CompressedExchange | None = None  # none while nothing is compressed
        # This step's gradient factor, and its part that all ranks share
        self._factor, self._divisor = 1.0, 1.0
        self._first: Any = None  # the all-reduce of the step's weights
        # Whether this rank's step has no token; None if not counted
        self._is_empty: torch.Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        own = {"group": None, "compressed": None, "_first": None, "_is_empty": None, "num_counted": None}
        return {**self.__dict__, **own}

    @untraced("it only counts")
    def begin(self, parallel: torch.nn.Module, *_: Any) -> None:
        """Note that the model runs, as a forward pre-hook."""
        self.has_run = self.has_run or torch.is_grad_enabled()
        if self.num_counted is not None and all(p.grad is None for p in parallel.parameters()):
            self.num_counted = None  # tokens of passes whose gradients were dropped
        self.loss_is_divided = accelerate_state.divides_loss(parallel)
        if self.kinds is not None and self.compressed is None and torch.is_grad_enabled():
            self.compress(parallel.module, self.kinds)  # in a copy that trains

    def compress(self, model: Any, kinds: Mapping[str, str], group: dist.ProcessGroup | None = None) -> None:
        """Exchange the gradients of a model in these kinds, in a group that nothing else uses."""
        if group is None:
            ranks = dist.get_process_group_ranks(self.group or dist.group.WORLD)
            group = dist.new_group(ranks, backend=dist.get_backend(self.group))
        self.kinds, self.compressed = kinds, CompressedExchange(model, kinds, group, HostGroups.make(group))

    def count(self, num_tokens: torch.Tensor) -> None:
        """Count the tokens of one pass, during its backward."""
        self.num_counted = num_tokens if self.num_counted is None else self.num_counted + num_tokens

    def _take(self, gradients: torch.Tensor) -> tuple[float, torch.Tensor | float, bool]:
        """Return the step's gradient factor, its weight, and whether tokens were counted; reset."""
        counted, has_run = self.num_counted, self.has_run
        if has_run is None:
            has_run = bool(gradients.any())
        self.num_counted, self.has_run = None, False
        if counted is not None:  # token_mean has already multiplied the losses
            return 1.0, counted, True
        passes = 1 if self.loss_is_divided else self.passes
        return self.samples / passes, float(self.samples if has_run else 0), False

    def exchange(self, sent: torch.Tensor) -> torch.futures.Future[list[torch.Tensor]]:
        """Sum a tensor over the ranks, in place."""
        future: torch.futures.Future[list[torch.Tensor]] = dist.all_reduce(
            sent, group=self.group, async_op=True
        ).get_future()
        return future

    def reduce(
        self, buffer: torch.Tensor, is_first: bool, parameters: Sequence[torch.Tensor] = ()
    ) -> torch.futures.Future[torch.Tensor]:
        """Sum a bucket's weighted gradients over ranks and divide by the sum of the weights.

        The stages: weigh, add what the last step's encoding lost, encode, exchange, decode, divide.
        """
        sparse = buffer.is_sparse
        gradients = buffer.coalesce() if sparse else buffer
        numbers = gradients.values() if sparse else buffer
        if is_first:
            self._factor, weight, is_counted = self._take(numbers)
            self._divisor = 1.0 if is_counted else self.expected
            self._factor /= self._divisor
            self._is_empty = torch.as_tensor(weight, device=buffer.device) == 0 if is_counted else None
        if self._is_empty is not None:  # the mean over no tokens may be 0 / 0, with NaN gradients
            numbers.masked_fill_(self._is_empty, 0.0)
        if is_first:
            # In a separate message: appended to a bucket, they would force a copy of the bucket.
            weights = torch.stack([torch.as_tensor(weight, dtype=torch.float64, device=buffer.device)] * 2)
            self._first = self.exchange(weights if is_counted else weights * weights.new_tensor([1.0, 0.0]))
        numbers.mul_(self._factor)
        first, divisor = self._first, self._divisor
        compressed = self.compressed
        future = compressed.sum(gradients, parameters) if compressed else self.exchange(gradients)

        def mean(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            total, counted = first.wait()[0]
            torch._assert_async((counted == 0) | (counted == total), _MIXED)
            found, rest = done.value()[0], (total / divisor).clamp(min=torch.finfo(torch.float32).tiny)
            if rest.device.type == "cpu" and rest == 1.0:  # a GPU would have to synchronize to know
                return buffer.copy_(found)
            return buffer.copy_(found / rest) if sparse else buffer.copy_(found).div_(rest)

        averaged: torch.futures.Future[torch.Tensor] = future.then(mean)
        return averaged


# torch 2.13 renamed it.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class WeighedReduceScatter:
    """FSDP2's reduce-scatter (`set_custom_reduce_scatter`), of gradients multiplied by this rank's factor.

    FSDP2 averages over ranks; the factors make that the mean over samples. In INT8 each rank sends codes to
    the owner of a part, which adds them up in FP32; parts below a block travel as they are.
    """

    def __init__(self) -> None:
        self.factor, self.is_int8 = 1.0, False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer, as FSDP2's own."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce the weighed gradients; FSDP2 names the arguments."""
        input_tensor.mul_(self.factor)
        size, ranks = output_tensor.numel(), group.size()
        if self.is_int8 and input_tensor.dtype is torch.float32 and size >= BLOCK:
            if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                raise UnsupportedError(
                    "compressed gradients of FSDP2 are averaged; leave set_gradient_divide_factor out, or "
                    "compression"
                )
            rows = input_tensor.new_zeros(ranks, part_elements(size, 1))
            rows[:, :size] = input_tensor.view(ranks, size)
            total = scattered_sum(rows, group)[1][:size]
            output_tensor.copy_(total if op == dist.ReduceOp.SUM else total.div_(ranks))
            return None
        work: dist.Work | None = _reduce_scatter(output_tensor, input_tensor, op, group, async_op)
        return work


def _shards_of(model: torch.nn.Module) -> list[FSDPModule]:
    """Return the modules that FSDP2 shards, each of which reduces the gradients of its own parameters.

    Raises UnsupportedError where some gradients are reduced otherwise.
    """
    shards: list[FSDPModule] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    known = (parameter for parameter in model.parameters() if isinstance(parameter, DTensor))
    if shards and not (isinstance(model, FSDPModule) and all(_num_shards(one) > 1 for one in known)):
        raise UnsupportedError(
            f"some gradients of {type(model).__name__} are not reduced between shards, so they cannot be "
            "weighed; call fully_shard(model) on the whole, or plan without shares (levers=())"
        )
    return shards


def _reduce_scatter_of(model: torch.nn.Module, shards: Iterable[FSDPModule]) -> WeighedReduceScatter:
    """Return the reduce-scatter of a sharded model; installed on first use."""
    found = _reduce_scatters.get(model)
    if found is None:
        found = _reduce_scatters[model] = WeighedReduceScatter()
        for module in shards:
            module.set_custom_reduce_scatter(found)  # type: ignore[arg-type]
    return found


def _num_shards(parameter: DTensor) -> int:
    """Return the number of ranks that a parameter is sharded over."""
    placed = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, place in placed if isinstance(place, Shard))


_reduce_scatters: weakref.WeakKeyDictionary[torch.nn.Module, WeighedReduceScatter] = (
    weakref.WeakKeyDictionary()
)
_MIXED = "token_mean was called on some ranks only; call it on every rank, before backward of every loss"


def _weights_of(parallel: DistributedDataParallel) -> GradientHook:
    """Return a DDP model's gradient hook; installed on first use, from the next backward on."""
    for _, state in parallel._comm_hooks:
        if isinstance(state, GradientHook):
            return state
    if hook := comm_hook_of(parallel):
        raise UnsupportedError(
            f"weighting gradients needs DDP's only communication hook, but this DDP already has {hook}; "
            "leave that hook out"
        )
    weights = GradientHook(parallel.process_group)
    parallel.register_comm_hook(weights, average_bucket)
    if not isinstance(parallel, HybridDDP):  # HybridDDP refuses other hooks itself
        parallel.register_comm_hook = parallel._register_builtin_comm_hook = _refuse_hook  # type: ignore[method-assign]
    parallel.register_forward_pre_hook(weights.begin)
    return weights


def _refuse_hook(*_: Any, **__: Any) -> None:
    """Refuse another communication hook, in place of DDP's registration methods."""
    raise UnsupportedError(one_hook("qsync's, which weighs gradients (token_mean, weigh_gradients)"))


def weigh_gradients(
    model: torch.nn.Module, samples: int, *, passes: int = 1, total: int | None = None
) -> torch.nn.Module:
    """Make DDP's gradient the mean over all samples of a step, with unequal samples per rank.

    Call it on every rank, and again when the shares change. The loss must be a mean over samples. Warns about
    BatchNorm, whose statistics cover one rank and pass. If the numbers change in every step, use
    `qsync.token_mean`.

    Args:
        model: in DistributedDataParallel, or sharded (fully_shard).
        samples: this rank's samples per optimizer step.
        passes: the number of equal micro-batches that it takes them in (see `micro_batches`). Losses that
            Accelerate already divides by its number of passes are not divided again.
        total: the samples of all ranks together, as in the plan; checked if given.

    Returns:
        The model.

    Raises:
        UnsupportedError: the model is in neither of them, or its DDP has a communication hook.
        FormatError: no samples or passes, or samples that the passes do not divide.
        MismatchError: the ranks do not have `total` samples.
        Every rank raises the same error.

    Example:
        >>> model = qsync.weigh_gradients(DistributedDataParallel(model), samples=12 if strong else 4)
    """
    parallel = ddp_of(model)
    group = parallel.process_group if parallel is not None else None

    def own() -> tuple[int, int]:
        if not _shards_of(model):
            _weights_of(_in_ddp(model))
        check_share(samples, passes)
        return samples, passes

    each, each_passes = zip(*agree("weighing gradients", own, group), strict=True)
    check_passes(model, each_passes)
    check_same({"the samples that all ranks are to have": total}, group)
    if total is not None and sum(each) != total:
        raise MismatchError(
            f"the ranks have {' + '.join(map(str, each))} = {sum(each)} samples per step instead of "
            f"{total}; give each rank the samples of its class in the plan"
        )
    set_share(model, samples, passes, sum(each))
    if passes > 1 or len(set(each)) > 1:
        warn_of_batch_norm(model)
    return model


def set_share(model: torch.nn.Module, samples: int, passes: int, expected: int) -> None:
    """Weight this rank's gradients by its samples, given the `expected` sum over all ranks.

    Every rank must expect the same, such as the plan's. If the actual sum differs, DDP's gradients are
    rescaled; those of a sharded model are weighed by the expected sum.
    """
    if shards := _shards_of(model):
        factor = dist.get_world_size() * samples / (passes * expected)
        _reduce_scatter_of(model, shards).factor = factor
    else:
        weights = _weights_of(_in_ddp(model))
        weights.samples, weights.passes, weights.expected = samples, passes, float(expected)
    note_share(model, samples, passes)


def compress_gradients(
    model: torch.nn.Module, kinds: Mapping[str, str] | None, group: dist.ProcessGroup | None = None
) -> None:
    """Send a model's FP32 gradients compressed; None: as they are. Call it on every rank.

    Gradients are weighed, then encoded. Sparse gradients and those of other types travel as they are. On
    several hosts with several ranks they are added up on each host first, and encoded between the hosts.

    Args:
        model: in DistributedDataParallel, or sharded (fully_shard), whose gradients go one way, in "int8".
        kinds: by parameter, "*" for all others (`qsync.records.compression.kind_of`).
        group: a group of DDP's ranks that nothing else uses; by default a new one.

    Raises:
        UnsupportedError: another kind than "int8" of a sharded model, or DDP's other communication hook.
        MismatchError: ranks compute factors of low rank on unlike hardware, whose bits would differ.
    """
    if kinds is None:
        return
    if shards := _shards_of(model):
        if kinds != {"*": "int8"}:
            raise UnsupportedError(
                f"FSDP2 reduces the gradients of the sharded {type(model).__name__}: give "
                'compression="int8", or leave it out and give fully_shard '
                "mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)"
            )
        _reduce_scatter_of(model, shards).is_int8 = True
        return
    parallel = _in_ddp(model)
    weights = _weights_of(parallel)
    if any(Compression.parse(kind).kind == "powersgd" for kind in kinds.values()):
        device = next(parallel.parameters()).device
        hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
        check_same({
            "the hardware, on which powersgd must compute the same bits,": hardware,
            "the number of threads, with which powersgd must compute the same bits,": torch.get_num_threads(),
        }, weights.group)  # fmt: skip
    weights.compress(parallel.module, kinds, group)
    if weights.expected == 1.0:  # ranks without shares count alike
        weights.expected = float(dist.get_world_size(weights.group))


def compressed_sum_of(model: torch.nn.Module) -> CompressedSum | None:
    """Return the compressed sums of a model's DDP, with residuals to save; None where it has none."""
    parallel = ddp_of(model)
    states = [state for _, state in parallel._comm_hooks] if parallel is not None else []
    hook = next((state for state in states if isinstance(state, GradientHook)), None)
    compressed = hook.compressed if hook is not None else None
    return compressed.sums if compressed is not None and compressed.is_saved else None


def check_passes(model: torch.nn.Module, passes: Iterable[int]) -> None:
    """Raise UnsupportedError where ranks of a sharded model take different numbers of passes."""
    if len(set(passes)) > 1 and _shards_of(model):
        raise UnsupportedError(
            f"all ranks of the sharded {type(model).__name__} gather its parameters in every pass, and so "
            'must take equally many; plan with levers=["share"]'
        )


# This rank's samples and passes per step, by model.
_shares: weakref.WeakKeyDictionary[torch.nn.Module, tuple[int, int]] = weakref.WeakKeyDictionary()


def note_share(model: torch.nn.Module, samples: int, passes: int = 1) -> None:
    """Remember this rank's samples and passes per step, for a model or the model in its DDP."""
    _shares[wrapped_module(model)] = (samples, passes)


def samples_of(model: torch.nn.Module) -> int:
    """Return this rank's number of samples per step, for a model that `qsync.hybrid` planned.

    For loops that draw samples themselves, such as from a dataset without a length; otherwise use a
    `qsync.ShareSampler`.

    Raises:
        MismatchError: neither `qsync.hybrid` nor `weigh_gradients` set it.

    Example:
        >>> batch = torch.stack([next(stream) for _ in range(qsync.samples_of(model))])
    """
    found = _shares.get(wrapped_module(model))
    if found is None:
        raise MismatchError(
            f"the number of samples per step of {type(model).__name__} is not set; pass the model that "
            "qsync.hybrid returned, or call qsync.weigh_gradients"
        )
    return found[0]


def _in_ddp(model: torch.nn.Module) -> DistributedDataParallel:
    parallel = ddp_of(model)
    if parallel is None:
        raise UnsupportedError(
            f"weighting gradients needs a model in DistributedDataParallel, found {type(model).__name__}; "
            "wrap it first"
        )
    return parallel


def token_mean(model: torch.nn.Module, loss: torch.Tensor, num_tokens: int | torch.Tensor) -> torch.Tensor:
    """Make a step's gradient the mean over its tokens, over all ranks and passes.

    A mean loss gives ranks and passes with few tokens the same weight as those with many. This returns `loss
    * num_tokens`. Counts are all-reduced before the first gradients, and the sum of gradients is divided by
    the sum of counts. Call it on every rank, for every loss, before its backward; do not divide losses by the
    number of passes. A loss without a backward is not counted. If a rank may have no input at all (`Join`),
    call `weigh_gradients` first. (As ByteScale, arXiv:2502.21231.)

    Args:
        model: the result of `qsync.hybrid`, or any model in DistributedDataParallel.
        loss: the mean over this pass's tokens, a scalar.
        num_tokens: their number, at least 0. A pass without tokens is not counted; its gradients must still
            be finite, so divide a mean of your own by at least 1.

    Returns:
        The loss to call backward on.

    Raises:
        UnsupportedError: the model is not in DistributedDataParallel, or that has a communication hook.
        FormatError: an invalid number of tokens.

    Example:
        >>> for part in qsync.micro_batches(model, batch, passes=4):
        ...     counted = (part["labels"] != -100).sum()
        ...     qsync.token_mean(model, model(**part).loss, counted).backward()
        >>> optimizer.step()
    """
    parallel = _in_ddp(model)
    weights = _weights_of(parallel)
    if not isinstance(num_tokens, torch.Tensor) and not (type(num_tokens) is int and num_tokens >= 0):
        raise FormatError(
            f"num_tokens must be a whole number of at least 0, found {shortened(num_tokens)}; "
            "count the tokens of the loss"
        )
    wide = torch.promote_types(loss.dtype, torch.float32)
    count = torch.as_tensor(num_tokens, device=loss.device).detach().to(wide)
    factor = count * accelerate_state.num_passes() if accelerate_state.divides_loss(parallel) else count
    weighted = torch.where(count > 0, loss * factor, torch.zeros_like(loss))
    if weighted.requires_grad:  # without a backward nothing is counted: evaluation, a skipped step
        weighted.register_hook(lambda _: weights.count(count))  # type: ignore[no-untyped-call]
    return weighted


def check_share(samples: int, passes: int = 1) -> None:
    """Raise FormatError unless the passes divide the samples evenly."""
    for what, number in (("samples", samples), ("passes", passes)):
        if type(number) is not int or number < 1:
            raise FormatError(f"{what} must be a whole number of at least 1 on every rank, found {number!r}")
    if samples % passes:
        raise FormatError(
            f"{passes} passes do not divide {samples} samples evenly; choose a divisor of {samples}"
        )


def micro_batches(model: torch.nn.Module, batch: Any, passes: int | None = None) -> Iterator[Any]:
    """Yield the parts of a batch, one per pass; gradients are exchanged only in the last one.

    Run forward AND backward of each part before the next one, with a loss that is a mean over the part's
    samples. After `weigh_gradients(..., passes=passes)` the accumulated gradient is that of the whole batch.

    Args:
        model: in DistributedDataParallel, or sharded (fully_shard).
        batch: a tensor, or tuples, lists, mappings and dataclasses of them. Each tensor is cut along its
            first dimension; tensors without dimensions and all else go into every part.
        passes: the number of parts; default: the plan's for this rank.

    Yields:
        The parts, in order, of the batch's own type.

    Raises:
        FormatError: a tensor cannot be cut into equal parts, or the batch holds none to cut.
        UnsupportedError: the model is in neither of them.

    Example:
        >>> for part in qsync.micro_batches(model, batch):
        ...     loss_fn(model, part).backward()
        >>> optimizer.step()
    """
    parallel = ddp_of(model)
    if passes is None:
        passes = _shares.get(wrapped_module(model), (1, 1))[1]
    if parallel is None and passes == 1:  # a single process
        yield batch
        return
    if parallel is None and not isinstance(model, FSDPModule):
        raise UnsupportedError(
            f"micro_batches needs a model in DistributedDataParallel or fully_shard, found "
            f"{type(model).__name__}; wrap it first"
        )
    check_share(passes, passes)
    if passes > 1 and not _has_samples(batch):
        raise FormatError(
            f"the batch ({type(batch).__name__}) has no tensor to split into passes; give a tensor, or "
            "tuples, lists, mappings or dataclasses of them"
        )
    for k in range(passes):
        with nullcontext() if k == passes - 1 else _no_sync(parallel or model):
            yield _part(batch, k, passes)


@contextmanager
def _no_sync(parallel: torch.nn.Module) -> Iterator[None]:
    """Accumulate gradients of this rank without exchanging them."""
    if isinstance(parallel, DistributedDataParallel):
        with parallel.no_sync():
            yield
    elif isinstance(parallel, FSDPModule):
        parallel.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            parallel.set_requires_gradient_sync(True)


def of_samples(batch: Any, captured: int, samples: int) -> Any:
    """Return a batch of `captured` samples resized to another number: the first ones, or repeated."""

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
    """Return the batch with a function applied to each tensor that has a dimension."""
    if isinstance(batch, torch.Tensor):
        return cut(batch) if batch.ndim else batch
    if isinstance(batch, PackedSequence):
        raise UnsupportedError(
            "a PackedSequence cannot be split into passes, because its first dimension mixes samples; split "
            "padded sequences, and pack each part in the loss"
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
    """Return parts as a mapping of the batch's own type; as a dict if that type is immutable."""
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
    given.update(before)  # the copy shares the items
    return parts


def _has_samples(batch: Any) -> bool:
    """Return whether a batch has a tensor with a batch dimension."""
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
    """Average a bucket by sample weights: DDP's communication hook."""
    return weights.reduce(bucket.buffer(), bucket.index() == 0, bucket.parameters())


def batch_norms(model: torch.nn.Module) -> list[str]:
    """Return the paths of BatchNorms whose statistics cover only one rank and pass."""
    return [
        name for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, torch.nn.SyncBatchNorm)
    ]  # fmt: skip


def warn_of_batch_norm(model: torch.nn.Module) -> None:
    """Warn about BatchNorm in the model: its statistics change with shares and passes."""
    if norms := batch_norms(model):
        warnings.warn(
            f"the model has {len(norms)} BatchNorm ({norms[0].removeprefix('module.')}), whose statistics "
            "cover only one rank and pass, and so change with shares and passes; use SyncBatchNorm or "
            "GroupNorm, or neither shares nor passes",
            stacklevel=3,
        )
