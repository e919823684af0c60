"""Run cases on the ranks of a job."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from qsync.distributed.ddp_profiling import PROFILE_S_VARIABLE
from qsync.experiments.harness.cases import WORKS
from qsync.experiments.harness.ranks import Place
from qsync.experiments.integrations.cases import CASES, judge

MODULES = ("loop_cases", "accelerate_cases", "trainer_cases", "lightning_cases", "sharding_cases")


def run(config: dict[str, Any], place: Place) -> list[dict[str, Any]]:
    """Judge the cases of some modules, or only `tested` and refused ones; all ranks together."""
    os.environ[PROFILE_S_VARIABLE] = "0"
    modules = [import_module(f"qsync.experiments.integrations.{name}").__name__ for name in config["modules"]]
    own = [case for case in CASES if case.do.__module__ in modules]
    if config.get("tested"):
        own = [case for case in own if case.tested or case.verdict != WORKS]
    return [judge(case, Path(config["folder"])) for case in own]
