"""Cases of Hugging Face's Trainer on planned models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.utils.data import Dataset, IterableDataset, default_collate
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    TrainerCallback,
    TrainingArguments,
)

from qsync.experiments.integrations.cases import (
    BF16_TOLERANCE,
    OTHER_PLAN,
    Arm,
    Outcome,
    case,
    cases,
    net,
    norm,
)
from qsync.integrations.transformers import QSyncMixin, QSyncTrainer

_GROUP = "Trainer"
_VOCABULARY, _LENGTH = 64, 12


def gpt() -> Any:
    """Return a small GPT, equal at every call."""
    config = GPT2Config(
        vocab_size=_VOCABULARY, n_positions=32, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return net(lambda: GPT2LMHeadModel(config))


def llama() -> Any:
    """Return a small Llama, equal at every call. The Trainer counts its shifted labels."""
    config = LlamaConfig(
        vocab_size=_VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return net(lambda: LlamaForCausalLM(config))


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Token sequences with different numbers of counted labels."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(2, _VOCABULARY, (_LENGTH,), generator=generator)
        return {"input_ids": tokens, "labels": torch.where(torch.arange(_LENGTH) < index % 9, -100, tokens)}


class Norms(TrainerCallback):
    """Callback that records the gradient norms of a Trainer's steps."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Record the norm."""
        self.norms.append(norm(model))


def arguments(arm: Arm, arguments_kind: Any = TrainingArguments, **options: Any) -> Any:
    """Return the arguments of a short run."""
    given = {
        "max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 0.05, "optim": "sgd",
        "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "save_strategy": "no", **options,
    }  # fmt: skip
    return arguments_kind(
        str(arm.folder / "trainer"), report_to=[], disable_tqdm=True, use_cpu=True, ddp_backend="gloo",
        logging_strategy="no", dataloader_pin_memory=False, **given,
    )  # fmt: skip


def trainer(
    arm: Arm, kind: Any = transformers.Trainer, data: Any = None, options: Any = None, **given: Any
) -> tuple[Any, list[float]]:  # fmt: skip
    """Return a Trainer, the library's or qsync's, and the list for its gradient norms."""
    seen, data = Norms(), data if data is not None else Rows()
    own: dict[str, Any] = {}
    if not arm.is_plain:
        own = {"hybrid_options": {**arm.options, **(options or {})}}
        kind = QSyncTrainer if kind is transformers.Trainer else type("Mixed", (QSyncMixin, kind), {})
    made = kind(
        model=gpt(), args=arguments(arm, **given), train_dataset=data,
        eval_dataset=data, callbacks=[seen], **own,
    )  # fmt: skip
    return made, seen.norms


def _outcome(arm: Arm, **given: Any) -> Outcome:
    made, norms = trainer(arm, **given)
    made.train()
    return Outcome(norms, made.model)


cases(_GROUP, _outcome, {
    "`QSyncMixin` before `Seq2SeqTrainer`": {
        "kind": transformers.Seq2SeqTrainer, "arguments_kind": transformers.Seq2SeqTrainingArguments,
    },
    "`gradient_accumulation_steps=2`, losses by tokens": {"gradient_accumulation_steps": 2},
    '`levers=["accumulate"]`': {
        "options": {"levers": ["accumulate"]}, "refused": "cannot split a rank's batch into passes",
    },
    "an option that the Trainer states": {
        "options": {"base": "bf16"}, "refused": "the Trainer sets base itself",
    },
})  # fmt: skip


@case(_GROUP, "`bf16=True`: the base", BF16_TOLERANCE)
def _(arm: Arm) -> Outcome:
    return _outcome(arm, bf16=True, options=arm.in_bf16)


@case(_GROUP, "`evaluate()`, `predict()`, `eval_on_start`")
def _(arm: Arm) -> Outcome:
    made, norms = trainer(arm, eval_on_start=True, eval_strategy="steps", eval_steps=2)
    made.train()
    return Outcome(
        norms, made.model, [made.evaluate()["eval_loss"], made.predict(Rows()).metrics["test_loss"]]
    )


@case(_GROUP, "resumed under another plan", logs="the checkpoint has another plan")
def _(arm: Arm) -> Outcome:
    first, norms = trainer(arm, max_steps=2, save_strategy="steps", save_steps=2)
    first.train()
    second, _ = trainer(arm, max_steps=4, options=OTHER_PLAN)
    second.train(resume_from_checkpoint=str(arm.folder / "trainer" / "checkpoint-2"))
    return Outcome(norms, second.model)


@case(
    _GROUP,
    "`torch_compile=True`",
    refused="not torch_compile (qsync traces the model itself)",
)
def _(arm: Arm) -> Outcome:
    return _outcome(arm, torch_compile=not arm.is_plain)


@case(_GROUP, "`Trainer(model=qsync.hybrid(...))`: a Llama, whose Trainer counts shifted labels", tested=True)
def _(arm: Arm) -> Outcome:
    seen = Norms()
    model = llama()
    if not arm.is_plain:
        model = arm.hybrid(model, default_collate([Rows()[index] for index in range(4)]))
    made = transformers.Trainer(
        model, arguments(arm, gradient_accumulation_steps=2, remove_unused_columns=False),
        train_dataset=Rows(), callbacks=[seen],
    )  # fmt: skip
    made.train()
    return Outcome(seen.norms, model)


class _Once(IterableDataset[dict[str, torch.Tensor]]):
    """Rows that can be read only once, as from a socket."""

    def __init__(self) -> None:
        self._rows = iter([Rows()[index] for index in range(48)])

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self._rows


@case(_GROUP, "a dataset that can be read once", refused="can be read only once")
def _(arm: Arm) -> Outcome:
    return _outcome(arm, data=_Once())


@case(
    _GROUP,
    "other accumulation on the ranks",
    refused="gradient_accumulation_steps differs between ranks",
)
def _(arm: Arm) -> Outcome:
    return _outcome(arm, gradient_accumulation_steps=1 if arm.is_plain else 1 + dist.get_rank())
