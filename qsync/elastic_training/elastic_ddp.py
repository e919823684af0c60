"""DDP over a changing process group: a failed exchange costs the step, not the process.

Between two changes it equals plain DDP: same buckets (rebuilt after the first backward), same sums.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from qsync.distributed.data_parallel import HybridDDP
from qsync.distributed.gradient_codecs import CompressedExchange, Piece
from qsync.distributed.gradient_weighting import GradientHook

logger = logging.getLogger("qsync")


class MembershipGroup:
    """The current membership's process group (torchft's, reconfigurable), and its failure state.

    After a failure nothing is exchanged until the next `form`.
    """

    def __init__(self, timeout_s: float, backend: str) -> None:
        groups: Any = import_module("torchft.process_group")
        kind = groups.ProcessGroupNCCL if backend == "nccl" else groups.ProcessGroupGloo
        self._reconfigurable = kind(timeout=timedelta(seconds=timeout_s))
        self.failure: BaseException | None = None

    def form(self, store: str, rank: int, size: int) -> dist.ProcessGroup:
        """Leave the current group and form one of `size` ranks. Raises RuntimeError if a rank is missing."""
        self._reconfigurable.configure(store, str(rank), rank, size)
        self.failure = None
        group: dist.ProcessGroup = self._reconfigurable.parent
        return group

    def close(self) -> None:
        """Leave the group."""
        self._reconfigurable.abort(errored=False)

    def fail(self, error: BaseException) -> None:
        """Record that this step's gradients are lost."""
        if self.failure is None:
            self.failure = error
            logger.info("qsync: an exchange failed (%s); the step is repeated", str(error).strip()[:200])

    def all_reduce(
        self, sent: torch.Tensor, group: dist.ProcessGroup | None
    ) -> torch.futures.Future[list[torch.Tensor]]:
        """Sum a tensor over all cards. The future never raises: after a failure it holds zeros."""
        if self.failure is None:
            try:
                work = dist.all_reduce(sent, group=group, async_op=True)
                return work.get_future().then(lambda done: self._value(done, sent))  # type: ignore[no-any-return]
            except RuntimeError as error:
                self.fail(error)
        nothing: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        nothing.set_result([torch.zeros_like(sent)])
        return nothing

    def _value(
        self, done: torch.futures.Future[list[torch.Tensor]], sent: torch.Tensor
    ) -> list[torch.Tensor]:
        try:
            return done.value()
        except RuntimeError as error:
            self.fail(error)
            return [torch.zeros_like(sent)]


class ElasticExchange(CompressedExchange):
    """Sum compressed buckets over the current cards; after a failure they are zeros, as in `all_reduce`.

    What error feedback carries begins anew with every group: a card that joins has none.
    """

    is_saved = False

    def __init__(
        self,
        model: torch.nn.Module,
        kinds: Mapping[str, str],
        group: dist.ProcessGroup,
        exchange: MembershipGroup,
    ) -> None:
        super().__init__(model, kinds, group)
        self._exchange = exchange

    def _sum(self, gradients: torch.Tensor, pieces: Sequence[Piece]) -> None:
        if self._exchange.failure is None:
            try:
                super()._sum(gradients, pieces)
                return
            except RuntimeError as error:
                self._exchange.fail(error)
        gradients.zero_()


class ElasticHook(GradientHook):
    """DDP's communication hook of an elastic job: weight gradients by samples, then exchange them.

    If all cards have equally many samples, in one pass each, it averages as plain DDP does.
    """

    def __init__(self, exchange: MembershipGroup) -> None:
        super().__init__(None)
        self._exchange = exchange
        self.last_s = 0.0  # time of the last bucket's hand-over: on a CPU the end of backward
        self.num_equal = 0  # number of cards, if all have equally many samples
        self.is_complete = False  # whether all buckets of this step were handed over
        self.num_reduced = 0  # number of times that all buckets were handed over in this step
        self._is_plain = False  # whether this step averages as plain DDP does
        self.is_behind = False  # whether this card's state is behind; its gradients then do not count

    def _take(self, gradients: torch.Tensor) -> tuple[float, torch.Tensor | float, bool]:
        factor, weight, is_counted = super()._take(gradients)
        return (0.0, 0.0 * weight, is_counted) if self.is_behind else (factor, weight, is_counted)

    def exchange(self, sent: torch.Tensor) -> torch.futures.Future[list[torch.Tensor]]:
        """Sum a tensor over the current cards."""
        return self._exchange.all_reduce(sent, self.group)

    def reduce(
        self, buffer: torch.Tensor, is_first: bool, parameters: Sequence[torch.Tensor] = ()
    ) -> torch.futures.Future[torch.Tensor]:
        """Return a bucket's mean over all samples of the step."""
        self.last_s = time.perf_counter()
        if self.is_behind:
            buffer.zero_()  # gradients of an untrained state may be NaN
        if is_first:  # resets the tokens counted by token_mean
            self._is_plain = bool(self.num_equal) and self.num_counted is None and self.compressed is None
        if not self._is_plain:
            return super().reduce(buffer, is_first, parameters)
        buffer.mul_(1.0 / self.num_equal)
        done = self.exchange(buffer)
        return done.then(lambda sums: buffer.copy_(sums.value()[0]))


def average_elastic_bucket(hook, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text
    """Average a bucket over the current cards: DDP's communication hook."""
    hook.is_complete = bucket.is_last()
    hook.num_reduced += hook.is_complete
    return hook.reduce(bucket.buffer(), bucket.index() == 0, bucket.parameters())


class ElasticDDP(HybridDDP):
    """DDP whose process group is replaced when cards join or leave (`reform`).

    `kinds` says how gradients travel, by parameter (`qsync.records.compression.kind_of`).
    """

    def __init__(
        self,
        module: torch.nn.Module,
        exchange: MembershipGroup,
        kinds: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        # Gradients are bucket views: one pass that divides replaces two that copy.
        super().__init__(module, init_sync=False, gradient_as_bucket_view=True, **options)
        self._exchange, self._kinds = exchange, kinds
        self.hook = ElasticHook(exchange)
        self.register_forward_pre_hook(self.hook.begin)
        self.reform(self.process_group)

    def reform(self, group: dist.ProcessGroup) -> None:
        """Switch to another process group, with a new DDP's buckets, as on cards that join."""
        self._comm_hooks.clear()
        del self.reducer, self.logger  # the old reducer removes its hooks
        self.process_group = group
        parameters, expect_sparse = self._build_params_for_reducer()  # type: ignore[no-untyped-call]
        names = self._build_debug_param_to_name_mapping(parameters)  # type: ignore[no-untyped-call]
        self._ddp_init_helper(parameters, expect_sparse, names, self.static_graph)  # type: ignore[no-untyped-call]
        self._has_rebuilt_buckets, self.require_forward_param_sync = False, True
        self.let_group_outlive_reducer()
        self.hook.group, self.hook.compressed = group, None
        if self._kinds is not None and group.size() > 1:
            self.hook.compressed = ElasticExchange(self.module, self._kinds, group, self._exchange)
        self.register_comm_hook(self.hook, average_elastic_bucket)

    def broadcast_state(self) -> None:
        """Broadcast rank 0's weights and buffers, before the first step of a job."""
        try:
            for value in self.module.state_dict().values():
                if isinstance(value, torch.Tensor):  # modules may have extra state that is not a tensor
                    dist.broadcast(value.detach(), group=self.process_group, group_src=0)
        except RuntimeError as error:
            self._exchange.fail(error)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model; without gradients nothing is exchanged, so one card may evaluate alone."""
        if not torch.is_grad_enabled():
            return self.module(*inputs, **kwargs)
        return super().forward(*inputs, **kwargs)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Prepare DDP for a call, which may exchange buffers and the order of gradients."""
        try:
            return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "finished reduction" in str(error):  # the last step's backward did not reach all parameters
                raise
            self._exchange.fail(error)
        return inputs, kwargs
