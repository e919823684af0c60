"""qsync as users install it: an editable clone, a wheel; started in every way, from every folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import qsync
from qsync.errors import DISTRIBUTION

ROOT = Path(__file__).parent.parent
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "docs", "*-out")
# What a start has to reach: every folder of the package, and a process that qsync starts; no torch.
STARTED = """
import importlib.util, pathlib, subprocess, sys
import qsync
from qsync.processes.child_processes import environment
assert callable(qsync.plan)
for name in ("backend", "predictor", "replayer", "allocator", "experiments"):
    assert importlib.util.find_spec("qsync." + name).origin
command = [sys.executable, "-m", "qsync", "--version"]
subprocess.run(command, env=environment(), check=True, stdout=subprocess.DEVNULL)
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
@pytest.mark.parametrize(
    "where",
    ["beside the clone", *(pytest.param(w, marks=pytest.mark.deep) for w in ("in the clone", "elsewhere"))],
)
def test_an_editable_clone_starts_in_every_way(editable, home, where, tmp_path):
    folder = {"beside the clone": home, "in the clone": home / "qsync", "elsewhere": tmp_path}[where]
    for way, command in starts(editable, folder).items():
        said = run(*command, cwd=folder)
        is_command = "qsync" in way
        assert (f"qsync {qsync.__version__}" if is_command else f"started from {home}/qsync/qsync") in said, (
            way
        )


@pytest.fixture(scope="module")
def distributions(home, tmp_path_factory) -> tuple[Path, Path]:
    """The wheel and the source distribution, as `make dist` builds them: the wheel from the other."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, home / "qsync", cwd=out)
    (wheel,), (source,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, source


def package_files() -> set[str]:
    """Every file of the package, by its place in it."""
    walked = os.walk(ROOT / "src" / "qsync", followlinks=True)
    paths = {Path(folder, name) for folder, _, names in walked for name in names}
    return {str(path.relative_to(ROOT / "src")) for path in paths if "__pycache__" not in path.parts}


def test_the_distributions_hold_the_whole_package(distributions):
    wheel, source = distributions
    expected, about = package_files(), f"{wheel.name.partition('-py3')[0]}.dist-info"
    assert {
        "qsync/backend/cutlass/products.cu",
        "qsync/backend/casts/tvm/rows.py",
        "qsync/py.typed",
    } < expected
    with zipfile.ZipFile(wheel) as content:
        assert {name for name in content.namelist() if not name.startswith(about)} == expected
        assert f"Name: {DISTRIBUTION}\n" in content.read(f"{about}/METADATA").decode()
        assert f"{about}/licenses/LICENSE" in content.namelist()
    with tarfile.open(source) as content:
        files = {name.partition("/")[2] for name in content.getnames()}
        assert all(member.isfile() or member.isdir() for member in content)
    assert {f"src/{name}" for name in expected} | {"README.md", "LICENSE", "pyproject.toml"} <= files
    assert not [name for name in files if name.startswith(("tests", "docs"))]


def test_an_installed_wheel_starts_beside_a_clone_and_elsewhere(distributions, home, tmp_path):
    python = environment(tmp_path / "python")
    install(python, distributions[0])
    for folder in (home, tmp_path):
        said = run(python, "-c", STARTED, cwd=folder)
        assert f"started from {tmp_path}/python" in said


def test_the_distribution_has_one_name():
    """The project's, what pip says is installed, and what messages tell to install."""
    read = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert read["project"]["name"] == DISTRIBUTION
    told = [ROOT / "src" / name for name in package_files() if name.endswith(".py")]
    told += [ROOT / "README.md", *ROOT.glob("docs/guide/*.md")]
    assert not [path for path in told if "install 'qsync" in path.read_text().replace(DISTRIBUTION, "")]


@pytest.mark.deep
@pytest.mark.timeout(3000)
def test_a_wheel_in_a_fresh_environment_compiles_its_kernels_and_runs_the_demo(distributions, tmp_path):
    """With nothing but what the wheel depends on, from an empty folder."""
    venv.create(tmp_path / "python", with_pip=True)
    bin_, empty = tmp_path / "python" / "bin", tmp_path / "empty"
    empty.mkdir()
    torch = next(
        line.split()[-1] for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("TORCH")
    )
    for what in (torch, distributions[0]):
        run(bin_ / "python", "-m", "pip", "install", "--quiet", what, cwd=empty)
    caches = {"QSYNC_CACHE_DIR": str(tmp_path / "cache"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    (device, *_) = json.loads(run(bin_ / "qsync", "doctor", "--json", cwd=empty, **caches))["devices"]
    assert device["build"][0].startswith("casts: compiled for"), device["build"]
    run(bin_ / "qsync", "demo", "--workload", "resnet-small", "--steps", "4", cwd=empty, **caches)
    assert {"figures.json", "plan.json", "report.html"} <= {
        path.name for path in (empty / "demo-out").iterdir()
    }
