"""Train a small GPT-2 with Hugging Face's Trainer, on two ranks of which one is weak.

`QSyncTrainer` stands where `transformers.Trainer` stood. It plans the model before it trains; gradient
accumulation, evaluation and saving are the Trainer's. A checkpoint loads into a plain model. Run it with
`OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/hf_trainer.py`.
"""

import os
import sysconfig
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import qsync
from qsync.integrations.transformers import QSyncTrainer

LENGTH, HELD_OUT = 64, 64  # bytes a row, rows


def main() -> None:
    """Train, evaluate, save, and evaluate what was saved in a model that knows nothing of qsync."""
    text = bytearray(Path(sysconfig.get_path("stdlib"), "typing.py").read_bytes())
    tokens = torch.frombuffer(text, dtype=torch.uint8).long()
    rows = [{"input_ids": row, "labels": row} for row in tokens.split(LENGTH)[:-1]]

    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 256, "n_layer": 1, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    model.loss_type = "ForCausalLM"  # for GPT-2 the Trainer would else count a label too many in each row
    # Rank 1 emulates a weak device: it gets half a core.
    share = 0.5 if os.environ.get("RANK") == "1" else None
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder, max_steps=20, per_device_train_batch_size=8, gradient_accumulation_steps=2, use_cpu=True,
            learning_rate=1e-3, logging_steps=10, disable_tqdm=True, ddp_find_unused_parameters=False,
        )  # fmt: skip
        trainer = QSyncTrainer(
            model, options, train_dataset=rows[:-HELD_OUT], eval_dataset=rows[-HELD_OUT:],
            hybrid_options={"emulated_share": share},
        )  # fmt: skip
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        if trainer.is_world_process_zero():
            checkpoint = Path(folder, "checkpoint-20")
            for name, part in qsync.Plan.load(checkpoint / "qsync_plan.json").classes.items():
                print(f"{name}: {len(part.lowered)} of {len(part.assignment)} operators lowered")
            plain = GPT2LMHeadModel.from_pretrained(checkpoint).eval()
            batch = tokens[: len(rows) * LENGTH].view(-1, LENGTH)[-HELD_OUT:]
            with torch.no_grad():
                plain_loss = plain(input_ids=batch, labels=batch).loss
            print(f"held-out loss {loss:.3f}, {plain_loss:.3f} from the checkpoint in a plain model")


if __name__ == "__main__":
    main()
