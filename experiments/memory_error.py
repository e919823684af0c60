"""How wrong the memory model is: `python -m qsync.experiments.memory_error --out FOLDER` measures it.

Random plans of every model (precisions and operators that save less drawn at random) run as training runs
them: in DDP, gradients in its buckets, AdamW. What autograd keeps is counted with its own hooks, the peak
with the allocator's own events; beside them stands what was predicted from the graph alone. The most by
which the prediction was ever too small becomes the margin of every plan (`--state` writes it beside the
model, and the table into the README).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

import qsync
from qsync import runtime
from qsync.devices import machine
from qsync.experiments import memory_picture
from qsync.experiments.demo_rank import commit
from qsync.experiments.memory import step_peak_bytes
from qsync.experiments.saved import saved_bytes
from qsync.experiments.subjects import NAMES, subject
from qsync.experiments.training import make_optimizer
from qsync.experiments.workloads import Batch, seeded
from qsync.files import write_json, write_text
from qsync.graph import OpGraph
from qsync.jobs import in_ddp
from qsync.lowering import Cast, Run, can_save_less
from qsync.precision import PRECISIONS_BY_KIND, Precision
from qsync.predictor import memory

SEED = 0
DROPPING = "bert-dropout"  # Hugging Face's, with a mask, and dropout in attention as elsewhere
PRECISIONS = (Precision.FP32, Precision.BF16, Precision.INT8, Precision.INT8_ALL)
PREDICTED = Path(memory.__file__).with_name("memory_error.json")
README = Path(__file__).parent.parent / "README.md"
SAVED_BAR, PEAK_BAR = 0.01, 0.05
HEADINGS = ("model", "plans", "saved: median", "95th", "worst", "peak: median", "95th", "worst", "holds")


@dataclass(frozen=True, slots=True)
class Choice:
    """A random plan of one device class."""

    assignment: Mapping[str, Precision]
    saving_less: tuple[str, ...]


class Trained:
    """One model in training on this process alone, under whatever plan is chosen for it."""

    def __init__(self, model: nn.Module, batch: Batch, loss_fn: Callable[..., torch.Tensor]) -> None:
        self.model, self.batch, self.loss_fn = model.train(), batch, loss_fn
        self.program = runtime.attach(model, lambda graph: {})
        self.ddp = in_ddp(model)
        self.optimizer = make_optimizer(1e-3)(list(model.parameters()))
        for _ in range(2):  # the first step traces, and DDP builds its buckets anew after it
            self.step()
        self.graph: OpGraph = self.program.graph

    def step(self) -> None:
        self.loss_fn(self.ddp(self.batch[0]), self.batch[1]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def optimizer_bytes(self) -> int:
        state = self.optimizer.state.values()
        return sum(v.nbytes for entry in state for v in entry.values() if isinstance(v, torch.Tensor))

    def measure(self, choice: Choice) -> dict[str, int]:
        """Bytes that this plan keeps for backward, and at its peak; predicted and measured."""
        copies = _Copies()
        self._choose(choice, copies)
        known = [self.batch[0], *self.model.parameters(), *self.model.buffers()]
        saved = saved_bytes(lambda: self.model(self.batch[0]), known, leave_out=copies.addresses)
        self._choose(choice, None)
        self.step()  # its end lets go of the copies of weights, so that the next one is seen to make them
        measured = self._throughout() + step_peak_bytes(self.step, torch.device("cpu"))
        found = self.predicted().at_peak()
        return {
            "saved_bytes": saved,
            "predicted_saved_bytes": sum(found.saved_by.values()),
            "peak_bytes": measured,
            "predicted_peak_bytes": found.estimate_bytes,
            "throughout_bytes": self._throughout(),
            "budget_bytes": found.peak_bytes,
        }

    def predicted(self) -> memory.StepMemory:
        """The model's own account of the step, as a rank of several would take it."""
        (lowered,) = self.program.lowered
        return memory.StepMemory(lowered, optimizer_bytes=self.optimizer_bytes, num_ranks=2)

    def _choose(self, choice: Choice, observer: Any) -> None:
        self.program.choose(runtime.following(choice.assignment), observer, lambda graph: choice.saving_less)

    def _throughout(self) -> int:
        gradients = sum(p.nbytes for p in self.model.parameters() if p.requires_grad)
        tensors = [*self.model.parameters(), *self.model.buffers(), self.batch[0]]
        return gradients + self.optimizer_bytes + sum(tensor.nbytes for tensor in tensors)


class _Copies:
    """An Observer that knows the copies of weights, which are no activations."""

    def __init__(self) -> None:
        self.addresses: set[int] = set()
        self._held: list[Any] = []  # an address freed might be used again

    def began(self) -> None:
        pass

    def seen(self, node: Cast | Run, result: Any, operands: tuple[Any, ...]) -> None:
        if isinstance(node, Cast) and node.of_parameter:
            self._held.append(result)
            tensors = [result] if isinstance(result, torch.Tensor) else [result.data, result.scale]
            self.addresses |= {t.untyped_storage().data_ptr() for t in tensors if t is not None}


def main(
    out: Annotated[Path, typer.Option(help="Folder for memory_error.json and memory_error.png.")] = Path("."),
    plans: Annotated[int, typer.Option(help="Random plans of each model.")] = 30,
    state: Annotated[bool, typer.Option(help="Write the worst error beside the memory model.")] = False,
) -> None:
    """Measure every plan, print a table, write the figures, a picture, and on demand the margin."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with _alone(), Console(stderr=True).status("memory") as status:
        for name in (*NAMES, DROPPING):
            trained = make(name)
            for number in range(plans):
                status.update(f"{name}, plan {number + 1} of {plans}")
                choice = drawn(trained.graph, number)
                rows.append({"model": name, "plan": number, **trained.measure(choice)})
            if name == NAMES[0]:
                example = trained.predicted().curve()
    content = {
        "measured": True,
        "machine": machine(),
        "qsync": qsync.__version__,
        "torch": torch.__version__,
        "commit": commit(),
        "seed": SEED,
        "threads": 1,
        "models": summary(rows),
        "worst_underprediction": {"cpu": worst_underprediction(rows)},
        "plans": rows,
    }
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "memory_error.json", content)
    memory_picture.draw(rows, example, out / "memory_error.png")
    if state:
        write_json(PREDICTED, {key: value for key, value in content.items() if key != "plans"})
        write_text(README, between_markers(README.read_text(encoding="utf-8"), markdown(content)))
    Console().print(table(content["models"]))


def make(name: str) -> Trained:
    """A model in training."""
    torch._dynamo.reset()
    if name == DROPPING:
        workload = subject("gpt")
        inputs, _ = workload.batch(SEED, 0, 0)
        targets = torch.arange(len(inputs)) % 2
        return Trained(seeded(_Dropping, SEED), (inputs, targets), nn.functional.cross_entropy)
    workload = subject(name)
    return Trained(workload.make_model(SEED), workload.batch(SEED, 0, 0), workload.loss_fn)


class _Dropping(nn.Module):
    """A BERT classifier of bytes, whose spaces are padding."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=256, hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
            intermediate_size=1024, max_position_embeddings=128,
        )  # fmt: skip
        self.bert = BertForSequenceClassification(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.bert(input_ids=tokens, attention_mask=(tokens != 32).long()).logits


def drawn(graph: OpGraph, number: int) -> Choice:
    """A random plan: how often each precision is chosen is drawn as well, so that some are nearly pure."""
    draw = random.Random(f"{SEED} {number}")
    weights = [draw.expovariate(1.0) for _ in PRECISIONS]
    share = draw.choice((0.0, 0.3, 0.6, 1.0))
    assignment = {}
    for op in graph.adjustable:
        precision = draw.choices(PRECISIONS, weights)[0]
        if precision is Precision.INT8_ALL and precision not in PRECISIONS_BY_KIND[op.kind]:
            precision = Precision.INT8
        assignment[op.name] = precision if precision in PRECISIONS_BY_KIND[op.kind] else Precision.FP32
    return Choice(
        assignment, tuple(op.name for op in graph.ops if can_save_less(op) and draw.random() < share)
    )


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By model the signed errors (predicted / measured - 1) of saved and peak bytes."""
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == name]
        found[name] = {"plans": len(own)}
        for what in ("saved", "peak"):
            errors = [row[f"predicted_{what}_bytes"] / row[f"{what}_bytes"] - 1 for row in own]
            found[name][what] = {
                "median": statistics.median(errors),
                "p95": sorted(map(abs, errors))[max(0, -(-95 * len(errors) // 100) - 1)],
                "lowest": min(errors),
                "highest": max(errors),
            }
        found[name]["over_budget"] = sum(row["peak_bytes"] > row["budget_bytes"] for row in own)
    return found


def worst_underprediction(rows: Sequence[Mapping[str, Any]]) -> float:
    """The largest part of what comes and goes in a step that the prediction missed, over all plans."""
    return max(
        0.0,
        *(
            (row["peak_bytes"] - row["predicted_peak_bytes"])
            / (row["predicted_peak_bytes"] - row["throughout_bytes"])
            for row in rows
        ),
    )


def holds(entry: Mapping[str, Any]) -> bool:
    """Whether a model's errors are within the bars, and no plan went over its budget."""
    within = all(
        max(abs(entry[what]["lowest"]), abs(entry[what]["highest"])) <= bar
        for what, bar in (("saved", SAVED_BAR), ("peak", PEAK_BAR))
    )
    return within and not entry["over_budget"]


def table(models: Mapping[str, Mapping[str, Any]]) -> Table:
    """The errors of each model, in percent."""
    shown = Table(title="Predicted over measured bytes (measured)", box=box.SIMPLE_HEAD)
    for heading in (
        "model",
        "plans",
        "saved: median",
        "95th",
        "worst",
        "peak: median",
        "95th",
        "worst",
        "holds",
    ):
        shown.add_column(heading, justify="left" if heading == "model" else "right")
    for cells in cells_of(models):
        shown.add_row(*cells)
    return shown


def cells_of(models: Mapping[str, Mapping[str, Any]]) -> Iterator[list[str]]:
    """One row of text for each model: the same for the terminal and for the README."""
    for name, entry in models.items():
        cells = [name, str(entry["plans"])]
        for what in ("saved", "peak"):
            errors = entry[what]
            worst = max(errors["lowest"], errors["highest"], key=abs)
            cells += [f"{errors['median']:+.2%}", f"{errors['p95']:.2%}", f"{worst:+.2%}"]
        yield [*cells, "yes" if holds(entry) else "NO"]


def markdown(content: Mapping[str, Any]) -> str:
    """The table as the README has it."""
    machine_name, made = content["machine"]["processor"], content["commit"]
    lines = [
        f"Predicted over measured bytes - 1; random plans, one thread of an {machine_name}, torch "
        f"{content['torch']}; measured, commit {made}.",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|" + "---|" * len(HEADINGS),
        *("| " + " | ".join(cells) + " |" for cells in cells_of(content["models"])),
        "",
        "![Every plan, predicted against measured; one step's memory by part](docs/memory_error.png)",
    ]
    return "\n".join(lines)


def between_markers(text: str, table: str) -> str:
    """A README with this table in the place of its last one."""
    begin, end = (f"<!-- memory:{word} -->" for word in ("begin", "end"))
    head, _, rest = text.partition(begin)
    return f"{head}{begin}\n{table}\n{end}{rest.partition(end)[2]}"


@contextmanager
def _alone() -> Iterator[None]:
    """A process group of one: DDP with its buckets, and nobody to wait for."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
