"""The limits that qsync promises to keep: `python -m qsync.experiments.prediction.limits [OUT.json]` measures them.

Everything here is measured but for the profiles that `qsync plan` is timed on: those are SYNTHETIC (costs
from FLOPs and bytes at round rates), since only their size matters to how long planning takes.
"""

from __future__ import annotations

import copy
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

import qsync
from qsync.backend.device_detection import machine
from qsync.experiments.demo.rank import commit
from qsync.records.basis import Basis
from qsync.records.cluster import Cluster, DeviceClass, Link
from qsync.records.graph import Op, OpGraph, Role
from qsync.records.json_files import write_json
from qsync.records.plans import ClassPlan, Plan
from qsync.records.precision import CARRIED_FLOATS, PRECISIONS_BY_KIND, Precision, type_bytes
from qsync.records.profiles import Cost, Profile, Sensitivity

STARTS = 10
PLANS = 5
PAIRED_STEPS = 30
PRECISIONS = (Precision.FP32, Precision.BF16, Precision.INT8)
# Round rates of a server core, for the synthetic profiles: FLOP/s in FP32, bytes/s, and speed against FP32.
_FLOPS_PER_S, _BYTES_PER_S = 1e11, 1e10
_SPEED = {Precision.FP32: 1.0, Precision.BF16: 2.0, Precision.INT8: 3.0}


def main(out: Path = Path("limits.json")) -> None:
    """Measure every limit, print a table, and write the figures to a JSON file."""
    rows: list[dict[str, Any]] = []
    with Console(stderr=True).status("limits") as status:
        for measure in (import_time, plan_time, large_capture, wrapped_step):
            status.update(str(measure.__doc__).splitlines()[0])
            rows += measure()
    content = {
        "measured": True,
        "machine": machine(),
        "qsync": qsync.__version__,
        "commit": commit(),
        "limits": rows,
    }
    write_json(out, content)
    Console().print(_table(rows))


def import_time() -> list[dict[str, Any]]:
    """How long `import qsync` takes in a fresh interpreter."""
    code = "import time; t = time.perf_counter(); import qsync; print(time.perf_counter() - t)"
    times = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(STARTS)
    ]
    how = f"median of {STARTS} fresh interpreters"
    return [_row("import qsync", statistics.median(times) * 1e3, 50.0, "ms", how)]


def plan_time() -> list[dict[str, Any]]:
    """How long `qsync plan` takes for BERT-base."""
    with tempfile.TemporaryDirectory() as folder:
        basis = synthetic_basis(bert_base())
        basis.save(folder)
        command = ["-m", "qsync.commands.main", "plan", folder, "--out", f"{folder}/plan.json"]
        seconds = statistics.median(_wall_s(command) for _ in range(PLANS))
        lowered = sum(len(entry.lowered) for entry in Plan.load(f"{folder}/plan.json").classes.values())
    size = f"{len(basis.graph.adjustable)} operators, {lowered} lowered"
    how = f"wall time of the command, median of {PLANS}; {size}; SYNTHETIC profiles"
    return [_row("qsync plan, BERT-base", seconds, 2.0, "s", how)]


def large_capture() -> list[dict[str, Any]]:
    """How long capturing a Llama-3-70B-sized model takes, and how much memory."""
    found = _in_fresh_process("capture_llama")
    size = f"{found['num_ops']} operators, {found['num_parameters'] / 1e9:.1f} G parameters"
    how = f"meta device, one fresh process; {size}"
    return [
        _row("capture, Llama-3-70B", found["seconds"], 30.0, "s", how),
        _row("its peak memory", found["peak_bytes"] / 2**30, 2.0, "GiB", "resident, the whole process"),
    ]


def wrapped_step() -> list[dict[str, Any]]:
    """What a step costs under a plan that lowers nothing."""
    found = _in_fresh_process("compare_steps")
    plain = f"plain step {found['plain_s'] * 1e3:.0f} ms"
    how = f"BERT 4x512, {PAIRED_STEPS} training steps in turn, one thread; {plain}"
    return [
        _row("step, all-FP32 plan / unwrapped", found["ratio"], 1.02, "x", f"median of pairs; {how}"),
        _row(
            "loss, gradients bitwise equal",
            found["bitwise"],
            True,
            "",
            "every step, dropout on; parameters at the end",
        ),
    ]


def capture_llama() -> dict[str, Any]:
    """Capture a model of Llama-3-70B's sizes on the meta device.

    For a fresh process, whose peak memory is read.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
        num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500000.0,
        use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        tokens = torch.zeros(1, 2048, dtype=torch.int64)
    start = time.perf_counter()
    graph = qsync.capture(model, {"input_ids": tokens, "labels": tokens})
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "peak_bytes": peak_resident_bytes(),
        "num_ops": len(graph.ops),
        "num_parameters": sum(value.num_elements for value in graph.parameters),
    }


def compare_steps() -> dict[str, Any]:
    """Train a BERT of 4 layers, 512 wide, and its twin under an all-FP32 plan, in turn on equal batches."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = bert(num_hidden_layers=4, hidden_size=512, num_attention_heads=8, intermediate_size=2048)
    wrapped = copy.deepcopy(plain)
    batches = [tokens(4, 128, seed) for seed in range(4)]
    graph = qsync.capture(wrapped, batches[0])
    assignment = {op.name: Precision.FP32 for op in graph.adjustable}
    qsync.wrap(wrapped, Plan(graph.model, graph.hash, {"here": ClassPlan(assignment)}))
    models = {"plain": plain, "wrapped": wrapped}
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-4) for name, model in models.items()}
    times: dict[str, list[float]] = {"plain": [], "wrapped": []}
    same = True
    for step in range(PAIRED_STEPS + 3):  # three to warm up: tracing, caches
        losses = {}
        # Who goes first alternates, since the second finds the caches of the first.
        for name in ("plain", "wrapped") if step % 2 else ("wrapped", "plain"):
            torch.manual_seed(step)
            start = time.perf_counter()
            optimizers[name].zero_grad()
            losses[name] = models[name](**batches[step % len(batches)]).loss
            losses[name].backward()
            optimizers[name].step()
            times[name].append(time.perf_counter() - start)
        same = same and torch.equal(losses["plain"], losses["wrapped"])
        same = same and _equal([p.grad for p in plain.parameters()], [p.grad for p in wrapped.parameters()])
    same = same and _equal(list(plain.parameters()), list(wrapped.parameters()))
    pairs = list(zip(times["wrapped"][3:], times["plain"][3:], strict=True))
    return {
        "ratio": statistics.median(a / b for a, b in pairs),
        "plain_s": statistics.median(b for _, b in pairs),
        "bitwise": same,
    }


def bert_base() -> OpGraph:
    """The graph of BERT-base in training, 8 sequences of 128 tokens. Captured on the meta device."""
    with torch.device("meta"):
        return qsync.capture(bert(), tokens(8, 128))


def synthetic_basis(graph: OpGraph) -> Basis:
    """A complete basis for any graph whose costs are made up: two ranks, one of them at half speed."""
    classes = tuple(DeviceClass(name, "cpu", 1, 64 * 2**30, PRECISIONS) for name in ("train", "infer"))
    profiles = {
        "train": synthetic_profile(graph, "train", 1.0),
        "infer": synthetic_profile(graph, "infer", 2.0),
    }
    omega = {
        op.name: {
            str(p): {"bf16": 1.0, "int8": 20.0}[p] * (1 + place)
            for p in _measured(op)
            if p is not Precision.FP32
        }
        for place, op in enumerate(graph.adjustable)
    }
    sensitivity = Sensitivity(graph.hash, "synthetic", omega)
    return Basis(graph, Cluster(classes, Link(1e-4, 1e9, 0.6)), profiles, sensitivity)


def synthetic_profile(graph: OpGraph, name: str, slow: float) -> Profile:
    """Costs from FLOPs and bytes at round rates, `slow` times as long. SYNTHETIC: nothing was measured."""
    ops = {}
    for op in graph.ops:
        modes: Sequence[str] = _measured(op)
        if op.role is not Role.ADJUSTABLE:
            modes = tuple(dict.fromkeys((op.dtype, *CARRIED_FLOATS)))
        ops[op.name] = {str(mode): _synthetic_cost(op, mode, slow) for mode in modes}
    sources = ("fp64", "fp32", "bf16", "fp16")
    targets = (*sources, *(f"int8_{layout}" for layout in ("row", "col", "image", "channel")))
    latency, per_element = (
        Cost(slow * 1e-6, slow * 1e-6),
        Cost(slow * 4 / _BYTES_PER_S, slow * 4 / _BYTES_PER_S),
    )
    fit = {(s, t): (latency, per_element) for s in sources for t in targets if s != t}
    return Profile(
        name, graph.hash, graph.shapes_hash, ops, {}, fit, outside=Cost(0.0), host_s=slow * 1e-3,
        optimizer_s=slow * 2e-2, optimizer_bytes=8 * sum(v.num_elements for v in graph.parameters),
        step_s={}, machine={"synthetic": True},
    )  # fmt: skip


def _synthetic_cost(op: Op, mode: str, slow: float) -> Cost:
    if op.role is Role.ADJUSTABLE:
        seconds = slow * op.flops / _FLOPS_PER_S / _SPEED[Precision(mode)]
    else:
        seconds = slow * 2 * type_bytes(mode, op.num_elements) / _BYTES_PER_S
    return Cost(seconds, 2 * seconds if op.requires_grad else 0.0)


def _measured(op: Op) -> tuple[Precision, ...]:
    return tuple(p for p in PRECISIONS_BY_KIND.get(op.kind, ()) if p in PRECISIONS)


def bert(**sizes: int) -> torch.nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(**sizes))


def tokens(rows: int, length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """A batch on the device in force, the meta device included."""
    if torch.get_default_device().type == "meta":
        tokens, labels = torch.empty(rows, length, dtype=torch.int64), torch.empty(rows, dtype=torch.int64)
    else:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 30000, (rows, length), generator=generator)
        labels = torch.randint(0, 2, (rows,), generator=generator)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def _equal(ours: Sequence[torch.Tensor | None], theirs: Sequence[torch.Tensor | None]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(a is b is None or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def peak_resident_bytes() -> int:
    """This process's own peak. Not getrusage's: that one remembers the process it was started from."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024


def _in_fresh_process(function: str) -> Any:
    code = f"import json; from qsync.experiments import limits; print(json.dumps(limits.{function}()))"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _wall_s(arguments: Sequence[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Limits (measured)", box=box.SIMPLE_HEAD)
    for heading in ("what", "measured", "limit", "holds", "how"):
        table.add_column(heading, justify="right" if heading in ("measured", "limit") else "left")
    for row in rows:
        shown = (
            f"{row[key]:.3g} {row['unit']}" if row["unit"] else str(row[key]) for key in ("measured", "limit")
        )
        table.add_row(row["name"], *shown, "yes" if row["holds"] else "NO", row["how"])
    return table


def _row(name: str, measured: Any, limit: Any, unit: str, how: str) -> dict[str, Any]:
    holds = measured == limit if isinstance(limit, bool) else measured <= limit
    return {"name": name, "measured": measured, "limit": limit, "unit": unit, "holds": holds, "how": how}


if __name__ == "__main__":
    typer.run(main)
