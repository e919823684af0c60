"""A batch sampler that hands every rank its share of each global batch."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, Sampler

from qsync.distributed import accelerate_state
from qsync.distributed.monitoring.loader_batches import listen
from qsync.distributed.shares import SampleOrder, Share, share_out
from qsync.errors import FormatError, MismatchError, shortened
from qsync.records.json_files import check_whole


class RankSampler(Sampler[list[int]]):
    """A batch sampler whose batches are one rank's own: frameworks hand out all of them."""

    @property
    def batch_size(self) -> None:
        """Return None, as batches differ. Accelerate, which shards batch samplers, asks for this first."""
        accelerate_state.leave_whole()

    @property
    def sampler(self) -> RankSampler:
        """Return itself: frameworks look here for what draws an epoch."""
        return self


class ShareSampler(RankSampler):
    """Batches of a dataset for one rank: its share of every global batch.

    Stands where DistributedSampler stood, as `batch_sampler` of a DataLoader. The samples of step s are those
    at the places [s B, (s + 1) B) of an endless stream, in which every epoch is one permutation of the
    dataset: they are the same whatever the shares, each exactly once an epoch. Where B does not divide the
    dataset, the last batch of an epoch is filled up from the next one, which begins behind these samples. All
    batches have B samples. (`qsync.elastic` takes the same order.)

    Until `qsync.hybrid(model, loader=loader)` has chosen shares, all ranks take equally many samples.

    Args:
        data: the dataset, or its length.
        batch_size: B, the samples of one step on all ranks together.
        shuffle: draw every epoch in another order, the same on every rank; without it in the dataset's own.
        seed: of the order.

    Raises:
        FormatError: a dataset without a length or with fewer samples than a batch, or a size that is none.

    Example:
        >>> sampler = qsync.ShareSampler(dataset, batch_size=256)
        >>> loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)
        >>> model = qsync.hybrid(model, loader=loader, loss_fn=loss_fn)
        >>> for epoch in range(epochs):
        ...     sampler.set_epoch(epoch)
        ...     for batch in loader:
        ...         for part in qsync.micro_batches(model, batch):
        ...             loss_fn(model, part).backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
    """

    def __init__(
        self, data: Sized | int | SampleOrder, batch_size: int, *, shuffle: bool = True, seed: int = 0
    ) -> None:
        self._data = data
        length = self._length()
        check_whole("batch_size", batch_size, 1)
        check_whole("the length of the dataset", length, 1)
        check_whole("seed", seed, 0)
        if length < batch_size:
            raise FormatError(
                f"a global batch of {batch_size} samples is more than the dataset, which has {length}; give "
                "a smaller batch_size"
            )
        self.global_batch = batch_size
        self._order = data if isinstance(data, SampleOrder) else SampleOrder(length, seed, bool(shuffle))
        self._shares: list[Share] | None = None  # by rank; None: equal ones
        self._later: tuple[int, list[Share]] | None = None  # shares from a later step on
        self._changes = 0
        self._epoch = 0  # of the iteration under way, or of the next one
        self._is_set = False  # by `set_epoch`: the next iteration is of that epoch
        self._start: int | None = None  # of the next iteration: a step that was loaded
        self._begun = 0  # the first step of the iteration under way
        self._num_yielded = 0  # batches of it that were asked for
        self._num_fetched: int | None = None  # batches of it that a loader has handed out; None: no loader
        self._model: Any = type(None)  # called, it gives the model whose plan chose the shares
        listen(self)

    def _length(self) -> Any:
        if isinstance(self._data, int):
            return self._data
        if isinstance(self._data, SampleOrder):
            return self._data.num_samples
        if isinstance(self._data, Sampler):
            raise FormatError(
                f"ShareSampler stands in the place of other samplers, found {type(self._data).__name__}; "
                "give the dataset, or its length"
            )
        try:
            if isinstance(self._data, IterableDataset):
                raise TypeError
            return len(self._data)
        except TypeError:
            raise FormatError(
                f"ShareSampler needs a dataset with a length, found {type(self._data).__name__}; give its "
                "length, or draw qsync.samples_of(model) samples a step in the loop"
            ) from None

    @property
    def share(self) -> Share:
        """This rank's part of a step: the place of its first sample, how many they are, in how many passes.

        Raises FormatError for a global batch of fewer samples than ranks, MismatchError for shares of other
        ranks.
        """
        rank, num_ranks = _place()
        if num_ranks > self.global_batch:
            raise FormatError(
                f"a global batch of {self.global_batch} samples is fewer than the {num_ranks} ranks; give a "
                "larger batch_size"
            )
        shares = self._shares or share_out(self.global_batch, [1.0] * num_ranks, [None] * num_ranks)
        if len(shares) != num_ranks:
            raise MismatchError(
                f"the shares are those of {len(shares)} ranks, and this job has {num_ranks}; call "
                "qsync.hybrid in this job"
            )
        return shares[rank]

    @property
    def is_equal(self) -> bool:
        """Return whether all ranks take equally many samples, in one pass."""
        return self._shares is None or {(one.samples, one.passes) for one in self._shares} == {
            (self._shares[0].samples, 1)
        }

    def check_free(self, model: torch.nn.Module) -> None:
        """Raise FormatError where another model's plan has chosen the shares."""
        if self._model() not in (None, model):
            raise FormatError(
                "the loader's ShareSampler gives its batches to another model already; give each model a "
                "loader of its own"
            )

    def take_shares(
        self,
        model: torch.nn.Module,
        samples: Sequence[int],
        passes: Sequence[int],
        since: int | None = None,
    ) -> list[Share]:
        """Hand out these samples a step, by rank, from the next iteration on, or from a step that none drew.

        Returns the shares by rank.

        Where a plan's shares do not make up the batch, because ranks do not divide it, the first ranks that
        can take one sample more or fewer. Raises MismatchError where that is not enough.
        """
        self._model = weakref.ref(model)
        taken, missing = list(samples), self.global_batch - sum(samples)
        step = 1 if missing > 0 else -1
        for rank, each in enumerate(passes):
            if missing and each == 1 and taken[rank] + step >= 1:
                taken[rank] += step
                missing -= step
        if missing:
            raise MismatchError(
                f"the plan's shares make {sum(samples)} samples a step, and the sampler's batch has "
                f"{self.global_batch}; plan again with these ranks and this batch_size"
            )
        starts = [sum(taken[:rank]) for rank in range(len(taken))]
        shares = [Share(*one) for one in zip(starts, taken, passes, strict=True)]
        if since is None:
            self._shares = shares
            self._changes += 1
        else:
            self._later = since, shares
        return shares

    def share_as(self, other: ShareSampler) -> None:
        """Hand out what another sampler of the same model hands out, made anew for each of its loaders."""
        if other is not self and other._shares is not None:
            samples, passes = [one.samples for one in other._shares], [one.passes for one in other._shares]
            self.take_shares(other._model(), samples, passes)

    @contextmanager
    def drawing(self, samples: int) -> Iterator[None]:
        """Let this rank draw so many samples a step inside; afterwards nothing is drawn."""
        before = {name: value for name, value in vars(self).items() if name not in ("_data", "_changes")}
        _, num_ranks = _place()
        self._shares = [Share(0, samples, 1)] * num_ranks
        try:
            yield
        finally:
            vars(self).update(before)
            self._changes += 1

    def set_epoch(self, epoch: int) -> None:
        """Draw this epoch in the next iteration; without it epochs follow one another.

        After `load_state_dict` of a step in this epoch, the next iteration is the rest of it.
        """
        check_whole("the epoch", epoch, 0)
        if not accelerate_state.counts_epochs():
            self._epoch, self._is_set = epoch, True

    def state_dict(self) -> dict[str, int]:
        """Return where the loop stands: the step of the next batch. Batches loaded ahead do not count."""
        if self._start is not None or self._is_set:
            return {"step": self._next()[1]}
        if self._num_fetched is None:
            return {"step": self._begun + self._num_yielded}
        return {"step": self._begun + self._num_fetched - accelerate_state.num_ahead(self)}

    def ahead(self) -> tuple[int, int]:
        """Return the step of the loop's next batch, and the first step that no loader has drawn yet."""
        step = self.state_dict()["step"]
        return step, max(step, self._begun + self._num_yielded)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a step, with any number of ranks. Raises FormatError for another state."""
        step = state.get("step") if isinstance(state, Mapping) else None
        if type(step) is not int or step < 0:
            raise FormatError(
                f"the state of a ShareSampler holds its step, found {shortened(state)}; give what state_dict "
                "returned"
            )
        self._start, self._is_set = step, False

    def _next(self) -> tuple[int, int]:
        """Return the epoch of the next iteration, and its first step."""
        epoch, start = self._epoch, self._start
        if not self._is_set:
            if start is not None:
                epoch = start * self.global_batch // self._order.num_samples
            elif self._begun + self._num_yielded >= self._first(epoch + 1):  # taken to its end
                epoch += 1
        first = self._first(epoch)
        is_inside = start is not None and first <= start <= self._first(epoch + 1)
        return epoch, start if start is not None and is_inside else first

    def _first(self, epoch: int) -> int:
        return self._order.first_step(epoch, self.global_batch)

    def __len__(self) -> int:
        """Return the number of batches of the epoch."""
        epoch, _ = self._next()
        return self._first(epoch + 1) - self._first(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        if self._length() != self._order.num_samples:
            raise FormatError(
                f"the dataset has {self._length()} samples, and had {self._order.num_samples} when its "
                "ShareSampler was made; make a new sampler"
            )
        accelerate_state.check_not_dispatched()
        # A loader asks for iterators that it does not use: one begins with its first batch.
        self._epoch, self._begun = self._next()
        self._start, self._is_set = None, False
        self._num_yielded, self._num_fetched = 0, None
        own, changes = self.share, self._changes
        for step in range(self._begun, self._first(self._epoch + 1)):
            if changes != self._changes:
                raise MismatchError(
                    "the shares of the batch have changed since this loader was begun; begin it anew, with "
                    "iter(loader)"
                )
            if self._later is not None and step >= self._later[0]:
                (_, self._shares), self._later = self._later, None
                own = self.share
            self._num_yielded += 1
            yield self._order.indices(step * self.global_batch + own.start, own.samples)

    @contextmanager
    def fetching(self, batches: Any) -> Iterator[None]:
        """Count the batches that a loader of this sampler has handed out."""
        yield
        index_sampler = getattr(batches, "_index_sampler", None)
        samplers = [index_sampler, *accelerate_state.inner_samplers(index_sampler)]
        if self in samplers:
            skipped = sum(getattr(one, "skip_batches", 0) for one in samplers)
            self._num_fetched = skipped + batches._num_yielded
            if self._first(self._epoch) <= self._begun <= self._first(self._epoch + 1):
                self._is_set = False  # as Lightning sets an epoch whose iteration has begun

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_model": type(None)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        listen(self)


def _place() -> tuple[int, int]:
    """Return this process's rank and the number of ranks: of the job, or of the one that torchrun began."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def sampler_of(loader: object) -> ShareSampler | None:
    """Return the ShareSampler that a loader takes its batches from, if any.

    Raises FormatError where it is in another place than `batch_sampler`.
    """
    for place in ("sampler", "dataset"):
        if isinstance(getattr(loader, place, None), ShareSampler):
            raise FormatError(
                f"the loader has the ShareSampler as its {place}; give DataLoader(dataset, "
                "batch_sampler=sampler), without batch_size, shuffle and sampler"
            )
    found = accelerate_state.inner_samplers(loader)
    return next((one for one in found if isinstance(one, ShareSampler)), None)
