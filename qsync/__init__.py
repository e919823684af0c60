"""qsync: synchronous training of one model over unequal devices.

It lowers the precision of just enough operators on just the weak devices that nobody waits. `import qsync`
imports nothing else: each name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "capture": "qsync.api",
    "profile": "qsync.api",
    "sensitivity": "qsync.api",
    "plan": "qsync.planning",
    "replay": "qsync.planning",
    "wrap": "qsync.api",
    "hybrid": "qsync.hybrid_training",
    "weigh_gradients": "qsync.distributed.gradient_weighting",
    "micro_batches": "qsync.distributed.gradient_weighting",
    "validate": "qsync.distributed.validation",
    "Recipe": "qsync.expansion.recipe.recipe",
    "recipe_of": "qsync.expansion.recipe.shipped_recipes",
    "derive_recipe": "qsync.expansion.derivation.derive",
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
    "Link": "qsync.records.cluster",
    "OpGraph": "qsync.records.graph",
    "Plan": "qsync.records.plans",
    "Precision": "qsync.records.precision",
    "Profile": "qsync.records.profiles",
    "Sensitivity": "qsync.records.profiles",
    "QSyncError": "qsync.errors",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'qsync' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
