"""Bytes that a step saves for backward.

    python -m qsync.experiments.memory.saved_bytes --out FOLDER

Counted with autograd's own hooks: storages, each once, parameters left out. In FP32, under torch.autocast in
BF16 and in qsync's precisions, each as torch saves and with operators that save less. A count holds copies of
weights as well, which do not grow with the batch; so the figure is the bytes that one more batch adds. Beside
it stand the prediction of the memory model and the time of a step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn

from qsync import OpGraph, Precision
from qsync.experiments.harness import Experiment, Fresh, Out, run_command, table_of
from qsync.experiments.harness.pairing import measure, ratios
from qsync.experiments.harness.peers import under_autocast
from qsync.experiments.workloads.large_models import bert
from qsync.experiments.workloads.resnet import ResNet
from qsync.experiments.workloads.workload import seeded
from qsync.predictor.memory.peak import peak_memory
from qsync.records.precision import PRECISIONS_BY_KIND
from qsync.runtime import program

SEED = 0
BERT: dict[str, Any] = {
    "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 2048,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
TORCH, AUTOCAST = "torch, fp32", "torch.autocast, bf16"
# Precisions by preference.
ALTERNATIVES: dict[str, tuple[Precision, ...]] = {
    "fp32": (Precision.FP32,),
    "bf16": (Precision.BF16,),
    "int8": (Precision.INT8,),
    "int8, else bf16": (Precision.INT8, Precision.BF16),
    "int8_all, else bf16": (Precision.INT8_ALL, Precision.BF16),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A model and its batches: `make()` builds it, `batch(n)` holds n times its usual batch."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, torch.Tensor]]


def main(out: Out = Path("saved_bytes"), rounds: int = 7, fresh: Fresh = False) -> None:
    """Count what each model saves for backward in every alternative, print tables, write the figures."""
    torch.set_num_threads(1)
    experiment = Experiment("saved bytes", out, seed=SEED, settings={"rounds": rounds}, fresh=fresh)
    with experiment.progress() as say:
        found = {
            case.name: experiment.piece(f"model {number}", partial(count, case, rounds, say))
            for number, case in enumerate(cases())
        }
    rows = [row for own in found.values() for row in own]
    experiment.finish({"threads": 1, "saved": rows}, tables=[_table(*entry) for entry in found.items()])


def cases() -> tuple[Case, ...]:
    """Return one linear, a BERT of 4 layers 512 wide, and a ResNet-18 for small images."""
    return (
        Case("linear 1024 x 768 -> 3072", _Shifted, lambda n: {"input": _normal(1024 * n, 768)}),
        Case("BERT 4 x 512, batch 8 x 128", lambda: bert(**BERT), _tokens),
        Case(
            "ResNet-18, batch 16 of 32 x 32",
            lambda: ResNet((64, 128, 256, 512)),
            lambda n: {"images": _normal(16 * n, 1, 32, 32)},
        ),
    )


def count(case: Case, rounds: int, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return a row for each alternative for this model: bytes counted and predicted, seconds of a step."""
    alternatives: dict[str, tuple[tuple[Precision, ...], bool] | None] = {TORCH: None, AUTOCAST: None}
    for name, preferred in ALTERNATIVES.items():
        alternatives[name], alternatives[f"{name}, saving less"] = (preferred, False), (preferred, True)
    rows: list[dict[str, Any]] = []
    steps: dict[str, Callable[[], None]] = {}
    for name, chosen in alternatives.items():
        progress(f"{case.name}, {name}, counting")
        torch._dynamo.reset()
        counts, predictions = [], []
        for num in (1, 2):
            model, run = _ready(case, name, chosen)
            batch = case.batch(num)
            run(**batch)  # compiled here, so that only the step is counted
            known = [*batch.values(), *model.parameters(), *model.buffers()]
            counts.append(saved_bytes(partial(run, **batch), known))
            predictions.append(_predicted(model) if chosen else 0)
            steps.setdefault(name, _step(model, run, batch))
        rows.append({
            "model": case.name, "way": name, "activation_bytes": counts[1] - counts[0],
            "predicted_bytes": predictions[1] - predictions[0] if chosen else None,
            "beside_bytes": 2 * counts[0] - counts[1],
        })  # fmt: skip
    progress(f"{case.name}, timing")
    samples = measure(steps, rounds, torch.device("cpu"), sample_s=0.0)
    for row in rows:
        row["step_s"] = samples[row["way"]].median_s
        row["step_to_fp32"] = statistics.median(ratios(samples[row["way"]], samples[TORCH]))
        row["to_fp32"] = row["activation_bytes"] / rows[0]["activation_bytes"]
    return rows


def saved_bytes(
    forward: Callable[[], Any], known: Iterable[torch.Tensor] = (), leave_out: Collection[int] = ()
) -> int:
    """Return the bytes of the storages that autograd saves for backward in `forward`, each counted once.

    The storages of `known` (parameters, buffers, the batch) are there anyway and are left out, and so are
    those at the addresses that `leave_out` holds once `forward` has run.
    """
    there = {tensor.untyped_storage().data_ptr() for tensor in known}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()  # held until the count is done, so that no address is used twice
    num_bytes = sum(size for address, size in kept.items() if address not in leave_out)
    del result
    return num_bytes


def _ready(
    case: Case, name: str, chosen: tuple[tuple[Precision, ...], bool] | None
) -> tuple[nn.Module, Callable[..., Any]]:
    model = seeded(case.make, SEED).train()
    if chosen is not None:
        preferred, less = chosen
        program.attach(model, _choice(preferred), saving_less=program.saving(["*"] if less else []))
    return model, under_autocast(model, torch.device("cpu")) if name == AUTOCAST else model


def _choice(preferred: tuple[Precision, ...]) -> program.Chooser:
    """Choose the first of these precisions that an operator's kind has a kernel for, else FP32."""

    def choose(graph: OpGraph) -> dict[str, Precision]:
        return {
            op.name: next((p for p in preferred if p in PRECISIONS_BY_KIND[op.kind]), Precision.FP32)
            for op in graph.adjustable
        }

    return choose


def _predicted(model: nn.Module) -> int:
    lowered = program.program_of(model).lowered
    return sum(sum(peak_memory(part).saved_by.values()) for part in lowered)


def _step(model: nn.Module, run: Callable[..., Any], batch: dict[str, torch.Tensor]) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        result = run(**batch)
        (result if isinstance(result, torch.Tensor) else result.logits).float().sum().backward()

    return step


class _Shifted(nn.Module):
    """A linear whose input is an activation: the batch itself would be there anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.linear = nn.Parameter(torch.zeros(768)), nn.Linear(768, 3072)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(input + self.shift)
        return y


def _tokens(num: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(0, 30000, (8 * num, 128), generator=generator)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED))


def _table(name: str, rows: list[dict[str, Any]]) -> Table:
    def megabytes(value: int | None) -> str:
        return "" if value is None else f"{value / 1e6:.2f}"

    cells = [
        [
            row["way"], megabytes(row["activation_bytes"]), f"{row['to_fp32']:.3f}",
            megabytes(row["predicted_bytes"]), f"{row['step_to_fp32']:.2f}",
        ]
        for row in rows
    ]  # fmt: skip
    headings = ("", "MB", "of FP32", "predicted MB", "step, of FP32")
    return table_of(f"{name}: saved for backward (measured)", headings, cells)


if __name__ == "__main__":
    run_command(main)
