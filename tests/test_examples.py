"""Every file in examples/ runs as its first lines say, within seconds, from the root of the repository."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from qsync.backend import kernel_cache

ROOT = Path(__file__).parent.parent
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

WITH_LIGHTHOUSE = (sys.executable, "tests/support/with_lighthouse.py")


@dataclass(frozen=True)
class Launch:
    """How one example starts: its launcher, arguments, environment, and text that its output contains."""

    launcher: tuple[str, ...] = (sys.executable,)
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    prints: tuple[str, ...] = ()


# Examples that need more than `python examples/NAME`, or whose output is checked.
LAUNCHES = {
    "train.py": Launch(TORCHRUN, prints=("held-out loss",)),
    "bf16_base.py": Launch(TORCHRUN, prints=("held-out accuracy in BF16",)),
    "ema_and_compile.py": Launch(prints=("its moving average", "in torch.compile", "unwrapped: 0 from FP32")),
    "hf_trainer.py": Launch(TORCHRUN, prints=("operators lowered", "from the checkpoint in a plain model")),
    "accelerate_loop.py": Launch(TORCHRUN, prints=("held-out accuracy after", "from the saved state:")),
    "lightning_fit.py": Launch(TORCHRUN, prints=("operators lowered", "the checkpoint in a plain module:")),
    "fsdp2.py": Launch(TORCHRUN, prints=("held-out loss", "in a plain model")),
    "elastic.py": Launch(WITH_LIGHTHOUSE, prints=("step 120: loss", "cards")),
    "lora.py": Launch(TORCHRUN, prints=("trained 8,192 of", "merged")),
    "plan_offline.py": Launch(prints=("operators lowered", "(simulated)")),
    "resnet.py": Launch(prints=("INT8:", "mixed:")),
    "grow.py": Launch(prints=("the same function", "grown model, 150 more steps")),
    "custom_recipe.py": Launch(prints=("written by hand: the same function", "derived: the same function")),
}
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# The others are deep: tests of the framework, lever or recipe that they show fail on the same defects.
QUICK = ("train.py", "elastic.py", "plan_offline.py")


def test_every_entry_of_the_table_is_an_example():
    assert {*LAUNCHES, *QUICK} <= {path.name for path in EXAMPLES}


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.deep] * (path.name not in QUICK)) for path in EXAMPLES],
    ids=lambda path: path.name,
)
def test_an_example_runs(path, tmp_path):
    launch = LAUNCHES.get(path.name, Launch())
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(tmp_path), "QSYNC_CACHE_DIR": str(kernel_cache.folder().parent),
        "QSYNC_PROFILE_S": "0.3",
        **launch.environment,
    }  # fmt: skip
    command = [*launch.launcher, str(path.relative_to(ROOT)), *launch.arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "an example prints what it shows"
    assert all(text in done.stdout for text in launch.prints), done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_says_how_to_run_it(path):
    text = path.read_text()
    assert f"examples/{path.name}" in text.split('"""')[1]
    assert len(text.splitlines()) <= 60
