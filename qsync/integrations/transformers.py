"""Hugging Face Trainer that plans its model before wrapping it in DDP."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from copy import copy
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

from qsync.api import unwrap
from qsync.distributed.agreement import agree_locally, check_same
from qsync.distributed.gradient_weighting import note_share, set_share
from qsync.distributed.job import is_rank_zero
from qsync.distributed.share_sampler import ShareSampler, sampler_of
from qsync.distributed.shares import SampleOrder
from qsync.errors import FormatError, UnsupportedError
from qsync.hybrid_training.hybrid_job import hybrid
from qsync.integrations.supported_versions import check_version
from qsync.integrations.trainer_plans import check_hybrid_options, needs_sampler, warn_of_other_plan
from qsync.predictor.profiling.made_optimizer import maker_of
from qsync.records.plans import Plan
from qsync.runtime.wrapping import plan_of
from qsync.tracing.held_state import undisturbed

_PLAN_FILE = "qsync_plan.json"  # the plan's file in a checkpoint
# Settings that determine batches: ranks that differ in them would wait for each other forever.
_SAME_ON_RANKS = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16", "max_grad_norm",
    "max_steps", "num_train_epochs", "gradient_checkpointing", "label_smoothing_factor", "optim",
)  # fmt: skip
_Base: Any = transformers.Trainer if TYPE_CHECKING else object


class QSyncMixin(_Base):  # type: ignore[misc]  # the library is untyped
    """Mixin that makes a Trainer class plan and train its model over unequal ranks.

    List it before the Trainer class. At the start of training it plans the model on a training batch, with
    the Trainer's own loss, and wraps it in DDP. Ranks train on shares of the Trainer's global batches. The
    Trainer's `bf16` and `fp16` set the plan's base; its DDP arguments also apply to profiling. A checkpoint
    holds its plan, and loads with or without qsync.

    Args:
        *args: the Trainer's.
        hybrid_options: arguments of `qsync.hybrid` by name, such as `emulated_share` or `slack`.
        **kwargs: the Trainer's.

    Raises:
        UnsupportedError: another version of the library, or arguments that wrap or compile the model in
            another way (FSDP, DeepSpeed, DataParallel, torch_compile).
        FormatError: options that the Trainer sets itself, or shares without a sampler for them.
        MismatchError: ranks with different arguments.

    Example:
        >>> class MyTrainer(QSyncMixin, transformers.Seq2SeqTrainer): ...
    """

    def __init__(self, *args: Any, hybrid_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        check_version("transformers")
        check_version("accelerate")
        super().__init__(*args, **kwargs)
        self._hybrid_options = dict(hybrid_options or {})
        self._logged = 1.0  # weight of this rank's losses in the Trainer's logged mean

    def get_train_dataloader(self) -> Any:
        """Return the Trainer's own loader, with a ShareSampler in place of Accelerate's sharding."""
        loader = super().get_train_dataloader()
        if super().get_train_dataloader.__module__ == "transformers.trainer":
            _hand_out_shares(loader)
        return loader

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Train on a batch; log losses as the mean over samples."""
        loss: torch.Tensor = super().training_step(*args, **kwargs) * self._logged
        return loss

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        """Plan and wrap the model before training; the Trainer calls this once per `train`."""
        if not training or self.accelerator.unwrap_model(model, keep_torch_compile=False) is not model:
            return super()._wrap_model(model, training, dataloader)
        if plan_of(model) is not None:  # after a too large batch size the Trainer wraps again
            unwrap(model)
        agree_locally("checking the Trainer's arguments", self._check_arguments)
        check_same({f"the Trainer's {name}": getattr(self.args, name) for name in _SAME_ON_RANKS})
        model.train()
        self.log = lambda *_, **__: None  # the loss may log
        try:
            arguments, divides_by_tokens = self._arguments()
            wrapped = hybrid(model, **arguments)
        finally:
            del self.log
        sampler, self._logged = sampler_of(arguments.get("loader")), 1.0
        if sampler is not None and not sampler.is_equal:
            if divides_by_tokens:  # tokens of all ranks: the sum of gradients is the step's gradient
                set_share(wrapped, 1, 1, self.args.world_size)
                note_share(wrapped, sampler.share.samples)
            else:
                self._logged = sampler.share.samples * self.args.world_size / sampler.global_batch
        if wrapped is model:  # one process: keep Accelerate from adding torch.autocast
            setattr(model, "_is_accelerate_prepared", True)  # noqa: B010
            return model
        return self.accelerator.prepare_model(wrapped)

    def _arguments(self) -> tuple[dict[str, Any], bool]:
        """Return the arguments of `qsync.hybrid`, and whether losses are divided by the step's tokens."""
        ddp = self.accelerator.ddp_handler.to_kwargs() if self.accelerator.ddp_handler else {}
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate's wrapper
        found = {
            "base": "bf16" if self.args.bf16 else "fp16" if self.args.fp16 else None,
            "ddp_options": {**ddp, **(self._hybrid_options.get("ddp_options") or {})},
            "make_optimizer": maker_of(optimizer),
        }
        sampler, num_items = sampler_of(self._loader), None
        batch: Any = None
        if "plan" not in self._hybrid_options or sampler is not None:
            batch = self._hybrid_options.get("example_batch")
            if batch is None:
                batches = [agree_locally("making the example batch", self._example_batch)]
                if dist.is_initialized():  # ranks may read other rows, of other lengths
                    dist.broadcast_object_list(batches, 0)
                batch = self._prepare_inputs(batches[0])
            # Ranks exchange this number in real steps, but not in profiled ones.
            num_items = self._get_num_items_in_batch([batch], self.args.device)
        if "plan" not in self._hybrid_options:
            found["example_batch"] = batch
            found["loss_fn"] = partial(self._planned_loss, num_items=num_items)
        why_not = "the Trainer's loader has no qsync.ShareSampler"
        if sampler is not None:
            why_not = self._why_equal(batch, sampler, num_items is not None)
        if why_not:
            agree_locally("sharing the batch", partial(needs_sampler, self._hybrid_options, why_not))
        else:
            found["loader"] = self._loader
        return {**self._hybrid_options, **found}, num_items is not None and not self._has_own_loss

    @property
    def _has_own_loss(self) -> bool:
        return not type(self).compute_loss.__module__.startswith("transformers.")

    def _why_equal(self, batch: Any, sampler: ShareSampler, has_tokens: bool) -> str:
        """Return why ranks must have equal batches; empty if shares may be planned."""
        samples = sampler.global_batch // self.args.world_size
        tensors = [part for part in dict(batch).values() if isinstance(part, torch.Tensor) and part.ndim]
        if self._hybrid_options.get("check"):
            return "check=True changes plans"
        if has_tokens and not self.args.average_tokens_across_devices:
            return "average_tokens_across_devices=False weighs ranks alike, whatever they take"
        if has_tokens and self._has_own_loss and self.loss_is_scaled_for_ga is not False:
            return "compute_loss is overridden; set loss_is_scaled_for_ga = False where it is a batch's mean"
        if not tensors or any(len(part) != samples for part in tensors):
            return f"the tensors of a batch do not begin with its {samples} samples"
        return ""

    def _check_arguments(self) -> None:
        stated = {"base", "make_optimizer", "loss_fn", "ddp", "loader"}
        check_hybrid_options(self._hybrid_options, stated)
        for what, is_on in {
            "FSDP (qsync.hybrid(..., ddp=False), then fully_shard, works in a loop of your own)": (
                self.is_fsdp_enabled
            ),
            "DeepSpeed": self.is_deepspeed_enabled,
            "torch_compile (qsync traces the model itself)": self.args.torch_compile,
            "DataParallel (start one process a GPU, with torchrun)": self.args.n_gpu > 1,
        }.items():
            if is_on:
                raise UnsupportedError(f"QSyncTrainer wraps the model in DDP, not {what}; leave that out")

    def _example_batch(self) -> Any:
        """Return a batch of this rank's training data."""
        loader = self.callback_handler.train_dataloader or self._loader
        dataset, size = loader.dataset, self._train_batch_size
        with undisturbed(self.model):
            if isinstance(dataset, IterableDataset):
                if iter(dataset) is iter(dataset):
                    raise FormatError(
                        "the dataset can be read only once, but planning needs a batch; give one: "
                        'hybrid_options={"example_batch": batch}'
                    )
                items = list(itertools.islice(iter(dataset), size))
            else:
                generator = torch.Generator().manual_seed(self.args.seed)
                items = [dataset[int(i)] for i in torch.randperm(len(dataset), generator=generator)[:size]]
            return loader.collate_fn(items)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> Any:
        self._loader = train_dataloader
        found = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if resume_from_checkpoint is not None:
            path = Path(resume_from_checkpoint) / _PLAN_FILE
            if path.exists():
                warn_of_other_plan(partial(Plan.load, path), plan_of(self.model))
        return found

    def _planned_loss(self, model: torch.nn.Module, batch: Any, num_items: Any) -> torch.Tensor:
        """Return the Trainer's loss of a batch, with its normalisation."""
        with self.compute_loss_context_manager():
            loss: torch.Tensor = self.compute_loss(model, copy(batch), num_items_in_batch=num_items)
        return loss

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        plan = plan_of(self.model)
        if plan is not None and is_rank_zero():
            folder = f"{transformers.trainer_utils.PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            plan.save(os.path.join(self._get_output_dir(trial), folder, _PLAN_FILE))


def _hand_out_shares(loader: Any) -> None:
    """Replace Accelerate's sharding by a ShareSampler with the loader's own order.

    A loader of another kind, or with a sampler whose order differs between ranks, is unchanged.
    """
    shard: Any = getattr(loader, "batch_sampler", None)
    batches: Any = getattr(shard, "batch_sampler", None)
    sampler: Any = getattr(batches, "sampler", None)
    if (
        type(shard) is not BatchSamplerShard
        or type(batches) is not BatchSampler
        or type(sampler) not in (SeedableRandomSampler, SequentialSampler)
        or shard.num_processes != int(dist.is_initialized() and dist.get_world_size())
        or shard.split_batches
        or not (shard.even_batches or shard.drop_last)
    ):
        return
    batch_size = batches.batch_size * shard.num_processes
    length = len(shard) * batch_size

    @lru_cache(maxsize=2)
    def drawn(epoch: int) -> np.ndarray:
        if isinstance(sampler, SeedableRandomSampler):
            sampler.set_epoch(epoch)
        return np.resize(list(sampler), length)  # the last batch is filled up with the first samples

    vars(loader.base_dataloader)["batch_sampler"] = ShareSampler(SampleOrder(length, drawn=drawn), batch_size)


class QSyncTrainer(QSyncMixin, transformers.Trainer):
    """transformers.Trainer over unequal ranks; see `QSyncMixin`.

    Example:
        >>> trainer = QSyncTrainer(model=model, args=TrainingArguments("out", bf16=True), train_dataset=rows)
        >>> trainer.train()
    """
