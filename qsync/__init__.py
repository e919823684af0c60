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
    "hybrid": "qsync.hybrids",
    "weigh_gradients": "qsync.weighing",
    "micro_batches": "qsync.weighing",
    "validate": "qsync.validation",
    "Recipe": "qsync.expansion.recipes",
    "recipe_of": "qsync.expansion.families",
    "derive_recipe": "qsync.expansion.derivation.deriving",
    "plan_expansion": "qsync.expansion.layout",
    "expand": "qsync.expansion.expanding",
    "verify_expansion": "qsync.expansion.verification",
    "expand_optimizer": "qsync.expansion.optimizers",
    "save_expanded": "qsync.expansion.saving",
    "load_expanded": "qsync.expansion.reading",
    "check_growth": "qsync.expansion.budgets",
    "carry_sensitivity": "qsync.expansion.carrying",
    "carry_profile": "qsync.expansion.carrying",
    "ExpandedSchedule": "qsync.expansion.schedule",
    "Cluster": "qsync.cluster",
    "DeviceClass": "qsync.cluster",
    "Link": "qsync.cluster",
    "OpGraph": "qsync.graph",
    "Plan": "qsync.plans",
    "Precision": "qsync.precision",
    "Profile": "qsync.profiles",
    "Sensitivity": "qsync.profiles",
    "QSyncError": "qsync.errors",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'qsync' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
