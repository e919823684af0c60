"""qsync as users install it: an editable clone, a wheel; started in every way, from every folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import qsync

ROOT = Path(__file__).parent.parent
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "docs", "*-out")
# What a start has to reach: every folder of the package, and a process that qsync starts. No torch: it takes seconds.
STARTED = """
import importlib.util, pathlib, subprocess, sys
import qsync, qsync.child_processes
assert callable(qsync.plan)
for name in ("backend", "predictor", "replayer", "allocator", "experiments"):
    assert importlib.util.find_spec("qsync." + name).origin
command = [sys.executable, "-m", "qsync", "--version"]
subprocess.run(command, env=qsync.child_processes.environment(), check=True, stdout=subprocess.DEVNULL)
print("started from", pathlib.Path(qsync.__file__).resolve().parent)
"""
IN_KERNEL = f"""
import sys, nbformat.v4 as notebooks
from nbclient import NotebookClient
cell = notebooks.new_code_cell({STARTED!r})
notebook = notebooks.new_notebook(cells=[cell])
NotebookClient(notebook, resources={{"metadata": {{"path": sys.argv[1]}}}}).execute()
print("".join(output["text"] for output in notebook.cells[0].outputs if output.get("name") == "stdout"))
"""


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=clean | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment(folder: Path) -> Path:
    """Make an environment with the packages of this one but for qsync; return its Python.

    Python reads .pth files, which editable installs are, in its own site-packages only.
    """
    venv.create(folder, symlinks=True)
    own = sysconfig.get_path("purelib", vars={"base": str(folder)})
    packages = [place for place in sys.path if place.endswith("-packages")]
    (Path(own) / "packages.pth").write_text("\n".join(packages))
    return folder / "bin" / "python"


def install(python: Path, *what: str | Path) -> None:
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--ignore-installed", "--no-index")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, *what, cwd=ROOT)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder that holds a clone named `qsync`."""
    folder = tmp_path_factory.mktemp("home")
    shutil.copytree(ROOT, folder / "qsync", symlinks=True, ignore=NOT_COPIED)
    return folder


@pytest.fixture(scope="module")
def editable(home, tmp_path_factory) -> Path:
    """The Python of an environment in which the clone is installed with `pip install -e .`."""
    python = environment(tmp_path_factory.mktemp("editable"))
    install(python, "-e", home / "qsync")
    return python


def starts(python: Path, folder: Path) -> dict[str, list[str | Path]]:
    """Every way to start Python code of one's own, or the command, in a folder."""
    script = folder / "started_here.py"
    script.write_text(STARTED)
    torchrun = (python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    return {
        "script": [python, script],
        "-c": [python, "-c", STARTED],
        "-m": [python, "-m", "started_here"],
        "torchrun": [*torchrun, script],
        "notebook": [python, "-P", "-c", IN_KERNEL, folder],
        "python -m qsync": [python, "-m", "qsync", "--version"],
        "qsync": [python.with_name("qsync"), "--version"],
    }


@pytest.mark.slow
@pytest.mark.parametrize("where", ["beside the clone", "in the clone", "elsewhere"])
def test_an_editable_clone_starts_in_every_way(editable, home, where, tmp_path):
    folder = {"beside the clone": home, "in the clone": home / "qsync", "elsewhere": tmp_path}[where]
    for way, command in starts(editable, folder).items():
        said = run(*command, cwd=folder)
        is_command = "qsync" in way
        assert (f"qsync {qsync.__version__}" if is_command else f"started from {home}/qsync/qsync") in said, (
            way
        )
