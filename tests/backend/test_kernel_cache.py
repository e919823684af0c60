"""The cache of compiled kernels: one build per machine, nothing half-written, and nothing used that is wrong.

The compiler is the real one, in real processes.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from two_ranks import Program, environment

from qsync.backend import kernel_cache
from qsync.backend.casts import build_cpu
from qsync.backend.casts import compiled_casts as compiled
from qsync.distributed.plan_cache import cache_folder
from qsync.errors import BuildError, QSyncError

pytestmark = pytest.mark.slow

# Uses the casts, and says what became of the compiled ones. "right" holds whichever ran.
USE = """
import torch
from qsync.backend.casts import cast_ops as casts, compiled_casts as compiled
x = torch.randn(8, 40)
codes, scale = casts.quantize_rows(x)
right = ((codes * scale.unsqueeze(1) - x).abs() <= scale.unsqueeze(1) * 0.51).all().item()
print("right" if right else "wrong", compiled.library() is not None, compiled.note())
"""
# Of all programs the one that `USE` runs: to read and compile the others would take ten times as long.
FEW = """
import tvm
from qsync.backend.casts.tvm import rows
from qsync.backend.casts.tvm.schedules import Serial
name = "quantize_rows_float32"
program = rows._quantize_rows(Serial, "float32", "int8", 0).with_attr("global_symbol", name)
rows.module = lambda **_: tvm.IRModule({name: program})
"""
COMPILE_FEW = f"""
from qsync.backend.casts import build_cpu
run_apart = build_cpu.run_apart
build_cpu.run_apart = lambda code, path: run_apart({FEW!r} + code, path)
"""


@pytest.fixture
def use(tmp_path_factory):
    """Run `USE` in a process of its own, with a cache folder: (exit code, what it printed)."""

    def use(cache: Path, before: str = "", **variables: str) -> tuple[int | None, str]:
        folder = tmp_path_factory.mktemp("script")
        script = folder / "use.py"
        script.write_text(COMPILE_FEW + before + USE)
        return Program(script, environment(folder, QSYNC_CACHE_DIR=str(cache), **variables)).ended()

    return use


def said(done: tuple[int | None, str]) -> tuple[str, bool, str]:
    code, output = done
    assert code == 0, output
    verdict, loaded, note = output.splitlines()[-1].split(" ", 2)
    return verdict, loaded == "True", note


def facts() -> dict[str, str]:
    """All that determines this processor's casts."""
    return compiled._facts() | build_cpu.determined_by()


def test_ranks_that_start_at_once_build_once_and_a_library_cut_short_is_never_loaded(use, tmp_path):
    with ThreadPoolExecutor(3) as pool:
        ranks = list(pool.map(lambda _: use(tmp_path), range(3)))
    assert [said(rank) for rank in ranks] == [("right", True, "None")] * 3
    assert "".join(output for _, output in ranks).count("compiling casts") == 1
    names = [path.name for path in (tmp_path / "kernels").iterdir()]
    assert sorted(Path(name).suffix for name in names if not name.startswith(".")) == [".sha256", ".so"]
    assert not any(name.startswith(".building") for name in names)
    (library,) = (tmp_path / "kernels").glob("*.so")
    whole = library.read_bytes()
    library.write_bytes(whole[: len(whole) // 2])
    again = use(tmp_path)
    assert said(again) == ("right", True, "None")
    assert "compiling casts" in again[1]
    assert len(library.read_bytes()) == len(whole)


@pytest.mark.parametrize("damage", ["cut short", "another file", "no hash", "empty", "gone"])
def test_a_damaged_file_is_built_anew(tmp_path, monkeypatch, damage):
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(tmp_path))
    builds = []

    def build(path: Path) -> None:
        builds.append(path)
        path.write_bytes(b"a whole library")

    path = kernel_cache.built("casts", {"a": "b"}, build)
    assert kernel_cache.built("casts", {"a": "b"}, build) == path and len(builds) == 1
    if damage == "no hash":
        path.with_name(path.name + ".sha256").unlink()
    elif damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"cut short": b"a whole", "another file": b"a whole librarz", "empty": b""}[damage])
    assert kernel_cache.built("casts", {"a": "b"}, build) == path and len(builds) == 2
    assert path.read_bytes() == b"a whole library"


def test_another_processor_or_compiler_gets_a_file_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(tmp_path))
    paths = set()
    for changed in ({}, {"processor": "an older one"}, {"tvm": "0.1"}, {"source": "edited"}):
        paths.add(
            kernel_cache.built("casts", {**compiled._facts(), **changed}, lambda path: path.write_bytes(b"x"))
        )
    assert len(paths) == 4


def test_a_cache_folder_that_cannot_be_used_is_said_and_costs_time_only(use, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    verdict, loaded, note = said(use(tmp_path / "file", TMPDIR=str(tmp_path)))
    assert (verdict, loaded) == ("right", True)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]  # the process's own folder is gone
    assert "every process compiles its casts anew" in note and "set QSYNC_CACHE_DIR" in note


@pytest.fixture
def home(monkeypatch):
    """A user without a home folder; the call gives one."""
    for name in ("QSYNC_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 9)  # of no entry in the system's list
    monkeypatch.setattr(kernel_cache, "_why_unusable", None)
    return lambda path: monkeypatch.setenv("HOME", str(path))


def test_a_user_without_a_home_has_kernels_of_this_process_and_no_plans(home):
    path = kernel_cache.built("casts", {"a": "b"}, lambda path: path.write_bytes(b"whole"))
    assert path.read_bytes() == b"whole" and path.parent == kernel_cache.folder()
    assert "no home folder; set QSYNC_CACHE_DIR" in kernel_cache.why_unusable()
    with pytest.raises(QSyncError, match="pass cache_dir, or set XDG_CACHE_HOME"):
        cache_folder(None)
    assert cache_folder("mine") == Path("mine")


def test_the_user_s_folder_is_absolute_and_a_home_is_needed_only_for_it(home, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder(None) == kernel_cache.folder().parent == tmp_path / "qsync"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    home(tmp_path)
    assert cache_folder(None) == kernel_cache.folder().parent == tmp_path / ".cache" / "qsync"
    assert kernel_cache.why_unusable() is None


def test_without_a_linker_the_casts_are_compiled_in_memory(use, tmp_path):
    verdict, loaded, note = said(use(tmp_path, FEW, PATH="", CXX="", CC=""))
    assert (verdict, loaded) == ("right", True)
    assert "install a C++ compiler" in note
    assert not list((tmp_path / "kernels").glob("*.so"))


def test_a_full_disk_leaves_nothing_half_written(use, tmp_path, monkeypatch):
    """Every file may have 4 KiB here: neither the linker's output nor the library fits."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
    verdict, loaded, _ = said(use(tmp_path, FEW + limited, PYTHONDONTWRITEBYTECODE="1"))
    assert (verdict, loaded) == ("right", True)
    left = [path.name for path in (tmp_path / "kernels").iterdir() if not path.name.endswith(".lock")]
    assert left == []
    known = kernel_cache.built("casts", facts(), build_cpu.export_once)
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(tmp_path))  # there is space again
    kernel_cache.built("casts", facts(), lambda path: shutil.copy(known, path))
    assert said(use(tmp_path)) == ("right", True, "None")


def test_without_tvm_the_plain_casts_run_and_the_note_says_what_to_install(use, tmp_path):
    verdict, loaded, note = said(use(tmp_path, "import sys; sys.modules['tvm_ffi'] = None\n"))
    assert (verdict, loaded) == ("right", False)
    assert "pip install apache-tvm" in note and "casts run in plain torch" in note


def test_a_build_that_fails_is_said_and_tried_again(tmp_path, monkeypatch):
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(tmp_path))

    def fails(path: Path) -> None:
        path.write_bytes(b"half")
        raise BuildError("the compiler said no")

    with pytest.raises(BuildError, match="the compiler said no"):
        kernel_cache.built("casts", {"a": "b"}, fails)
    assert not list((tmp_path / "kernels").glob("*casts*.so"))
    path = kernel_cache.built("casts", {"a": "b"}, lambda path: path.write_bytes(b"whole"))
    assert path.read_bytes() == b"whole"


def test_what_a_killed_process_left_is_swept(tmp_path, monkeypatch):
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(tmp_path))
    path = kernel_cache.built("casts", {"a": "b"}, lambda path: path.write_bytes(b"whole"))
    path.unlink()
    left = path.parent / f".building-abc-{path.name}"
    left.write_bytes(b"half")
    kernel_cache.built("casts", {"a": "b"}, lambda path: path.write_bytes(b"whole"))
    assert not left.exists()
