"""Plan for 4 A100 and 4 T4 on a laptop: what if those GPUs trained this model together?

python examples/plan_offline.py

A small batch is measured here. The planned batch is captured on the meta device, where nothing is computed.
The GPUs are priced from their data sheets, at the shares of peak that operators reach here: simulated.
"""

from __future__ import annotations

import torch

import qsync
from qsync.predictor.cost_model.fill_profile import fill, learned_from, simulate
from qsync.records.datasheets import datasheet

WIDTH, LAYERS, SMALL, LARGE = 128, 1, 4, 512
DEVICES = {"train": "A100", "infer": "T4"}


def encoder() -> torch.nn.Module:
    """Return a Pre-LN transformer encoder, on the default device."""
    layer = torch.nn.TransformerEncoderLayer(
        WIDTH, 4, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)


def squared(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return a loss: the distance of the outputs from 1."""
    return (model(batch) - 1).square().mean()


def main() -> None:
    """Measure, simulate the two devices, plan, replay, and print what each class would do."""
    torch.manual_seed(0)
    model, batch = encoder(), torch.randn(SMALL, 32, WIDTH)
    measured = qsync.profile(model, batch, squared, rounds=4)
    sensitivity = qsync.sensitivity(model, [batch], squared)
    with torch.device("meta"):
        graph = qsync.capture(encoder(), torch.randn(LARGE, 32, WIDTH))
    small = qsync.capture(model, batch)
    costs = learned_from(small, measured)
    larger = fill(measured, graph, costs, measured_on=small)

    profiles = {n: simulate(larger, graph, datasheet(sheet), n, costs) for n, sheet in DEVICES.items()}
    classes = [{"name": name, "datasheet": sheet, "count": 4} for name, sheet in DEVICES.items()]
    cluster = qsync.Cluster.from_json({"classes": classes, "link": {"latency_s": 30e-6, "bytes_per_s": 10e9}})
    plan = qsync.plan(graph, profiles, sensitivity, cluster)
    full = {name: {} for name in DEVICES}  # nothing lowered
    before, after = (qsync.replay(graph, one, profiles, cluster) for one in (full, plan))
    print(f"FP32 takes {before.step_s * 1e3:.2f} ms a step, the plan {after.step_s * 1e3:.2f} ms (simulated)")
    for name, entry in plan.classes.items():
        then, now = (found.classes[name].wait_s for found in (before, after))
        print(f"{name}: {len(entry.lowered)} operators lowered; waits {then:.1e} s in FP32, {now:.1e} s now")


if __name__ == "__main__":
    main()
