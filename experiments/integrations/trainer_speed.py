"""Trainer with qsync against Trainer with plain DDP, on two ranks of which one has half a core."""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

from qsync.experiments.harness.ranks import MARGIN, Place
from qsync.experiments.integrations.cases import net, replicas_agree
from qsync.integrations.transformers import QSyncTrainer

_LENGTH, _BATCH, _SKIPPED = 256, 4, 3  # tokens, sequences a rank, first steps that are not timed


class _Bytes(Dataset[dict[str, torch.Tensor]]):
    """Sequences of bytes, drawn at random: what a step takes does not depend on them."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 256, (_LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class _StepTimes(TrainerCallback):
    """The seconds from the end of one step to the end of the next."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._ended = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note the seconds since the last step."""
        now = time.perf_counter()
        self.seconds.append(now - self._ended)
        self._ended = now


def measure(config: dict[str, Any], place: Place) -> dict[str, Any]:
    """Train by both Trainers in turns; return the median seconds of their steps on the slower rank."""
    size = GPT2Config(
        vocab_size=256, n_positions=_LENGTH, n_embd=config["width"], n_layer=config["layers"], n_head=6,
        bos_token_id=0, eos_token_id=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    share = place.measured_share()
    args = TrainingArguments(
        config["folder"], max_steps=config["steps"] + _SKIPPED, per_device_train_batch_size=_BATCH,
        report_to=[], disable_tqdm=True, use_cpu=True, ddp_backend="gloo", save_strategy="no",
        logging_strategy="no",
        ddp_find_unused_parameters=False, dataloader_pin_memory=False,
    )  # fmt: skip
    options = {"emulated_share": share, "margin": MARGIN, "cache_dir": f"{config['folder']}/plans"}
    kinds: dict[str, Any] = {
        "DDP": transformers.Trainer, "qsync": partial(QSyncTrainer, hybrid_options=options)
    }  # fmt: skip
    trainers, times = {}, {}
    for name, kind in kinds.items():
        times[name] = _StepTimes()
        model = net(lambda: GPT2LMHeadModel(size))
        trainers[name] = kind(model=model, args=args, train_dataset=_Bytes(), callbacks=[times[name]])
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(config["rounds"]):
        for name, trainer in trainers.items():
            times[name].seconds.clear()
            trainer.train()
            seconds[name] += times[name].seconds[_SKIPPED:]
    steps = {name: median(of) for name, of in seconds.items()}
    return {
        "step_s": steps,
        "ratio": steps["DDP"] / steps["qsync"],
        "replicas_agree": replicas_agree(trainers["qsync"].model),
    }
