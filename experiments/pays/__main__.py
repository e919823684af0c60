"""Judge sets of cards from data sheets: `python -m qsync.experiments.pays --out FOLDER`.

Everything is simulated as in `qsync plan --cards`, except the H100 steps used in bars.
"""

from __future__ import annotations

import time
from functools import cache, partial
from pathlib import Path
from typing import Any

from qsync.errors import InfeasibleError
from qsync.experiments.harness import Experiment, Page, bar, run_command
from qsync.experiments.harness.options import Fresh, Out, Publish
from qsync.experiments.harness.tables import table_of
from qsync.integrations.hugging_face import PREFIX
from qsync.operators.precision import Precision
from qsync.records.json_files import write_json
from qsync.records.verdict import PLAN
from qsync.what_if.card_verdicts import cards_of, graphs_of, judge, link_of

PILES = ("A100:4,T4:8", "A100:1,T4:1", "H100:8,L4:8", "V100:4,T4:4", "RTX4090:1,RTX3090:1",
         "A6000:2,RTX3090:2", "L40S:4,A10G:4", "H100:1,A100:1")  # fmt: skip
LINK, MOST_S, MOST_ERROR = "100Gb", 60.0, 0.25
# A configuration (on top of transformers' defaults), samples per card, tokens per sample.
MODELS: dict[str, tuple[dict[str, Any], int, int | None]] = {
    "BERT-base": ({"model_type": "bert", "architectures": ["BertForSequenceClassification"]}, 64, 128),
    "GPT-2 medium": (
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"],
         "n_layer": 24, "n_embd": 1024, "n_head": 16}, 8, 512,
    ),
    "ResNet-50": (
        {"model_type": "resnet", "architectures": ["ResNetForImageClassification"], "num_labels": 1000},
        128, None,
    ),
    "ViT-L": (
        {"model_type": "vit", "architectures": ["ViTForImageClassification"], "num_labels": 1000,
         "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
         "intermediate_size": 4096}, 32, None,
    ),
    "Llama-3-8B": (
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256,
         "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192}, 2, 1024,
    ),
}  # fmt: skip
# Measured seconds of an H100's steps (docs/results/gpu.md), by model and base; samples and tokens of each.
H100_S = {("BERT-base", "fp32"): 0.0625, ("BERT-base", "bf16"): 0.0433,
          ("GPT-2 medium", "fp32"): 0.244, ("GPT-2 medium", "bf16"): 0.0764}  # fmt: skip
H100_BATCH = {"BERT-base": (32, 128), "GPT-2 medium": (8, 512)}


def main(out: Out = Path("pays"), publish: Publish = False, fresh: Fresh = False) -> None:
    """Judge every set of cards for every model, and compare with measured steps."""
    experiment = Experiment("pays", out, settings={"link": LINK}, fresh=fresh)
    graphs = cache(partial(_captured, out))
    with experiment.progress():
        errors = {
            f"{model}, {base}": experiment.piece(f"H100 {model} {base}", partial(_error, graphs, model, base))
            for model, base in H100_S
        }
        rows = {
            (pile, model): experiment.piece(f"{model} {pile}", partial(_judged, graphs, pile, model))
            for model in MODELS
            for pile in PILES
        }
    worst = max(abs(error) for error in errors.values())
    bars = [
        bar(
            "CPU seconds of a verdict, with its captures, most",
            max(r["cpu_s"] for r in rows.values()),
            MOST_S,
        ),
        bar("|simulated / measured - 1| of an H100's steps, worst", worst, MOST_ERROR),
    ]
    cells = [[pile.replace(",", " + ").replace(":", " x "), *(_cell(rows[pile, model]) for model in MODELS)]
             for pile in PILES]  # fmt: skip
    table = table_of("Times the strong cards alone", ("cards", *MODELS), cells)
    page = Page(Path("docs/results/pays.md")) if publish else None
    figures = {"errors": errors, "verdicts": [{"cards": p, "model": m, **r} for (p, m), r in rows.items()]}
    experiment.finish(figures, bars=bars, measured="steps of an H100", tables=[table], page=page)


def _captured(out: Path, model: str, samples: int, length: int | None) -> tuple[Any, float]:
    """Return a model's two graphs, and their CPU seconds."""
    path = write_json(out / "configs" / f"{model}.json", MODELS[model][0])
    begun = time.process_time()
    return graphs_of(f"{PREFIX}{path}", samples, length), time.process_time() - begun


def _error(graphs: Any, model: str, base: str) -> float:
    found, _ = graphs(model, *H100_BATCH[model])
    _, plan = judge(cards_of("H100"), link_of(LINK), found, base)
    return (plan.step_s or 0.0) / H100_S[model, base] - 1.0


def _judged(graphs: Any, pile: str, model: str) -> dict[str, Any]:
    found, capture_s = graphs(model, *MODELS[model][1:])
    cards, begun, why, verdict = cards_of(pile), time.process_time(), None, None
    base = "bf16" if all(Precision.BF16 in sheet.precisions for _, sheet in cards.values()) else "fp16"
    try:
        verdict = judge(cards, link_of(LINK), found, base)[1].to_json()["verdict"]
    except InfeasibleError as error:
        why = str(error)
    return {"base": base, "cpu_s": capture_s + time.process_time() - begun, "verdict": verdict, "why": why}


def _cell(row: dict[str, Any]) -> str:
    if row["verdict"] is None:
        return "does not fit"
    rates = {way["name"]: way["samples_per_s"] for way in row["verdict"]["ways"]}
    alone = next(iter(rates.values()))
    ddp = next((f"; DDP {rate / alone:.2f}" for name, rate in rates.items() if name.startswith("DDP")), "")
    out = row["verdict"]["leave_out"]
    return f"{rates[PLAN] / alone:.2f}{ddp}" + (f"; leave {', '.join(out)} out" if out else "")


if __name__ == "__main__":
    run_command(main)
