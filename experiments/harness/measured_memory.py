"""Measure a training step's memory: its peak, and the bytes saved for backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import accumulate
from typing import Any

import torch

from qsync.predictor.profiling.allocator_events import allocator_events


def step_peak_bytes(step: Callable[[], None], device: torch.device) -> int:
    """Return the peak bytes of live tensors during `step`, beyond those before it.

    It counts the allocator's events, because resident memory includes everything else in the process.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with allocator_events() as events:
        step()
    return max(accumulate((num_bytes for _, num_bytes in events), initial=0))


def saved_bytes(
    forward: Callable[[], Any], known: Iterable[torch.Tensor] = (), leave_out: Collection[int] = ()
) -> int:
    """Return the bytes of the distinct storages that autograd saves in `forward`.

    It excludes storages of `known` (parameters, buffers, the batch), and addresses in `leave_out` after
    `forward`.
    """
    there = {tensor.untyped_storage().data_ptr() for tensor in known}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()  # kept alive until counted, so that no address is reused
    num_bytes = sum(size for address, size in kept.items() if address not in leave_out)
    del result
    return num_bytes


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the optimizer's state."""
    state = optimizer.state.values()
    return sum(v.nbytes for entry in state for v in entry.values() if isinstance(v, torch.Tensor))


def bucket_bytes(model: torch.nn.Module) -> list[int]:
    """Return the bytes of DDP's gradient buckets after a backward pass."""
    storages = [p.grad.untyped_storage() for p in model.parameters() if p.grad is not None]
    return list({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
