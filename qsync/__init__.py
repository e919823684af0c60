"""qsync: synchronous training of one model over unequal devices.

Slow devices run just enough operators in lower precision that no rank waits. `import qsync` is lazy: each
public name is imported on first use. So are the operators `torch.ops.qsync` of exported programs, and qsync's
classes in a model that `torch.load` reads (weights_only included).
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # real imports for type checkers only
    from qsync.api import capture as capture
    from qsync.api import profile as profile
    from qsync.api import sensitivity as sensitivity
    from qsync.api import unwrap as unwrap
    from qsync.api import wrap as wrap
    from qsync.checkpoints.periodic import Checkpoints as Checkpoints
    from qsync.checkpoints.reader import load as load
    from qsync.checkpoints.writer import save as save
    from qsync.distributed.divided_optimizer import divide_optimizer as divide_optimizer
    from qsync.distributed.gradient_weighting import micro_batches as micro_batches
    from qsync.distributed.gradient_weighting import samples_of as samples_of
    from qsync.distributed.gradient_weighting import token_mean as token_mean
    from qsync.distributed.gradient_weighting import weigh_gradients as weigh_gradients
    from qsync.distributed.length_sampler import LengthSampler as LengthSampler
    from qsync.distributed.share_sampler import ShareSampler as ShareSampler
    from qsync.elastic_training.start_job import elastic as elastic
    from qsync.errors import QSyncError as QSyncError
    from qsync.expansion.apply.lr_schedule import ExpandedSchedule as ExpandedSchedule
    from qsync.expansion.apply.optimizer_state import expand_optimizer as expand_optimizer
    from qsync.expansion.apply.verification import verify_expansion as verify_expansion
    from qsync.expansion.derivation.derive import derive_recipe as derive_recipe
    from qsync.expansion.derivation.growth_targets import derive_growth as derive_growth
    from qsync.expansion.io.load import load_expanded as load_expanded
    from qsync.expansion.io.save import save_expanded as save_expanded
    from qsync.expansion.plan.expand import expand as expand
    from qsync.expansion.plan.planner import plan_expansion as plan_expansion
    from qsync.expansion.recipe.recipe import Recipe as Recipe
    from qsync.expansion.recipe.shipped_recipes import recipe_of as recipe_of
    from qsync.expansion.transfer.costs_and_sensitivity import carry_profile as carry_profile
    from qsync.expansion.transfer.costs_and_sensitivity import carry_sensitivity as carry_sensitivity
    from qsync.expansion.transfer.memory_check import check_growth as check_growth
    from qsync.hybrid_training.hybrid_job import hybrid as hybrid
    from qsync.operators.precision import Precision as Precision
    from qsync.planning import plan as plan
    from qsync.planning import replay as replay
    from qsync.records.cluster import Cluster as Cluster
    from qsync.records.cluster import DeviceClass as DeviceClass
    from qsync.records.cluster import Host as Host
    from qsync.records.cluster import Link as Link
    from qsync.records.graph import OpGraph as OpGraph
    from qsync.records.plans import Plan as Plan
    from qsync.records.profiles import Profile as Profile
    from qsync.records.profiles import Sensitivity as Sensitivity
    from qsync.runtime.model_coverage import coverage as coverage

__version__ = "0.2.0"

_PUBLIC = {
    "capture": "qsync.api",
    "profile": "qsync.api",
    "sensitivity": "qsync.api",
    "plan": "qsync.planning",
    "replay": "qsync.planning",
    "wrap": "qsync.api",
    "unwrap": "qsync.api",
    "coverage": "qsync.runtime.model_coverage",
    "hybrid": "qsync.hybrid_training.hybrid_job",
    "elastic": "qsync.elastic_training.start_job",
    "divide_optimizer": "qsync.distributed.divided_optimizer",
    "weigh_gradients": "qsync.distributed.gradient_weighting",
    "micro_batches": "qsync.distributed.gradient_weighting",
    "samples_of": "qsync.distributed.gradient_weighting",
    "token_mean": "qsync.distributed.gradient_weighting",
    "LengthSampler": "qsync.distributed.length_sampler",
    "ShareSampler": "qsync.distributed.share_sampler",
    "save": "qsync.checkpoints.writer",
    "load": "qsync.checkpoints.reader",
    "Checkpoints": "qsync.checkpoints.periodic",
    "Recipe": "qsync.expansion.recipe.recipe",
    "recipe_of": "qsync.expansion.recipe.shipped_recipes",
    "derive_recipe": "qsync.expansion.derivation.derive",
    "derive_growth": "qsync.expansion.derivation.growth_targets",
    "plan_expansion": "qsync.expansion.plan.planner",
    "expand": "qsync.expansion.plan.expand",
    "verify_expansion": "qsync.expansion.apply.verification",
    "expand_optimizer": "qsync.expansion.apply.optimizer_state",
    "save_expanded": "qsync.expansion.io.save",
    "load_expanded": "qsync.expansion.io.load",
    "check_growth": "qsync.expansion.transfer.memory_check",
    "carry_sensitivity": "qsync.expansion.transfer.costs_and_sensitivity",
    "carry_profile": "qsync.expansion.transfer.costs_and_sensitivity",
    "ExpandedSchedule": "qsync.expansion.apply.lr_schedule",
    "Cluster": "qsync.records.cluster",
    "DeviceClass": "qsync.records.cluster",
    "Host": "qsync.records.cluster",
    "Link": "qsync.records.cluster",
    "OpGraph": "qsync.records.graph",
    "Plan": "qsync.records.plans",
    "Precision": "qsync.operators.precision",
    "Profile": "qsync.records.profiles",
    "Sensitivity": "qsync.records.profiles",
    "QSyncError": "qsync.errors",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'qsync' has no attribute {name!r}")
    module = _PUBLIC[name]
    if module in sys.modules:
        return getattr(import_module(module), name)
    import random

    drawn = random.getstate()  # importing rich draws random numbers, which would change a seeded script
    try:
        return getattr(import_module(module), name)
    finally:
        random.setstate(drawn)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def _import_qsync_first(kind: str, *data: Any) -> Any:
    """Rebuild a part of a saved model; if qsync is missing, torch.load's error names this function."""
    return import_module("qsync.runtime.saved_models").restored(kind, *data)


class _Torch:
    """An import finder that finds nothing; it registers `torch.ops.qsync` once torch is imported."""

    @classmethod
    def find_spec(cls, *_: Any) -> None:
        """Find no module; register the operators."""
        torch: Any = sys.modules.get("torch")
        serialization: Any = sys.modules.get("torch.serialization")
        if not hasattr(torch, "ops") or not hasattr(serialization, "add_safe_globals"):
            return
        serialization.add_safe_globals([_import_qsync_first])

        class Operators(torch._ops._OpNamespace):  # type: ignore[misc]
            __module__ = "torch.ops"  # the module name in exported programs

            def __getattr__(self, name: str) -> Any:
                import_module("qsync.backend.custom_operators")  # registers the operators
                return super().__getattr__(name)

        torch.ops.qsync = Operators("qsync")
        if cls in sys.meta_path:
            sys.meta_path.remove(cls)


sys.meta_path.insert(0, _Torch)
_Torch.find_spec()
