"""Shares of the batch in `hybrid`: the batches that are profiled, and who takes how many samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from qsync.allocator.levers.shares import BatchShares
from qsync.allocator.planner import Options
from qsync.backend.devices.device_detection import device_of
from qsync.distributed import job
from qsync.distributed.agreement import agree, agree_locally, from_rank_zero
from qsync.distributed.gradient_weighting import of_samples
from qsync.distributed.share_sampler import ShareSampler
from qsync.distributed.shares import Share
from qsync.errors import CalibrationError
from qsync.predictor.profiling.loader_wait import first_batch, undrawn
from qsync.records.cluster import DeviceClass
from qsync.records.graph import OpGraph
from qsync.records.levers import ACCUMULATE, SHARE, samples_of
from qsync.records.plan_folder import Basis
from qsync.records.plans import Plan
from qsync.tracing.held_state import undisturbed

_OF_PLANNER = {field.name for field in fields(Options)}


@dataclass(frozen=True, slots=True)
class Batches:
    """The batch that a rank is profiled on: the caller's example, or drawn from the loader."""

    model: torch.nn.Module
    example: Any
    loader: Iterable[Any] | None
    sampler: ShareSampler | None

    @property
    def equal(self) -> int | None:
        """The samples of an equal share, if a sampler hands them out."""
        return self.sampler.global_batch // job.world_size() if self.sampler is not None else None

    def first(self) -> Any:
        """Return the batch that a plan is for: the example, or the loader's first of an equal share."""
        return self.example if self.example is not None else self._drawn(self.equal)

    def check(self, graph: OpGraph) -> None:
        """Raise CalibrationError where the batch of a sampler does not begin with its samples."""
        if self.equal is not None and (found := samples_of(graph)) != self.equal:
            raise CalibrationError(
                f"the first tensor of a batch of {self.equal} samples has a first dimension of {found}; let "
                "the loader's collate_fn put samples first, and give no example_batch of another size"
            )

    def _drawn(self, samples: int | None) -> Any:
        """Return the loader's first batch on the model's device, and leave nothing drawn."""
        if self.loader is None:
            return None
        drawing = self.sampler.drawing(samples) if self.sampler is not None and samples else nullcontext()
        with undisturbed(self.model), undrawn(self.loader), drawing:
            found = first_batch(self.loader)
        device = device_of(self.model)
        return tree_map(lambda part: part.to(device) if hasattr(part, "to") else part, found)


def that_can_be(options: Mapping[str, Any], classes: Sequence[DeviceClass]) -> dict[str, Any]:
    """Return the options without a ShareSampler's levers where all ranks are of one class."""
    is_default = options.get("levers") in ((SHARE,), (SHARE, ACCUMULATE))
    dropped = ("levers", "least_samples") if is_default and len(classes) == 1 else ()
    return {name: value for name, value in options.items() if name not in dropped}


def batch_of_share(step: job.TrainingStep, rank: job.Rank, options: Mapping[str, Any], basis: Basis) -> Any:
    """Return a batch of about as many samples as this rank's class will take."""

    def guess() -> dict[str, int]:
        known = {name: value for name, value in options.items() if name in _OF_PLANNER}
        least = options.get("least_samples", 1)
        return BatchShares(basis, None, options["levers"], known, least).guess()

    samples = from_rank_zero("sharing the batch", guess)[rank.device_class.name]
    captured = samples_of(basis.graph)
    # Of the same samples: those of another draw may be padded to another length.
    return agree_locally("making a second batch", lambda: of_samples(step.batch, captured, samples))


def hand_out_shares(
    sampler: ShareSampler, model: torch.nn.Module, plan: Plan, device_class: str, later: bool = False
) -> tuple[Share, int]:
    """Let the sampler of every rank hand out what the plan gives its class; return this rank's share.

    With `later`, from the first step on that no rank's loader has drawn. Returns also how many steps the loop
    takes before that.
    """

    def own() -> tuple[int, ...]:
        levers = plan.levers_of(device_class)
        samples = levers.samples or sampler.global_batch // job.world_size()
        return samples, levers.passes, *sampler.ahead()

    samples, passes, steps, undrawn_steps = zip(*agree("sharing the batch", own), strict=True)
    since = max(undrawn_steps) if later else None
    shares = agree_locally("sharing the batch", lambda: sampler.take_shares(model, samples, passes, since))
    rank = dist.get_rank() if dist.is_initialized() else 0
    return shares[rank], since - steps[rank] if since is not None else 0
