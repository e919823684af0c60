"""Give each rank a batch of sequences with equal predicted time: a batch sampler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from qsync.distributed import accelerate_state
from qsync.distributed.agreement import agree, check_same
from qsync.distributed.monitoring.drift_monitor import prediction_of
from qsync.distributed.share_sampler import RankSampler
from qsync.errors import FormatError, MismatchError, UnsupportedError
from qsync.records.graph import digest
from qsync.records.json_files import check_whole
from qsync.records.levers import SHARE
from qsync.replayer.costs.sequence_costs import SequenceCost, hand_out
from qsync.runtime.wrapping import plan_of


class LengthSampler(RankSampler):
    """Batch sampler of sequences that balances predicted time over ranks.

    Of every `batch_size` sequences each rank gets a run of similar lengths, by predicted time under the plan
    (attention's quadratic cost included). Ranks then differ in sequences and tokens: weight their losses with
    `qsync.token_mean`. Build it on every rank of the job.

    Args:
        model: the result of `qsync.hybrid`; its plan and profiles give the cost of a sequence.
        lengths: the number of tokens of every sequence of the dataset.
        batch_size: sequences of one step, on all ranks together.
        shuffle: shuffle the sequences in every epoch, equally on every rank.
        seed: seed of the order; the epoch is added to it.
        drop_last: drop sequences that do not fill a batch. Otherwise the last batch is smaller; if it has
            less than one sequence per rank, it wraps around to the first sequences.
        max_tokens: the largest number of padded tokens of a rank in a step.
        costs: class -> cost of a sequence, instead of the plan's.

    Raises:
        UnsupportedError: a plan with shares of the batch; use its ShareSampler.
        FormatError: invalid lengths or sizes.
        MismatchError: a model without a prediction, or ranks with different lengths.

    Example:
        >>> sampler = qsync.LengthSampler(model, [len(row) for row in rows], batch_size=64)
        >>> loader = DataLoader(rows, batch_sampler=sampler, collate_fn=pad)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        lengths: Sequence[int],
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        max_tokens: int | None = None,
        costs: Mapping[str, SequenceCost] | None = None,
    ) -> None:
        found = prediction_of(model)

        def own_class() -> str:
            plan = plan_of(model)
            if plan is not None and plan.levers is not None and SHARE in plan.levers.used:
                raise UnsupportedError(
                    "the plan already divides the batch by samples, which a LengthSampler would divide by "
                    "time; plan with levers=(), or use the plan's ShareSampler"
                )
            check_whole("batch_size", batch_size, 1)
            check_whole("max_tokens", max_tokens or 1, 1)
            if not len(lengths) or not all(int(length) > 0 for length in lengths):
                raise FormatError(
                    "lengths must be positive whole numbers; give the number of tokens of each sequence"
                )
            if found is None or (costs or found[0].sequence_costs) is None:
                raise MismatchError(
                    "this model has no predicted cost per sequence: pass the model that qsync.hybrid "
                    "returned in a job, planned on a batch of shape (sequences, length)"
                )
            return found[1]

        classes = agree("reading lengths", own_class)
        known = costs or (found[0].sequence_costs if found else None) or {}
        for name in classes:
            if name not in known:
                raise MismatchError(
                    f"class {name} has no sequence costs, only {', '.join(known)}; add them to costs="
                )
        check_same(
            {"the lengths of sequences": digest([int(n) for n in lengths]), "the batch size": batch_size}
        )
        self.costs = [known[name] for name in classes]
        self._rank = dist.get_rank() if len(classes) > 1 else 0
        self._lengths, self._batch_size = [int(length) for length in lengths], batch_size
        self._shuffle, self._seed, self._drop_last, self._max_tokens = shuffle, seed, drop_last, max_tokens
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch from now on."""
        if not accelerate_state.counts_epochs():
            self._epoch = epoch

    def __len__(self) -> int:
        whole, rest = divmod(len(self._lengths), self._batch_size)
        return whole + (rest > 0 and not self._drop_last)

    def steps(self) -> Iterator[list[list[int]]]:
        """Yield, for each step, the sequences of every rank."""
        order = list(range(len(self._lengths)))
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self._epoch)
            order = torch.randperm(len(order), generator=generator).tolist()
        for k in range(len(self)):
            chosen = order[k * self._batch_size : (k + 1) * self._batch_size]
            while len(chosen) < len(self.costs):
                chosen = [*chosen, *order[: len(self.costs) - len(chosen)]]
            taken = hand_out([self._lengths[i] for i in chosen], self.costs, self._max_tokens)
            yield [[chosen[i] for i in own] for own in taken]

    def __iter__(self) -> Iterator[list[int]]:
        accelerate_state.check_not_dispatched()
        for step in self.steps():
            yield step[self._rank]
