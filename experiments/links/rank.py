"""One rank of a job over a paced link: every way trains a model of its own, a step each in turns."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs
from torch.nn.parallel import DistributedDataParallel

import qsync
from qsync.distributed import ddp_profiling, job
from qsync.distributed.gradient_weighting import compress_gradients
from qsync.experiments.links.hosts import sent_bytes
from qsync.experiments.workloads.bert import Bert
from qsync.records.compression import AUTO, DEFAULT_RANK, Compression
from qsync.records.json_files import read_json, write_json

FP32, TORCH = "fp32 (DDP)", "powersgd (torch)"
OURS = ("bf16", "int8", "int8+feedback", f"powersgd:{DEFAULT_RANK}")
WAYS = (FP32, TORCH, *OURS, AUTO)
_WARM_UPS = 3  # steps, after which DDP has its buckets and torch's PowerSGD compresses
_ERROR_STEPS = 4
_BUCKET_MB, _ONE_BUCKET_MB = 4.0, 1024.0


def main(settings_path: str) -> None:
    """Train in every way, and let rank 0 write seconds, bytes and errors into the settings' folder."""
    settings = read_json(Path(settings_path))
    torch.set_num_threads(1)
    job.join_job(torch.device("cpu"))
    found = _measured(settings)
    if job.is_rank_zero():
        write_json(Path(settings["result"]), found)
    dist.barrier()


def _measured(settings: dict[str, Any]) -> dict[str, Any]:
    rank = dist.get_rank()
    batch = _batch(settings, 0)
    models = {way: _model(way, settings, batch) for way in settings["ways"]}
    optimizers = {way: _sgd(list(model.parameters())) for way, model in models.items()}
    errors, squared_norm = _errors(models, settings)
    seconds: dict[str, list[float]] = {way: [] for way in models}
    sent: dict[str, list[int]] = {way: [] for way in models}
    for turn in range(_WARM_UPS + settings["rounds"]):
        ways = list(models)
        for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
            optimizers[way].zero_grad()
            dist.barrier()
            began_s, began = time.perf_counter(), sent_bytes(rank)
            _backward(models[way], batch)
            optimizers[way].step()
            took = torch.tensor([time.perf_counter() - began_s], dtype=torch.float64)
            num_bytes = sent_bytes(rank) - began
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if turn >= _WARM_UPS:
                seconds[way].append(float(took))
                sent[way].append(num_bytes)
    plan = _plans.get(AUTO)
    return {
        "seconds": seconds, "sent_bytes": sent, "errors": errors, "squared_norm": squared_norm,
        "formula_bytes": _formula_bytes(models[FP32]),
        "chosen": _counted(plan), "predicted_s": plan.step_s if plan is not None else None,
        "load": os.getloadavg()[0],
    }  # fmt: skip


_plans: dict[str, qsync.Plan] = {}


def _batch(settings: dict[str, Any], number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    tokens = torch.randint(1, 256, (settings["samples"], 128), generator=generator)
    return tokens, tokens.roll(1, 1)


def _errors(models: dict[str, torch.nn.Module], settings: dict[str, Any]) -> tuple[dict[str, float], float]:
    """Return each way's squared error of a step at the first weights, and the squared norm of a gradient.

    It is the squared sum of the errors of several batches, over their number: what error feedback returns in
    a later step does not count.
    """
    lost: dict[str, torch.Tensor] = {}
    exact = torch.zeros(1)
    for number in range(_WARM_UPS + _ERROR_STEPS):
        batch = _batch(settings, number)
        for way, model in models.items():  # FP32 is the first
            model.zero_grad()
            _backward(model, batch)
            found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            exact = found if way == FP32 else exact
            if number >= _WARM_UPS:
                lost[way] = lost.get(way, torch.zeros_like(exact)) + found - exact
    errors = {way: float(one.square().sum()) / _ERROR_STEPS for way, one in lost.items()}
    return errors, float(exact.square().sum())


def _backward(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    torch.autograd.backward(_loss(model, batch))


def _model(way: str, settings: dict[str, Any], batch: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    bare = Bert(num_layers=settings["layers"], width=settings["width"])
    if way == AUTO:
        ddp_profiling.PROFILE_S = settings["profile_s"]
        folder = Path(settings["cache"])
        model = qsync.hybrid(
            bare, batch, _loss, precisions=["fp32"], base="fp32", bitwise=True, cache_dir=folder,
            bucket_cap_mb=_BUCKET_MB, compression=AUTO, make_optimizer=_sgd,
        )  # fmt: skip
        if plans := sorted(folder.glob("*/plan.json")):
            _plans[AUTO] = qsync.Plan.load(plans[0])
        return model
    # torch's hook begins collectives in callbacks: over gloo those of several buckets meet each other's.
    cap_mb = _ONE_BUCKET_MB if way == TORCH else _BUCKET_MB
    model = DistributedDataParallel(bare, bucket_cap_mb=cap_mb, gradient_as_bucket_view=True)
    if way in OURS:
        compress_gradients(model, {"*": way})
    if way == TORCH:
        state = torchs.PowerSGDState(None, matrix_approximation_rank=DEFAULT_RANK, start_powerSGD_iter=2)
        model.register_comm_hook(state, torchs.powerSGD_hook)
    return model


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def _loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def _formula_bytes(model: torch.nn.Module) -> dict[str, float]:
    """Return the bytes that each rank sends in a step, as if all gradients were one bucket."""
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    ranks = dist.get_world_size()
    kinds = {FP32: "fp32", **{way: way for way in OURS}}
    return {
        way: sum(one.sent_bytes(ranks) for one in Compression.parse(kind).messages(shapes, ranks))
        for way, kind in kinds.items()
    }


def _counted(plan: qsync.Plan | None) -> dict[str, int]:
    """Return how many parameters travel in each kind; none where all travel in FP32."""
    kinds = list(plan.compression.values()) if plan is not None else []
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


if __name__ == "__main__":
    main(sys.argv[1])
