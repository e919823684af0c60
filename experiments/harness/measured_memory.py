"""Memory of one training step, measured: its peak, and the bytes saved for backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import accumulate
from typing import Any

import torch

from qsync.predictor.profiling.allocator_events import allocator_events


def step_peak_bytes(step: Callable[[], None], device: torch.device) -> int:
    """Return the most bytes of tensors that `step` has live at once beyond those it found.

    Counted by the allocator's own events: resident memory of the process mixes in everything else that runs.
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


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the optimizer's state."""
    state = optimizer.state.values()
    return sum(v.nbytes for entry in state for v in entry.values() if isinstance(v, torch.Tensor))


def bucket_bytes(model: torch.nn.Module) -> list[int]:
    """Return the bytes of each bucket of gradients, as DDP holds them after a backward pass."""
    storages = [p.grad.untyped_storage() for p in model.parameters() if p.grad is not None]
    return list({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
