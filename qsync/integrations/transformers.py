"""Hugging Face's Trainer over unequal devices: the model is planned where a Trainer would wrap it in DDP."""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Mapping
from copy import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import transformers
from torch.utils.data import IterableDataset

from qsync.api import unwrap
from qsync.distributed.agreement import agree_locally, check_same
from qsync.distributed.job import is_rank_zero
from qsync.errors import FormatError, UnsupportedError
from qsync.hybrid_training import hybrid
from qsync.integrations.supported_versions import check_version
from qsync.integrations.trainer_plans import check_hybrid_options, warn_of_other_plan
from qsync.records.plans import Plan
from qsync.runtime.wrapping import plan_of
from qsync.tracing.held_state import undisturbed

_PLAN_FILE = "qsync_plan.json"  # in a checkpoint
# What the batches of a step depend on: ranks that differ in it would wait for each other for ever.
_SAME_ON_RANKS = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16", "max_grad_norm",
    "max_steps", "num_train_epochs", "gradient_checkpointing", "label_smoothing_factor", "optim",
)  # fmt: skip
_Base: Any = transformers.Trainer if TYPE_CHECKING else object


class QSyncMixin(_Base):  # type: ignore[misc]  # the library is untyped
    """Make a Trainer class plan its model and train it over unequal ranks. Put it before that class.

    At the start of training the model is planned on a batch of the training data, with the Trainer's own
    loss, and wrapped in DDP. All else is the Trainer's: its `bf16` and `fp16` are the plan's base, its DDP
    arguments those of profiling too. A checkpoint names its plan, and loads with and without qsync.

    Args:
        *args: the Trainer's.
        hybrid_options: arguments of `qsync.hybrid` by name, such as `emulated_share` or `slack`.
        **kwargs: the Trainer's.

    Raises:
        UnsupportedError: another version of the library, or arguments that wrap or compile the model in
            another way (FSDP, DeepSpeed, DataParallel, torch_compile).
        FormatError: options that the Trainer states itself, or a plan with shares of the batch.
        MismatchError: ranks with different arguments.

    Example:
        >>> class MyTrainer(QSyncMixin, transformers.Seq2SeqTrainer): ...
    """

    def __init__(self, *args: Any, hybrid_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        check_version("transformers")
        check_version("accelerate")
        super().__init__(*args, **kwargs)
        self._hybrid_options = dict(hybrid_options or {})

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        """Plan and wrap the model before training; the Trainer asks for this once for each `train`."""
        if not training or self.accelerator.unwrap_model(model, keep_torch_compile=False) is not model:
            return super()._wrap_model(model, training, dataloader)
        if plan_of(model) is not None:  # a batch size was too large: the Trainer wraps anew
            unwrap(model)
        agree_locally("checking the Trainer's arguments", self._check_arguments)
        check_same({f"the Trainer's {name}": getattr(self.args, name) for name in _SAME_ON_RANKS})
        model.train()
        self.log = lambda *_, **__: None  # its loss may log
        try:
            wrapped = hybrid(model, **self._arguments())
        finally:
            del self.log
        if wrapped is model:  # one process: Accelerate must not put torch.autocast around the plan
            setattr(model, "_is_accelerate_prepared", True)  # noqa: B010
            return model
        return self.accelerator.prepare_model(wrapped)

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments of `qsync.hybrid`, those from the user last."""
        ddp = self.accelerator.ddp_handler.to_kwargs() if self.accelerator.ddp_handler else {}
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate wraps it
        kind: Any = type(optimizer)
        known = inspect.signature(kind).parameters
        settings = {name: value for name, value in optimizer.defaults.items() if name in known}
        found = {
            "base": "bf16" if self.args.bf16 else "fp16" if self.args.fp16 else None,
            "ddp_options": {**ddp, **(self._hybrid_options.get("ddp_options") or {})},
            "make_optimizer": partial(kind, **settings),
        }
        if "plan" not in self._hybrid_options:
            batch = self._hybrid_options.get("example_batch")
            if batch is None:
                batches = [agree_locally("making the example batch", self._example_batch)]
                if dist.is_initialized():  # ranks may read other rows, of other lengths
                    dist.broadcast_object_list(batches, 0)
                batch = self._prepare_inputs(batches[0])
            # All ranks exchange this number: not in steps that are profiled.
            num_items = self._get_num_items_in_batch([batch], self.args.device)
            found["example_batch"] = batch
            found["loss_fn"] = partial(self._planned_loss, num_items=num_items)
        return {**self._hybrid_options, **found}

    def _check_arguments(self) -> None:
        stated = {"base", "make_optimizer", "loss_fn", "ddp"}
        batches = "per_device_train_batch_size samples on every rank"
        check_hybrid_options(self._hybrid_options, stated, batches)
        for what, is_on in {
            "FSDP (qsync.hybrid(..., ddp=False), then fully_shard, works in a loop of your own)": (
                self.is_fsdp_enabled
            ),
            "DeepSpeed": self.is_deepspeed_enabled,
            "torch_compile (qsync traces the model itself)": self.args.torch_compile,
            "DataParallel (start one process a GPU, with torchrun)": self.args.n_gpu > 1,
        }.items():
            if is_on:
                raise UnsupportedError(f"QSyncTrainer wraps the model in DDP, not in {what}; leave that out")

    def _example_batch(self) -> Any:
        """Return a batch of this rank's training data."""
        loader = self.callback_handler.train_dataloader or self._loader
        dataset, size = loader.dataset, self._train_batch_size
        with undisturbed(self.model):
            if isinstance(dataset, IterableDataset):
                if iter(dataset) is iter(dataset):
                    raise FormatError(
                        "the dataset can be read only once, and planning needs a batch of it; give one: "
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


class QSyncTrainer(QSyncMixin, transformers.Trainer):
    """A transformers.Trainer that trains over unequal ranks: see `QSyncMixin` for what it adds.

    Example:
        >>> trainer = QSyncTrainer(model=model, args=TrainingArguments("out", bf16=True), train_dataset=rows)
        >>> trainer.train()
    """
