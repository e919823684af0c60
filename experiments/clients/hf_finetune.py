"""Fine-tune a small BERT with Hugging Face's Trainer, to classify lines of source by their file."""

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("out"))
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--learning-rate", type=float, default=5e-4)


class Lines(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, names: list[str], length: int = 64) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        lines = [
            (line[:length], label)
            for label, name in enumerate(names)
            for line in (folder / name).read_bytes().splitlines()
            if len(line) > 20
        ]
        self.labels = torch.tensor([label for _, label in lines])
        self.ids = torch.zeros(len(lines), length, dtype=torch.long)
        for row, (line, _) in zip(self.ids, lines, strict=True):
            row[: len(line)] = torch.tensor(list(line))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": self.labels[index]}


class PrintLoss(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            print(f"step {state.global_step - 1}: loss {logs['loss']!r}")


def make_model() -> nn.Module:
    config = BertConfig(
        vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512,
        max_position_embeddings=64, id2label={0: "typing", 1: "argparse", 2: "difflib"},
    )  # fmt: skip
    return BertForSequenceClassification(config)


def main() -> None:
    args = parser.parse_args()
    torch.manual_seed(42)
    dataset = Lines(["typing.py", "argparse.py", "difflib.py"])
    model = make_model()
    training_args = TrainingArguments(
        str(args.out), max_steps=args.steps, per_device_train_batch_size=args.batch_size, use_cpu=True,
        learning_rate=args.learning_rate, lr_scheduler_type="linear", warmup_steps=5, weight_decay=0.01,
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, seed=42,
        ddp_find_unused_parameters=False,
    )  # fmt: skip
    trainer = Trainer(model=model, args=training_args, train_dataset=dataset, callbacks=[PrintLoss()])
    trainer.train()
    trainer.save_model(str(args.out / "final"))


if __name__ == "__main__":
    main()
