"""Hugging Face's Trainer around planned models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.utils.data import Dataset, IterableDataset, default_collate
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
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
    facts,
    net,
    norm,
    same_state,
)
from qsync.integrations.transformers import QSyncMixin, QSyncTrainer

_GROUP = "Trainer"
_VOCABULARY, _LENGTH = 64, 12


def gpt(kind: Any = GPT2LMHeadModel, **options: Any) -> Any:
    """Return a small GPT, the same each time."""
    config = GPT2Config(
        vocab_size=_VOCABULARY, n_positions=32, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=1, pad_token_id=0, **options,
    )  # fmt: skip
    return net(lambda: kind(config))


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Sequences of tokens, of which other numbers count in each."""

    def __init__(self, classes: int = 0) -> None:
        self._classes = classes

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(2, _VOCABULARY, (_LENGTH,), generator=generator)
        if self._classes:
            return {"input_ids": tokens, "labels": tokens[0] % self._classes}
        return {"input_ids": tokens, "labels": torch.where(torch.arange(_LENGTH) < index % 9, -100, tokens)}


class Norms(TrainerCallback):
    """The gradient norms of a Trainer's steps."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Note the norm."""
        self.norms.append(norm(model))


def arguments(arm: Arm, arguments_kind: Any = TrainingArguments, **options: Any) -> Any:
    """Return arguments of a short run."""
    given = {
        "max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 0.05, "optim": "sgd",
        "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "save_strategy": "no", **options,
    }  # fmt: skip
    return arguments_kind(
        str(arm.folder / "trainer"), report_to=[], disable_tqdm=True, use_cpu=True, ddp_backend="gloo",
        logging_strategy="no", dataloader_pin_memory=False, **given,
    )  # fmt: skip


def trainer(
    arm: Arm, model: Any = None, kind: Any = transformers.Trainer, data: Any = None, options: Any = None,
    extra: Any = None, **given: Any,
) -> tuple[Any, list[float]]:  # fmt: skip
    """Return a Trainer, the library's or qsync's, and the list that will hold its gradient norms."""
    seen, data = Norms(), data if data is not None else Rows()
    own: dict[str, Any] = {}
    if not arm.is_plain:
        own = {"hybrid_options": {**arm.options, **(options or {})}}
        kind = QSyncTrainer if kind is transformers.Trainer else type("Mixed", (QSyncMixin, kind), {})
    made = kind(
        model=gpt() if model is None else model, args=arguments(arm, **given), train_dataset=data,
        eval_dataset=data, callbacks=[seen], **own, **(extra or {}),
    )  # fmt: skip
    return made, seen.norms


def _outcome(arm: Arm, **given: Any) -> Outcome:
    made, norms = trainer(arm, **given)
    made.train()
    return Outcome(norms, made.model)


cases(_GROUP, _outcome, {
    "`train()`": {},
    "`gradient_accumulation_steps=2`, losses by tokens": {"gradient_accumulation_steps": 2},
    "`label_smoothing_factor=0.1`": {"label_smoothing_factor": 0.1},
    "`gradient_checkpointing=True`": {"gradient_checkpointing": True},
    "`max_grad_norm=0.1`": {"max_grad_norm": 0.1},
    "`QSyncMixin` before `Seq2SeqTrainer`": {
        "kind": transformers.Seq2SeqTrainer, "arguments_kind": transformers.Seq2SeqTrainingArguments,
    },
    "`ddp_find_unused_parameters=False`, `ddp_bucket_cap_mb=1`": {
        "ddp_find_unused_parameters": False, "ddp_bucket_cap_mb": 1,
    },
    "levers": {"options": {"levers": ["share"]}, "refused": "plan without levers", "tested": True},
    "an option that the Trainer states": {
        "options": {"base": "bf16"}, "refused": "the Trainer states base itself",
    },
    "a misspelt option": {"options": {"slak": 0.1}, "refused": "did you mean slack?"},
})  # fmt: skip


@case(_GROUP, "a model whose loss is a mean over samples, accumulation 2")
def _(arm: Arm) -> Outcome:
    model = gpt(GPT2ForSequenceClassification, num_labels=4)
    return _outcome(arm, model=model, data=Rows(classes=4), gradient_accumulation_steps=2)


@case(_GROUP, "`bf16=True`: the base", BF16_TOLERANCE)
def _(arm: Arm) -> Outcome:
    return _outcome(arm, bf16=True, options=arm.in_bf16)


@case(_GROUP, "`compute_loss_func`")
def _(arm: Arm) -> Outcome:
    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> Any:
        logits, wanted = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return nn.functional.cross_entropy(logits, wanted, reduction="sum") / num_items_in_batch

    return _outcome(arm, extra={"compute_loss_func": loss})


@case(_GROUP, "`evaluate()`, `predict()`, `eval_on_start`")
def _(arm: Arm) -> Outcome:
    made, norms = trainer(arm, eval_on_start=True, eval_strategy="steps", eval_steps=2)
    made.train()
    return Outcome(
        norms, made.model, [made.evaluate()["eval_loss"], made.predict(Rows()).metrics["test_loss"]]
    )


@case(_GROUP, "`model.generate()` after training")
def _(arm: Arm) -> Outcome:
    made, norms = trainer(arm)
    made.train()
    tokens = made.model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
    return Outcome(norms, made.model, facts(longer=tokens.shape[1] > 3))


@case(_GROUP, "`train()` twice")
def _(arm: Arm) -> Outcome:
    made, norms = trainer(arm)
    made.train()
    made.train()
    return Outcome(norms, made.model)


@case(_GROUP, "saved and resumed: bitwise the uninterrupted run")
def _(arm: Arm) -> Outcome:
    whole, norms = trainer(arm, max_steps=4, save_strategy="steps", save_steps=2, optim="adamw_torch")
    whole.train()
    again, more = trainer(arm, max_steps=4, optim="adamw_torch")
    again.train(resume_from_checkpoint=str(arm.folder / "trainer" / "checkpoint-2"))
    same = same_state(whole.model.state_dict(), again.model.state_dict())
    return Outcome([*norms, *more], again.model, facts(same=same))


@case(_GROUP, "a qsync checkpoint resumed by the plain Trainer, and back")
def _(arm: Arm) -> Outcome:
    first, norms = trainer(arm, max_steps=2, save_strategy="steps", save_steps=2, optim="adamw_torch")
    first.train()
    plain = Arm(None, arm.folder / "plain")
    second, more = trainer(plain, max_steps=4, save_strategy="steps", save_steps=2, optim="adamw_torch")
    second.train(resume_from_checkpoint=str(arm.folder / "trainer" / "checkpoint-2"))
    third, most = trainer(arm, max_steps=6, optim="adamw_torch")
    third.train(resume_from_checkpoint=str(plain.folder / "trainer" / "checkpoint-4"))
    return Outcome([*norms, *more, *most], third.model)


@case(_GROUP, "accumulation 2, resumed under another plan", logs="under another plan", tested=True)
def _(arm: Arm) -> Outcome:
    accumulated = {"gradient_accumulation_steps": 2}
    first, norms = trainer(arm, max_steps=2, save_strategy="steps", save_steps=2, **accumulated)
    first.train()
    second, _ = trainer(arm, max_steps=4, options=OTHER_PLAN)
    second.train(resume_from_checkpoint=str(arm.folder / "trainer" / "checkpoint-2"))
    return Outcome(norms, second.model)


@case(_GROUP, "`save_model`, `from_pretrained`")
def _(arm: Arm) -> Outcome:
    made, norms = trainer(arm)
    made.train()
    folder = str(arm.folder / "saved")
    made.save_model(folder)
    dist.barrier()
    loaded = GPT2LMHeadModel.from_pretrained(folder)
    return Outcome(norms, made.model, facts(same=same_state(loaded.state_dict(), made.model.state_dict())))


def _plain_trainer(arm: Arm, **given: Any) -> Outcome:
    """Give the library's own Trainer a hybrid model."""
    model = gpt()
    wrapped = model if arm.is_plain else arm.hybrid(model, default_collate([Rows()[k] for k in range(4)]))
    found = _outcome(Arm(None, arm.folder), model=wrapped, remove_unused_columns=False, **given)
    return Outcome(found.norms, model)


cases(_GROUP, _plain_trainer, {
    "`Trainer(model=qsync.hybrid(...))`, `remove_unused_columns=False`": {"gradient_accumulation_steps": 2},
    "`Trainer(model=qsync.hybrid(...))`, `bf16=True`, of another base": {
        "bf16": True, "refused": 'give base="bf16" to qsync.hybrid',
    },
})  # fmt: skip


@case(
    _GROUP,
    "`torch_compile=True`",
    refused="not in torch_compile (qsync traces the model itself)",
    tested=True,
)
def _(arm: Arm) -> Outcome:
    return _outcome(arm, torch_compile=not arm.is_plain)


class _Once(IterableDataset[dict[str, torch.Tensor]]):
    """Rows that can be read once, as from a socket."""

    def __init__(self) -> None:
        self._rows = iter([Rows()[index] for index in range(48)])

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return self._rows


@case(_GROUP, "a dataset that can be read once", refused="can be read only once", tested=True)
def _(arm: Arm) -> Outcome:
    return _outcome(arm, data=_Once())


@case(
    _GROUP,
    "other accumulation on the ranks",
    refused="gradient_accumulation_steps differs between ranks",
    tested=True,
)
def _(arm: Arm) -> Outcome:
    return _outcome(arm, gradient_accumulation_steps=1 if arm.is_plain else 1 + dist.get_rank())
