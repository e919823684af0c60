"""Time a traced graph under several assignments: whole forward and backward passes, taken in turns.

Operators that are timed alone mislead: their operands are warm in the caches, and a cast that other
operators share counts in full. Therefore what they suggest is compared with what was asked for, in passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._pytree import tree_leaves

from qsync.backend import Kernels
from qsync.backend.devices.kernel_timing import apart, fastest
from qsync.backend.kernel_cache import rounded_up
from qsync.lowering.lowered_graph import LoweredGraph, Run
from qsync.processes.progress import shown_on_rank_zero
from qsync.records.graph import digest
from qsync.runtime import operator_timing
from qsync.runtime.rewriting import rewrite
from qsync.tracing.operator_table import is_torch, runs_code_of_users
from qsync.tracing.segments import Segment

# Relative time that a later assignment must save: the first one is what was asked for.
_TIE = 0.01
# A pass to warm up and five rounds, more within these seconds: three assignments take 18 passes.
_ROUNDS, _TIMED_S = 20, 0.3


def fastest_assignment(
    segment: Segment, assignments: Sequence[LoweredGraph], inputs: Sequence[Any], kernels: Kernels
) -> int | None:
    """Return the index of the assignment with the fastest pass; a tie goes to the first.

    The passes run on copies of a call's `inputs`, in a thread of their own. The choice is kept on disk.
    Returns None for a graph that cannot run again unnoticed: it calls code of users, communicates, or is
    inside a torch.func transform.

    >>> fastest_assignment(segment, [in_int8, mixed, in_bf16], inputs, kernels)
    """
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    if not _can_repeat(segment) or not all(map(_is_plain, tensors)):
        return None
    trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    modes = [[node.mode for node in one.nodes if isinstance(node, Run)] for one in assignments]
    shapes = [rounded_up(tensor.shape) for tensor in tensors]
    key = ("pass", digest([assignments[0].graph.hash, shapes, modes]), trains, torch.get_num_threads())
    known = operator_timing.known_choices(kernels.device, kernels.bitwise)

    def trial() -> int:
        gpus = [kernels.device] if kernels.device.type == "cuda" else []
        with torch.random.fork_rng(devices=gpus):
            runs = [_pass_of(rewrite(segment, one, kernels), inputs, trains) for one in assignments]
            return fastest(runs, _ROUNDS, _TIMED_S, _TIE)

    number = known.get(key, len(assignments))
    if number is None:
        with shown_on_rank_zero("qsync: comparing precisions in whole passes, once a shape", once=True):
            number = known.decided(key, len(assignments), partial(apart, trial))
    return number


def _can_repeat(segment: Segment) -> bool:
    """Return whether a graph has torch's own calls alone, on one process."""
    calls = [node for node in segment.module.graph.nodes if node.op in ("call_function", "call_method")]
    is_own = all(is_torch(node.target) and not runs_code_of_users(node) for node in calls)
    return is_own and all(map(_can_repeat, segment.nested.values()))


def _is_plain(tensor: torch.Tensor) -> bool:
    is_torchs = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_torchs and not tensor.is_inference() and not is_functorch_wrapped_tensor(tensor)


def _pass_of(run: torch.fx.GraphModule, inputs: Sequence[Any], trains: bool) -> Callable[[], None]:
    """Return a function that runs a rewritten graph forward, and backward if it `trains`.

    Trained tensors share their memory with the call's; all others are copied, since a graph may write to
    its buffers. Gradients reach neither `.grad` nor hooks.
    """
    values = [_own(value) if isinstance(value, torch.Tensor) else value for value in inputs]
    leaves = [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
    gradients: list[torch.Tensor] = []

    def step() -> None:
        results = [
            result for result in tree_leaves(run(*values))
            if isinstance(result, torch.Tensor) and result.requires_grad
        ]  # fmt: skip
        if trains and results:
            gradients.extend(torch.full_like(result, 1e-3) for result in results[len(gradients) :])
            torch.autograd.grad(results, leaves, gradients, allow_unused=True)

    return step


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor.clone()
