"""A batch sampler that hands every rank the sequences it takes as long for as the other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from qsync.distributed import accelerate_state
from qsync.distributed.agreement import agree, check_same
from qsync.distributed.monitoring.drift_monitor import prediction_of
from qsync.distributed.share_sampler import RankSampler
from qsync.errors import FormatError, MismatchError, UnsupportedError, shortened
from qsync.records.graph import digest
from qsync.records.levers import SHARE
from qsync.replayer.costs.sequence_costs import SequenceCost, hand_out
from qsync.runtime.wrapping import plan_of


class LengthSampler(RankSampler):
    """Batches of sequences for one rank: those that it takes as long for as the others for theirs.

    Of every `batch_size` sequences each rank gets a run of similar lengths, by what they are predicted to
    take there under the plan, attention's square of the length included. Ranks then have other numbers of
    sequences and tokens: weigh their losses (`qsync.token_mean`). Built on every rank of the job.

    Args:
        model: what `qsync.hybrid` returned; its plan and profiles say what a sequence costs.
        lengths: the number of tokens of every sequence of the dataset.
        batch_size: sequences of one step, on all ranks together.
        shuffle: draw the sequences of each epoch in another order; the same on every rank.
        seed: of the order; the epoch is added to it.
        drop_last: leave out sequences that fill no batch; without it the last batch takes as many ranks as
            it can, and wraps round to the first sequences if it has fewer than one a rank.
        max_tokens: the most padded tokens that a rank may take in a step.
        costs: class -> cost of a sequence, instead of the plan's.

    Raises:
        UnsupportedError: a plan with shares of the batch, which a ShareSampler hands out.
        FormatError: lengths or sizes that cannot be used.
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
                    "the plan shares the batch out by samples already, and a LengthSampler hands it out by "
                    "predicted times; plan with levers=(), or take the batches of the plan's ShareSampler"
                )
            for what, number in (("batch_size", batch_size), ("max_tokens", max_tokens or 1)):
                if type(number) is not int or number < 1:
                    raise FormatError(
                        f"{what} must be a whole number of at least 1, found {shortened(number)}"
                    )
            if not len(lengths) or not all(int(length) > 0 for length in lengths):
                raise FormatError("lengths must be positive whole numbers, one for each sequence")
            if found is None or (costs or found[0].sequence_costs) is None:
                raise MismatchError(
                    "nothing is predicted of this model's sequences: give what qsync.hybrid returned in a "
                    "job, planned on a batch of shape (sequences, length)"
                )
            return found[1]

        classes = agree("reading lengths", own_class)
        known = costs or (found[0].sequence_costs if found else None) or {}
        for name in classes:
            if name not in known:
                raise MismatchError(
                    f"no sequence costs are known of {name}; there are those of {', '.join(known)}"
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
        """Draw the order of this epoch from now on."""
        if not accelerate_state.counts_epochs():
            self._epoch = epoch

    def __len__(self) -> int:
        whole, rest = divmod(len(self._lengths), self._batch_size)
        return whole + (rest > 0 and not self._drop_last)

    def steps(self) -> Iterator[list[list[int]]]:
        """Yield by step the sequences of every rank."""
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
