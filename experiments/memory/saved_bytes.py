"""Bytes that a step keeps for backward: `python -m qsync.experiments.memory.saved_bytes --out saved.json` counts them.

Counted with autograd's own hooks: storages, each once, parameters left out. In FP32, under torch.autocast in
BF16 and in qsync's precisions, each as torch keeps it and with operators that save less. A count holds copies
of weights, too, which do not grow with the batch; so what is reported is what one more batch adds. Beside it
stand what the memory model predicts, and what a step takes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

import qsync
from qsync.backend.device_detection import machine
from qsync.experiments.demo.rank import commit
from qsync.experiments.harness.pairing import measure, ratios
from qsync.experiments.harness.peers import under_autocast
from qsync.experiments.workloads.demo_workloads import seeded
from qsync.experiments.workloads.resnet import ResNet
from qsync.predictor.memory.peak import peak_memory
from qsync.records.graph import OpGraph
from qsync.records.json_files import write_json
from qsync.records.precision import PRECISIONS_BY_KIND, Precision
from qsync.runtime import program

SEED = 0
TORCH, AUTOCAST = "torch, fp32", "torch.autocast, bf16"
# Precisions by preference.
WAYS: dict[str, tuple[Precision, ...]] = {
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


def main(out: Path = Path("saved.json"), rounds: int = 7) -> None:
    """Count what every way of running each model keeps for backward, print tables, write the figures."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with Console(stderr=True).status("saved bytes") as status:
        for case in cases():
            rows += count(case, rounds, lambda what, name=case.name: status.update(f"{name}, {what}"))
    content = {
        "measured": True,
        "machine": machine(),
        "qsync": qsync.__version__,
        "commit": commit(),
        "seed": SEED,
        "threads": 1,
        "rounds": rounds,
        "saved": rows,
    }
    write_json(out, content)
    for case in cases():
        Console().print(_table(case.name, [row for row in rows if row["model"] == case.name]))


def cases() -> tuple[Case, ...]:
    """One linear, a BERT of 4 layers 512 wide, and a ResNet-18 for small images."""
    return (
        Case("linear 1024 x 768 -> 3072", _linear, lambda n: {"input": _normal(1024 * n, 768)}),
        Case("BERT 4 x 512, batch 8 x 128", _bert, _tokens),
        Case("ResNet-18, batch 16 of 32 x 32", _resnet, lambda n: {"images": _normal(16 * n, 1, 32, 32)}),
    )


def count(case: Case, rounds: int, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row for each way of running this model: bytes counted and predicted, and seconds of a step."""
    ways: dict[str, tuple[tuple[Precision, ...], bool] | None] = {TORCH: None, AUTOCAST: None}
    for name, preferred in WAYS.items():
        ways[name], ways[f"{name}, saving less"] = (preferred, False), (preferred, True)
    rows, steps = [], {}
    for name, way in ways.items():
        progress(f"{name}, counting")
        torch._dynamo.reset()
        counts, predictions, step = [], [], None
        for num in (1, 2):
            model, run = _ready(case, name, way)
            batch = case.batch(num)
            run(**batch)  # compiled here, so that only the step is counted
            known = [*batch.values(), *model.parameters(), *model.buffers()]
            counts.append(saved_bytes(lambda run=run, batch=batch: run(**batch), known))
            predictions.append(_predicted(model) if way else None)
            step = step or _step(model, run, batch)
        steps[name] = step
        row: dict[str, Any] = {"model": case.name, "way": name, "activation_bytes": counts[1] - counts[0]}
        one, two = predictions
        row["predicted_bytes"] = None if one is None or two is None else two - one
        row["beside_bytes"] = 2 * counts[0] - counts[1]
        rows.append(row)
    progress("timing")
    samples = measure(steps, rounds, torch.device("cpu"), sample_s=0.0)
    for row in rows:
        row["step_s"] = samples[row["way"]].median_s
        row["step_to_fp32"] = statistics.median(ratios(samples[row["way"]], samples[TORCH]))
        row["to_fp32"] = row["activation_bytes"] / rows[0]["activation_bytes"]
    return rows


def saved_bytes(
    forward: Callable[[], Any], known: Iterable[torch.Tensor] = (), leave_out: Collection[int] = ()
) -> int:
    """Bytes of the storages that autograd keeps for backward once `forward` has run, each counted once.

    The storages of `known` (parameters, buffers, the batch) are there anyway and are left out, and so are
    those at the addresses that `leave_out` holds once `forward` has run.

    >>> saved_bytes(lambda: model(batch), [batch, *model.parameters(), *model.buffers()])
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
    case: Case, name: str, way: tuple[tuple[Precision, ...], bool] | None
) -> tuple[nn.Module, Callable[..., Any]]:
    model = seeded(case.make, SEED).train()
    if way is not None:
        preferred, less = way
        program.attach(model, _choice(preferred), saving_less=program.saving(["*"] if less else []))
    return model, under_autocast(model, torch.device("cpu")) if name == AUTOCAST else model


def _choice(preferred: tuple[Precision, ...]) -> program.Chooser:
    """The first of these precisions that an operator's kind has a kernel for, else FP32."""

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


def _linear() -> nn.Module:
    return _Shifted()


class _Shifted(nn.Module):
    """A linear whose input is an activation: the batch itself would be there anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.linear = nn.Parameter(torch.zeros(768)), nn.Linear(768, 3072)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.linear(input + self.shift)


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=2048,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def _resnet() -> nn.Module:
    return ResNet((64, 128, 256, 512))


def _tokens(num: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(0, 30000, (8 * num, 128), generator=generator)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED))


def _table(name: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"{name}: kept for backward (measured)", box=box.SIMPLE_HEAD)
    for heading in ("", "MB", "of FP32", "predicted MB", "step, of FP32"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        predicted = row["predicted_bytes"]
        table.add_row(
            row["way"],
            f"{row['activation_bytes'] / 1e6:.2f}",
            f"{row['to_fp32']:.3f}",
            "" if predicted is None else f"{predicted / 1e6:.2f}",
            f"{row['step_to_fp32']:.2f}",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
