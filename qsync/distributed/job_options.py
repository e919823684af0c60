"""Options of training jobs: the records that `hybrid`, `elastic` and profiling pass on whole.

The public functions explain each option. Defaults and checks are here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeGuard

import torch

from qsync.allocator import check_options
from qsync.api import LossFunction, trained_parameters
from qsync.distributed import accelerate_state
from qsync.distributed.data_parallel import check_ddp_options, check_not_parallel, settled_options
from qsync.distributed.gradient_weighting import batch_norms
from qsync.distributed.share_sampler import ShareSampler, sampler_of
from qsync.errors import FormatError, shortened
from qsync.operators.precision import Precision
from qsync.predictor.profiling.made_optimizer import MakeOptimizer
from qsync.records.base import parse_base
from qsync.records.compression import asked_kinds, check_compression
from qsync.records.graph import digest
from qsync.records.json_files import check_kind
from qsync.records.levers import ACCUMULATE, BUCKETS, SAVE_LESS, SHARE
from qsync.records.plans import Plan

LEAST_WITH_BATCH_NORM = 16  # samples of a pass
_OWN = ("other", "progress")  # options of `qsync.plan` that are objects of one rank


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Options that `qsync.hybrid` and `qsync.elastic` share; `plan_options` are those of `qsync.plan`."""

    loss_fn: LossFunction | None = None
    plan: Plan | Literal[False] | None = None
    device_class: str | None = None
    emulated_share: float | None = None
    precisions: Sequence[Precision | str] | None = None
    cache_dir: str | Path | None = None
    timeout_s: float = 60.0
    join_timeout_s: float = 600.0
    base: str | None = None
    bitwise: bool = False
    compression: str | None = None
    plan_options: Mapping[str, Any] = field(default_factory=dict)

    def check_shared(self, *also: str) -> None:
        """Raise FormatError for an unknown option, or an invalid share or class name.

        `also` are further arguments of the caller, as suggestions for a misspelt name.
        """
        names = [one.name for one in fields(self) if one.name != "plan_options"]
        check_options(self.plan_options, also=(*names, *also))
        share = self.emulated_share
        if share is not None and not (_is_number(share) and 0 < share <= 1):
            raise FormatError(
                f"emulated_share must be in (0, 1], found {shortened(share)}; leave it out for a whole core"
            )
        name = self.device_class
        if name is not None and not (isinstance(name, str) and name.strip()):
            raise FormatError(f"device_class must be a name, found {shortened(name)}; leave it out")
        check_compression(self.compression)

    @property
    def kinds(self) -> dict[str, str] | None:
        """Return the kinds in which gradients travel, by parameter; None for those of the plan."""
        return asked_kinds(self.compression)

    @property
    def for_plan(self) -> dict[str, Any]:
        """Return the options of `qsync.plan`, with the base."""
        return {**self.plan_options, **({"base": self.base} if self.base is not None else {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridOptions(JobOptions):
    """Options of `qsync.hybrid`."""

    make_optimizer: MakeOptimizer = torch.optim.AdamW
    bucket_cap_mb: float | None = None
    loader: Iterable[Any] | None = None
    ddp: bool = True
    ddp_options: Mapping[str, Any] | None = None
    log_steps: str | Path | None = None
    report: str | Path | None = None
    check: bool = False

    @property
    def bucket_cap_bytes(self) -> int | None:
        """Return the size of DDP's buckets in bytes; None for DDP's own."""
        return int(self.bucket_cap_mb * 2**20) if self.bucket_cap_mb else None

    @property
    def chooses_buckets(self) -> bool:
        """Return whether the plan chooses the size of buckets: of qsync's DDP, without a size from the user.

        With `bitwise` sums over three ranks and more stay DDP's own, to the bit.
        """
        is_given = self.bucket_cap_mb is not None or BUCKETS in self.levers or self.compression is not None
        return self.ddp and not self.bitwise and not is_given

    @property
    def sampler(self) -> ShareSampler | None:
        """Return the sampler from which the loader takes its batches, if it is a ShareSampler."""
        return sampler_of(self.loader)

    @property
    def levers(self) -> Sequence[str]:
        """Return the levers that a plan may use."""
        return self.plan_options.get("levers") or ()

    @property
    def takes_samples(self) -> bool:
        """Return whether ranks may take other numbers of samples than their batch has."""
        return not {SHARE, ACCUMULATE}.isdisjoint(self.levers)

    @property
    def may_save_less(self) -> bool:
        """Return whether operators may save less for backward."""
        return bool(self.plan_options.get("saving_less")) or SAVE_LESS in self.levers

    def settled(self, model: torch.nn.Module) -> HybridOptions:
        """Return the options checked, with those that follow from the loader, DDP and Accelerate."""
        options = replace(self, loader=getattr(self.loader, "base_dataloader", self.loader))
        options = replace(options, plan_options=options._with_shares(model))
        options._check_for(model)
        ddp = settled_options(options.ddp_options or {}, by_qsync=options.ddp)
        cap = ddp.get("bucket_cap_mb") if options.bucket_cap_mb is None else options.bucket_cap_mb
        if cap is not None and not (_is_number(cap) and 2**-20 <= cap < 2**43):
            raise FormatError(f"bucket_cap_mb must be positive, found {shortened(cap)}; DDP's default is 25")
        base = str(parse_base(options.base)) if options.base is not None else None
        return replace(options, ddp_options=ddp, bucket_cap_mb=cap, base=base)

    def _with_shares(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the options of a plan with the levers that a ShareSampler stands for, unless given."""
        found, sampler = dict(self.plan_options), self.sampler
        if sampler is not None:
            sampler.check_free(model)
            # Accelerate's loops take a batch in one pass: what they accumulate are global batches. The ranks
            # of a sharded model (without qsync's DDP) gather its parameters in every pass.
            in_one = accelerate_state.is_used() or not self.ddp
            found = {"levers": (SHARE,) if in_one else (SHARE, ACCUMULATE), **found}
        if replace(self, plan_options=found).takes_samples and batch_norms(model):
            found = {"least_samples": LEAST_WITH_BATCH_NORM, **found}
        return found

    def _check_for(self, model: torch.nn.Module) -> None:
        """Raise an error for invalid options, unusable DDP options, or a model that cannot be planned."""
        self.check_shared("example_batch")
        if "bucket_cap_bytes" in self.plan_options:
            raise FormatError("bucket_cap_bytes is of qsync.plan; give bucket_cap_mb, for the plan and DDP")
        if not isinstance(self.ddp, bool):
            raise FormatError(
                f"ddp must be True or False, found {shortened(self.ddp)}; leave it out for qsync's own DDP"
            )
        check_ddp_options(self.ddp_options if self.ddp_options is not None else {}, self.bucket_cap_mb)
        check_not_parallel(model)
        _check_trained(model)
        if isinstance(model, torch._dynamo.OptimizedModule):
            raise FormatError(
                "the model is compiled; give the plain one, and compile what qsync.hybrid returns"
            )
        self._check_first_steps()
        self._check_report()
        if self.plan is not None:
            check_kind(self.plan, Plan, "plan", "qsync.plan or qsync.Plan.load")

    def _check_first_steps(self) -> None:
        """Raise FormatError for a `check` that cannot be made."""
        if not isinstance(self.check, bool):
            raise FormatError(
                f"check must be True or False, found {shortened(self.check)}; leave it out for False"
            )
        if self.check and self.plan is not None:
            raise FormatError(
                "check=True corrects profiles, and a given plan has none here; leave one of them out"
            )
        changes_shares = self.sampler is not None and self.ddp and not accelerate_state.is_used()
        if self.check and self.levers and not changes_shares:
            raise FormatError(
                "check=True changes levers in a running loop only in qsync's own DDP, with a loader of a "
                "qsync.ShareSampler and without Accelerate; leave it out, or give levers=()"
            )

    def _check_report(self) -> None:
        """Raise FormatError for a `report` that cannot be written."""
        if self.report is None:
            return
        from qsync.figures import page  # imports matplotlib

        page.check_path(self.report, "report")
        if self.plan is not None:
            raise FormatError(
                "a given plan has no profiles here; leave report out, or use qsync report FOLDER"
            )
        page.check_available()

    def facts(self) -> dict[str, object]:
        """Return the settled options that must be equal on every rank, by their names in messages."""
        sampler, ddp = self.sampler, self.ddp_options or {}
        has_shares = bool(self.levers or (self.plan and self.plan.levers is not None))
        passes = "Accelerate's gradient_accumulation_steps"  # alike where ranks take equal batches
        return {
            "bucket_cap_mb": self.bucket_cap_mb,
            "the plan": digest(self.plan.to_json()) if isinstance(self.plan, Plan) else "none",
            "a loader": "given" if self.loader is not None else "none",
            "the base": self.base,
            "the global batch of the loader": sampler.global_batch if sampler is not None else 0,
            "bitwise": self.bitwise, "ddp": self.ddp, "check": self.check,
            "compression": self.compression or "none",
            "a report": self.report is not None,
            **({} if has_shares else {passes: accelerate_state.num_passes()}),
            **{name: value for name, value in self.plan_options.items()
               if value is not None and name not in _OWN},
            **{f"DDP's {name}": value for name, value in ddp.items() if isinstance(value, bool)},
        }  # fmt: skip


def _check_trained(model: torch.nn.Module) -> None:
    """Raise an error for a model without trained parameters, or whose first batch makes parameters."""
    if any(map(torch.nn.parameter.is_lazy, (*model.parameters(), *model.buffers()))):
        raise FormatError(
            f"{type(model).__name__} has parameters that its first batch makes (LazyLinear and others); "
            "call it on a batch once, before qsync.hybrid"
        )
    trained_parameters(model)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
