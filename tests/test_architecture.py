"""The shape of the package: which folder may import which, and what an import costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from setuptools import find_packages

import qsync

ROOT = Path(__file__).parent.parent
BESIDE_QSYNC = ("backend", "predictor", "replayer", "allocator", "experiments")
FOLDERS = ("qsync", *BESIDE_QSYNC)

# Arrows point one way: a layer imports what stands before it, and itself.
LAYERS = (
    "errors", "processes", "operators", "records", "lowering", "backend", "predictor", "replayer",
    "allocator", "planning", "figures", "tracing", "runtime", "api", "expansion", "fingerprint",
    "distributed", "checkpoints", "hybrid_training", "elastic_training", "integrations", "what_if",
    "experiments", "commands", "__main__",
)  # fmt: skip
# Where torch may not be imported at all: planning works on a laptop.
TORCH_FREE = ("operators", "records", "lowering", "replayer", "allocator", "planning")
HEAVY = (
    "torch", "numpy", "scipy", "matplotlib", "sklearn", "transformers", "accelerate", "lightning", "plotly",
    "rich", "typer",
)  # fmt: skip


def modules() -> dict[str, Path]:
    """Every module of the package by the name it is imported by."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts if parts[0] == "qsync" else ("qsync", *parts)
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = modules()


def layer(module: str) -> str:
    """Return the layer of a module: its folder, or its name if it stands beside the folders."""
    return module.split(".")[1]


def folder(module: str) -> str:
    """Return the package that a module stands in; a package's face stands in its parent."""
    return module.rpartition(".")[0]


def imports(module: str) -> set[str]:
    """What a module imports, wherever in its code; `from qsync import backend` counts as qsync.backend."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in full}
    return found


def test_arrows_point_one_way():
    wrong = []
    for module in set(MODULES) - {"qsync"}:
        for imported in imports(module):
            if not imported.startswith("qsync."):
                continue
            if LAYERS.index(layer(imported)) > LAYERS.index(layer(module)):
                wrong.append(f"{module} ({layer(module)}) imports {imported} ({layer(imported)})")
    assert not wrong


def test_nothing_that_is_imported_is_missing():
    known = {name for name in MODULES}
    for module in MODULES:
        for imported in imports(module):
            assert not imported.startswith("qsync.") or imported in known, f"{module} imports {imported}"


def test_modules_do_not_import_each_other_in_circles():
    """Imports inside functions and for type checkers count as well."""
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in done:
            return
        for imported in sorted(imports(module) & set(MODULES) - {"qsync"}):
            walk(imported, (*path, module))
        done.add(module)

    for module in MODULES:
        walk(module, ())


def test_folders_beside_each_other_do_not_import_each_other_in_circles():
    arrows: dict[str, set[str]] = {}
    for module in set(MODULES) - {"qsync"}:
        for imported in imports(module) & set(MODULES) - {"qsync"}:
            here, there = folder(module), folder(imported)
            nested = here.startswith(there) or there.startswith(here)  # a face imports what is below it
            if not nested:
                arrows.setdefault(here, set()).add(there)

    def reached(start: str, found: set[str]) -> set[str]:
        for there in arrows.get(start, set()) - found:
            found.add(there)
            reached(there, found)
        return found

    assert not sorted(here for here in arrows if here in reached(here, set()))


@pytest.mark.parametrize("where", TORCH_FREE)
def test_planning_imports_no_torch(where):
    mine = [module for module in set(MODULES) - {"qsync"} if layer(module) == where]
    assert mine
    assert not [m for m in mine if any(name.split(".")[0] == "torch" for name in imports(m))]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_planning_runs_without_torch():
    modules = [m for m in set(MODULES) - {"qsync"} if layer(m) in TORCH_FREE]
    code = f"import sys, importlib\nfor m in {modules}: importlib.import_module(m)\n"
    code += "print('torch' in sys.modules)"
    assert run(code) == "False"


def test_importing_qsync_imports_nothing_else():
    code = "import sys; before = set(sys.modules); import qsync; print(sorted(set(sys.modules) - before))"
    found = ast.literal_eval(run(code))
    assert "qsync" in found
    assert not [name for name in found if name.split(".")[0] in HEAVY or name.startswith("qsync.")]


def test_every_public_name_is_there():
    for name in qsync.__all__:
        assert getattr(qsync, name) is not None
    assert set(qsync.__all__) <= set(dir(qsync))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        qsync.nothing  # noqa: B018


def test_no_module_bears_the_name_of_a_public_function():
    """Importing qsync/plan.py would replace qsync.plan()."""
    assert not {f"qsync.{name}" for name in qsync.__all__} & set(MODULES)


def test_files_are_named_by_their_subject():
    unnamed = {"utils", "util", "common", "helpers", "helper", "misc"}
    assert not [path for path in MODULES.values() if path.stem in unnamed]
    assert not [path for path in (ROOT / "tests").rglob("*.py") if path.stem in unnamed]


def test_every_folder_is_a_package_that_setuptools_finds():
    tree = ROOT / "src"
    assert f'find_packages("{tree.name}")' in (ROOT / "setup.py").read_text(encoding="utf-8")
    assert [path.name for path in tree.iterdir() if path.suffix != ".egg-info"] == ["qsync"]
    installed = [tree / name.replace(".", "/") for name in find_packages(str(tree))]
    assert {path.resolve() for path in installed} == {path.parent for path in MODULES.values()}
    tops = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert tops - {"tests"} == set(FOLDERS)


def test_only_the_command_line_imports_experiments():
    found = [m for m in MODULES if any(i.startswith("qsync.experiments") for i in imports(m))]
    assert {layer(m) for m in found} <= {"experiments", "commands"}


def test_only_the_demo_s_command_imports_experiments():
    """Pictures and tables are the product's own."""
    commands = [m for m in MODULES if m.startswith("qsync.commands")]
    found = {m for m in commands if any(i.startswith("qsync.experiments") for i in imports(m))}
    assert found == {"qsync.commands.demo"}


def test_type_checkers_know_every_public_name():
    tree = ast.parse((ROOT / "qsync" / "__init__.py").read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {name.asname: node.module for node in block.body for name in node.names}
    assert typed == qsync._PUBLIC
