"""Train LoRA adapters of a small Llama with peft, on two ranks of which one is weak.

Make the adapters first, then give the model to `qsync.hybrid`. Only the adapters are trained. Products with
frozen weights are lowered, too. Run it with
`OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/lora.py`.
"""

import os
import sysconfig
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import qsync

STEPS, BATCH, LENGTH, HELD_OUT = 30, 8, 64, 64  # rows in a batch, bytes in a row, rows


def main() -> None:
    """Train the adapters, merge them, and print the loss on held-out text before, after and merged."""
    text = bytearray(Path(sysconfig.get_path("stdlib"), "typing.py").read_bytes())
    rows = torch.stack(torch.frombuffer(text, dtype=torch.uint8).long().split(LENGTH)[:-1])
    held_out = {"input_ids": rows[-HELD_OUT:], "labels": rows[-HELD_OUT:]}

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **sizes))
    targets = ["q_proj", "v_proj"]
    adapted = get_peft_model(base, LoraConfig(r=8, target_modules=targets, task_type="CAUSAL_LM"))
    example = {"input_ids": rows[:BATCH], "labels": rows[:BATCH]}
    rank = int(os.environ.get("RANK", "0"))
    # Rank 1 emulates a weak device: it gets half a core.
    model = qsync.hybrid(adapted, example, emulated_share=0.5 if rank == 1 else None)
    num_trained, num_all = adapted.get_nb_trainable_parameters()

    def held_out_loss(of: torch.nn.Module) -> float:
        with torch.no_grad():
            return float(of(**held_out).loss)

    before = held_out_loss(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    torch.manual_seed(rank)  # every rank draws batches of its own
    for chosen in torch.randint(len(rows) - HELD_OUT, (STEPS, BATCH)):
        optimizer.zero_grad()
        model(input_ids=rows[chosen], labels=rows[chosen]).loss.backward()
        optimizer.step()
    after, merged = held_out_loss(model), adapted.merge_and_unload()
    if rank == 0:
        print(f"trained {num_trained:,} of {num_all:,} parameters")
        print(f"held-out loss {before:.3f} before, {after:.3f} after, {held_out_loss(merged):.3f} merged")


if __name__ == "__main__":
    # peft asks transformers for a name that goes with its next version.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
    main()
