"""Cases of users' training loops, each run in plain DDP and by qsync, on two ranks.

A case is a function of an `Arm`, which wraps its model: in plain DDP, or by qsync in one precision. It
returns the gradient norms and the trained model.
"""

from __future__ import annotations

import gc
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import qsync
from qsync.distributed.agreement import agree
from qsync.experiments.harness.cases import REFUSED, SILENT, WARNS, WORKS, Case, Cases
from qsync.runtime import coverage

# Relative tolerances of gradient norms: FP32 plan against plain DDP, base bf16 against torch.autocast (whose
# attention is another kernel), and INT8.
NORM_TOLERANCE, BF16_TOLERANCE, LARGEST_DIFFERENCE = 1e-6, 2e-3, 0.2
_EVERYTHING = {"lower_all": True, "precisions": ["fp32", "bf16", "int8"]}
# Options of a BF16 plan, different from the plans of all arms.
OTHER_PLAN = {"pins": {"*": "bf16"}, "lower_all": True, "precisions": ["fp32", "bf16"]}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A case's outcome: gradient norms, other numbers that must equal plain DDP's, and the model."""

    norms: list[float]
    model: nn.Module
    others: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Arm:
    """A case's way to wrap its model: plain DDP (no precision), or qsync with one precision."""

    precision: str | None
    folder: Path

    @property
    def is_plain(self) -> bool:
        """Return whether the arm runs without qsync."""
        return self.precision is None

    @property
    def options(self) -> dict[str, Any]:
        """Return keyword arguments of `qsync.hybrid`."""
        lowered = {"pins": {"*": self.precision}, **_EVERYTHING}
        chosen = {"precisions": ["fp32"], "bitwise": True} if self.precision == "fp32" else lowered
        return {"cache_dir": self.folder.parent / "plans", **chosen}

    @property
    def in_bf16(self) -> dict[str, Any]:
        """Return options that turn the FP32 plan into one with base bf16."""
        return {"precisions": ["fp32", "bf16"]} if self.precision == "fp32" else {}

    def hybrid(
        self, model: nn.Module, batch: Any, loss_fn: Any = None, *, ddp: bool = True, **options: Any
    ) -> Any:
        """Return the model in DDP, or unwrapped for a framework if `ddp` is False.

        Plain DDP uses only `ddp_options`.
        """
        if not self.is_plain:
            return qsync.hybrid(model, batch, loss_fn, ddp=ddp, **{**self.options, **options})
        ddp_options = {"gradient_as_bucket_view": True, **options.get("ddp_options", {})}
        return DistributedDataParallel(model, **ddp_options) if ddp else model


CASES = Cases()


def case(
    group: str, name: str, tolerance: float = NORM_TOLERANCE, **verdict: Any
) -> Callable[[Callable[[Arm], Outcome]], Callable[[Arm], Outcome]]:
    """Register a function as a case, with the arguments of `Cases.case`."""
    return CASES.case(group, name, tolerance, **verdict)


def cases(group: str, outcome: Callable[..., Outcome], given: Mapping[str, Mapping[str, Any]]) -> None:
    """Register a case per name: `outcome` with the given arguments, except those of `case`."""
    for name, arguments in given.items():
        own = {key: arguments[key] for key in ("refused", "warns", "tested") if key in arguments}
        rest = {key: value for key, value in arguments.items() if key not in own}
        case(group, name, **own)(update_wrapper(partial(outcome, **rest), outcome))


def judge(case: Case, folder: Path) -> dict[str, Any]:
    """Run a case under an FP32 plan, in plain DDP and in INT8; compare them equally on every rank."""
    arms = [Arm(precision, folder / (precision or "plain")) for precision in ("fp32", None, "int8")]
    for arm in arms if dist.get_rank() == 0 else ():
        shutil.rmtree(arm.folder, ignore_errors=True)
        arm.folder.mkdir(parents=True)
    dist.barrier()
    said: list[str] = []
    results: list[Outcome | str] = []
    for number, arm in enumerate(arms):
        with _apart(), _listening([] if number else said):
            results.append(_result(case, arm))
            if not isinstance(results[0], Outcome):
                return case.became(REFUSED, results[0], norm_error=None)
    return _verdict(case, results, said)


def _result(case: Case, arm: Arm) -> Outcome | str:
    """Return a case's outcome on all ranks, or the sentence of the first error."""
    try:
        found: Outcome | None = case.do(arm)
        sentence = ""
    except Exception as error:
        found, sentence = None, str(error).splitlines()[0]
    sentences = [text for text in agree("comparing outcomes", lambda: sentence) if text]
    return found if found is not None and not sentences else (sentences or [""])[0]


def _verdict(case: Case, results: list[Outcome | str], said: list[str]) -> dict[str, Any]:
    exact, plain, lowered = results
    assert isinstance(exact, Outcome)
    if isinstance(plain, str) or isinstance(lowered, str):
        text = plain if isinstance(plain, str) else lowered
        return case.became(SILENT, f"runs only under an FP32 plan: {text}", norm_error=None)
    error = max(agree("comparing norms", lambda: difference(plain, exact)))
    is_good = error <= case.tolerance
    same = all(replicas_agree(one.model) for one in (exact, lowered))
    off = max(agree("comparing norms", lambda: difference(plain, lowered)))
    if is_good and same and 0.0 < off < LARGEST_DIFFERENCE:
        return case.became(WORKS, "; ".join(said), norm_error=error)
    why = f"norms differ by {error:.1e}, in INT8 by {off:.1e}, replicas {'agree' if same else 'differ'}"
    return case.became(WARNS if said else SILENT, "; ".join(said) or why, norm_error=error)


def difference(one: Outcome, other: Outcome) -> float:
    """Return the largest relative difference of two outcomes' numbers."""
    pairs = list(zip([*one.norms, *one.others], [*other.norms, *other.others], strict=True))
    return max(abs(b - a) / max(abs(a), 1e-30) for a, b in pairs)


def replicas_agree(model: nn.Module) -> bool:
    """Return whether all ranks hold bitwise equal parameters, gathered if sharded."""
    whole = [
        getattr(p, "full_tensor", lambda p=p: p)().detach().flatten().double() for p in model.parameters()
    ]
    mine = torch.cat(whole)
    theirs = mine.clone()
    dist.broadcast(theirs, 0)
    return all(agree("comparing replicas", lambda: torch.equal(mine, theirs)))


@contextmanager
def _apart() -> Iterator[None]:
    """Isolate a case from the next one."""
    coverage.say_once.cache_clear()
    torch.manual_seed(dist.get_rank())
    yield
    gc.collect()
    torch._dynamo.reset()
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState):
        state._reset_state()
    PartialState._reset_state()


@contextmanager
def _listening(said: list[str]) -> Iterator[None]:
    """Collect qsync's log records and warnings; suppress those of other libraries."""
    handler = logging.Handler()
    handler.addFilter(lambda record: "the plan saves" not in record.getMessage())  # steps are too short here
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("qsync")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.removeHandler(handler)


class Net(nn.Module):
    """A small classifier without dropout."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
        self.head = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.head(x + self.body(x))  # type: ignore[no-any-return]


def net(kind: Callable[[], nn.Module] = Net) -> Any:
    """Return the model, equal at every call and on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind()


Batch = tuple[torch.Tensor, torch.Tensor]


def batch(number: int = 0, size: int = 8) -> Batch:
    """Return this rank's batch."""
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    return torch.randn(size, 32, generator=generator), torch.randint(0, 8, (size,), generator=generator)


def rows() -> TensorDataset:
    """Return a small training set."""
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(64, 32, generator=generator), torch.randint(0, 8, (64,), generator=generator)
    )


def loss_of(model: Any, batch: Batch) -> Any:
    """Return the loss of a classifier."""
    return F.cross_entropy(model(batch[0]), batch[1])


def norm(model: Any) -> float:
    """Return the norm of a model's gradients."""
    grads = [
        getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters() if p.grad is not None
    ]
    return float(torch.cat([grad.flatten().double() for grad in grads]).norm())


def sgd(model: Any) -> torch.optim.Optimizer:
    """Return plain SGD, which does not amplify differences of gradients."""
    return torch.optim.SGD(model.parameters(), lr=0.05)


def trained(
    model: Any,
    steps: int = 3,
    optimizer: torch.optim.Optimizer | None = None,
    loss_fn: Callable[[Any, Batch], Any] = loss_of,
    norm_of: Callable[[Any], float] = norm,
) -> list[float]:
    """Train some steps; return the gradient norms."""
    norms, optimizer = [], optimizer or sgd(model)
    for number in range(steps):
        optimizer.zero_grad()
        loss_fn(model, batch(number)).backward()
        norms.append(norm_of(model))
        optimizer.step()
    return norms


def facts(**checks: bool) -> list[float]:
    """Return true facts as numbers to compare; raise an error that names a false one."""
    false = [name for name, holds in checks.items() if not holds]
    if false:
        raise AssertionError(f"not true: {', '.join(false)}")
    return [1.0] * len(checks)


def same_state(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Return whether two state dicts hold bitwise equal tensors under equal names."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
