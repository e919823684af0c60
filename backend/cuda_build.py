"""Compile CUDA code: find nvcc and CUTLASS's headers, and build libraries.

There is one library per GPU architecture. Each family of CUTLASS products is a library of its own, so
that a model without convolutions does not wait for their compilation: 25 to 60 s a family with all tiles,
once per machine (`qsync.backend.kernel_cache`).
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from qsync.backend.kernel_cache import built
from qsync.errors import BuildError, shortened

if TYPE_CHECKING:
    import torch

SOURCES = Path(__file__).with_name("cutlass")
FAMILIES = ("int8_gemm", "fp16_gemm", "int8_conv", "fp16_conv")
# nvcc dropped Volta in CUDA 13. Turing's PTX of these sources is valid for Volta too, except for a cache
# hint; an assembler of CUDA 12 (PyPI: nvidia-cuda-nvcc-cu12, 40 MB) makes Volta's machine code of it.
_VOLTA, _VOLTA_SUBSTITUTE = "70", "75"
_COMPILE_TIMEOUT_S = 1800


class Toolchain(NamedTuple):
    """Compilers for one GPU architecture; `assembler` is CUDA 12's where nvcc itself lacks Volta."""

    nvcc: str
    version: str
    headers: Path | None
    assembler: str | None = None


def architecture(device: torch.device) -> str:
    """Return the architecture that kernels are built for: a GPU's own, such as "90", or an older one.

    $QSYNC_CUDA_ARCHITECTURE names an older one ("75"): its kernels run on this GPU, which compiles their
    PTX. So kernels of absent cards are tested on a card at hand. Raises BuildError for another value.
    """
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    own, asked = f"{major}{minor}", os.environ.get("QSYNC_CUDA_ARCHITECTURE") or f"{major}{minor}"
    if not asked.isdecimal() or not int(_VOLTA) <= int(asked) <= int(own):
        raise BuildError(
            f"QSYNC_CUDA_ARCHITECTURE must lie between {_VOLTA} and this GPU's {own}, found "
            f"{shortened(asked)}; unset it, or give for example 75 for a T4's kernels"
        )
    return asked


def library(architecture: str, families: Sequence[str] = FAMILIES, all_tiles: bool = True) -> Path:
    """Return the path of the shared library of some product families for one architecture ("75").

    Builds it if it is not in the cache. Raises BuildError, in one sentence, if this machine cannot build it.

    >>> library("80", ["int8_gemm"])
    PosixPath('/home/me/.cache/qsync/kernels/cutlass-sm80-int8_gemm-5f0e....so')
    """
    tools = toolchain(architecture)
    _check_families(architecture, families)
    flags = _flags(architecture, families, all_tiles)
    facts = {
        "source": _source_hash(),
        "compiler": tools.version,
        "assembler": "" if tools.assembler is None else _version(tools.assembler),
        "host compiler": _version("g++") if shutil.which("g++") else "",
        "headers": _file_hash(_headers() / "cutlass" / "version.h"),
        "machine": platform.machine(),
        "flags": " ".join(flags),
        "environment": environment_flags(),
    }
    name = f"cutlass-sm{architecture}-{'-'.join(families) if len(families) < len(FAMILIES) else 'all'}"

    def compile_once(path: Path) -> None:
        print(
            f"qsync: compiling CUTLASS products ({', '.join(families)}) for sm_{architecture}, about a "
            f"minute each, stored in {path.parent}",
            file=sys.stderr,
        )
        compile_to(path, architecture, families, all_tiles)

    return built(name, facts, compile_once)


def compile_to(
    path: Path,
    architecture: str,
    families: Sequence[str] = FAMILIES,
    all_tiles: bool = True,
    keep: Path | None = None,
) -> None:
    """Compile the library into `path`, bypassing the cache; keep intermediate files (PTX) in `keep`.

    Raises BuildError, in one sentence.
    """
    _check_families(architecture, families)
    flags = [
        *_flags(architecture, families, all_tiles),
        f"-I{toolchain(architecture).headers}",
        f"-I{SOURCES}",
    ]
    _compile(path, SOURCES / "products.cu", architecture, flags, keep)


def compile_file(path: Path, source: Path, architecture: str, flags: Sequence[str]) -> None:
    """Compile one CUDA C++ file into the library `path`, with additional `flags`.

    Needs nvcc, but not CUTLASS's headers. Raises BuildError, in one sentence.
    """
    _compile(path, source, architecture, [*_machine_flags(architecture), *flags])


def _compile(
    path: Path, source: Path, architecture: str, flags: Sequence[str], keep: Path | None = None
) -> None:
    tools = toolchain(architecture, with_headers=False)
    command = [tools.nvcc, *flags, str(source), "-o", str(path)]
    with tempfile.TemporaryDirectory(prefix="qsync-nvcc-") as folder:
        command += ["--keep", "--keep-dir", str(keep or folder)]
        if tools.assembler is None:
            _run(command)
        else:
            _compile_for_volta(command, tools.assembler, str(keep or folder))


@cache
def toolchain(architecture: str, with_headers: bool = True) -> Toolchain:
    """Return this machine's compilers for the architecture, with or without CUTLASS's headers.

    Raises BuildError that names what is missing.
    """
    compilers = _compilers()
    if not compilers:
        wanting = "CUTLASS products need" if with_headers else "compiling for GPUs needs"
        raise BuildError(
            f"{wanting} nvcc, which is not installed: install the CUDA toolkit, or put its nvcc on the PATH"
        )
    headers = _headers() if with_headers else None
    for nvcc in compilers:
        if f"compute_{architecture}" in _architectures(nvcc):
            return Toolchain(nvcc, _version(nvcc), headers)
    nvcc = compilers[0]
    if architecture == _VOLTA and f"compute_{_VOLTA_SUBSTITUTE}" in _architectures(nvcc):
        for assembler in _assemblers():
            return Toolchain(nvcc, _version(nvcc), headers, assembler)
        raise BuildError(
            f"{nvcc} no longer compiles for sm_70: pip install nvidia-cuda-nvcc-cu12 (an assembler that "
            "does), or put an nvcc of CUDA 12 on the PATH"
        )
    raise BuildError(
        f"{nvcc} does not compile for sm_{architecture}: put an nvcc on the PATH that lists "
        f"compute_{architecture} (nvcc --list-gpu-arch)"
    )


def _compilers() -> list[str]:
    """List every nvcc of this machine, the environment's own first."""
    folders = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    found = [str(Path(place) / "bin" / "nvcc") for place in folders if place]
    on_path = shutil.which("nvcc")
    if on_path:
        found.append(str(Path(on_path).resolve()))
    found += sorted(map(str, Path("/usr/local").glob("cuda*/bin/nvcc")), reverse=True)
    return [nvcc for nvcc in dict.fromkeys(found) if os.access(nvcc, os.X_OK)]


def _headers() -> Path:
    """Return CUTLASS's include folder, from $CUTLASS_PATH or the nvidia-cutlass package."""
    places = []
    if os.environ.get("CUTLASS_PATH"):
        places.append(Path(os.environ["CUTLASS_PATH"]) / "include")
    package = find_spec("cutlass_library")  # find_spec does not import it: importing loads scipy and more
    if package is not None and package.origin is not None:
        places.append(Path(package.origin).parent / "source" / "include")
    for place in places:
        if (place / "cutlass" / "version.h").is_file():
            return place
    raise BuildError(
        "CUTLASS's headers are not installed: pip install nvidia-cutlass, or set CUTLASS_PATH to a checkout "
        "of CUTLASS"
    )


def _assemblers() -> list[str]:
    """List every ptxas that assembles for Volta, from the PyPI package or CUDA 12 toolkits."""
    package = find_spec("nvidia")
    places = (
        [Path(folder) / "cuda_nvcc" / "bin" for folder in (package.submodule_search_locations or [])]
        if package
        else []
    )
    places += sorted(Path("/usr/local").glob("cuda-12*/bin"), reverse=True)
    found = [place / "ptxas" for place in places if (place / "ptxas").is_file()]
    return [
        str(ptxas)
        for ptxas in found
        if os.access(ptxas, os.X_OK) and re.search(r"release 12\.[4-9]", _version(str(ptxas)))
    ]


def environment_flags() -> str:
    """Return the flags that nvcc reads from environment variables."""
    found = {name: os.environ.get(name, "") for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")}
    return " ".join(f"{name}={value}" for name, value in found.items() if value)


def families_of(architecture: str) -> list[str]:
    """Return the product families for which an architecture has tensor cores."""
    return [name for name in FAMILIES if int(architecture) >= 75 or not name.startswith("int8")]


def _check_families(architecture: str, families: Sequence[str]) -> None:
    if not set(families) <= set(families_of(architecture)):
        raise BuildError("Volta (sm_70) has no INT8 tensor cores: use FP16 there")


def _flags(architecture: str, families: Sequence[str], all_tiles: bool) -> list[str]:
    flags = [*_machine_flags(architecture), f"-DQSYNC_SM={architecture}"]
    flags += [f"-DQSYNC_{family.upper()}" for family in families]
    return [*flags, "-DQSYNC_ALL_TILES"] if all_tiles else flags


def _machine_flags(architecture: str) -> list[str]:
    tools = toolchain(architecture, with_headers=False)
    compiled = _VOLTA_SUBSTITUTE if tools.assembler is not None else architecture
    flags = ["-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
    flags += ["--expt-relaxed-constexpr", "-DNDEBUG"]
    # PTX, too: newer GPUs compile it when they load it.
    return [*flags, f"-gencode=arch=compute_{compiled},code=[sm_{compiled},compute_{compiled}]"]


def _compile_for_volta(command: list[str], assembler: str, folder: str) -> None:
    """Compile for Turing, with the assembler step replaced by one for Volta.

    nvcc prints its steps (--dryrun) as lines of shell. PTX is forward compatible, not backward: the assembler
    rejects instructions that Volta lacks, so accepted code means the same on Volta as on Turing. It rejects
    one thing in these sources: a prefetch hint on loads, which changes no result.
    """
    listing = _run([*command, "--dryrun"]).stderr
    script = "set -e\n" + "\n".join(_volta_step(line, assembler) for line in listing.splitlines())
    _run(["/bin/sh", "-c", script], cwd=folder)


def _volta_step(line: str, assembler: str) -> str:
    step = line.removeprefix("#$ ")
    if assignment := re.fullmatch(r"(\w+)=(.*)", step):
        name, value = assignment.groups()
        # LIBRARIES and INCLUDES are already quoted, piece by piece
        quoted = value if '"' in value else f'"{value}"'
        return f"{name}={shlex.quote(value)}" if '"' in value else f"export {name}={quoted}"
    if step.startswith("ptxas "):
        ptx = re.search(r'"([^"]+\.ptx)"', step)
        if ptx is None:
            raise BuildError(
                "qsync cannot parse the output of this nvcc's --dryrun: put an nvcc of CUDA 12 on the PATH"
            )
        rewrite = "s/^\\.version .*/.version 8.4/; s/^\\.target .*/.target sm_70/; s/\\.L2::128B//"
        step = step.replace("ptxas ", shlex.quote(assembler) + " ", 1).replace(
            f"sm_{_VOLTA_SUBSTITUTE}", f"sm_{_VOLTA}"
        )
        return f"sed -i '{rewrite}' '{ptx.group(1)}'\n{step}"
    if step.startswith("rm "):
        return ""
    if step.startswith("fatbinary ") and " -link " not in step:
        return re.sub(rf"\bsm([=_]){_VOLTA_SUBSTITUTE}\b", rf"sm\g<1>{_VOLTA}", step)
    return step


def _run(command: list[str], cwd: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, cwd=cwd, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} cannot run here ({error}): reinstall the CUDA toolkit") from error
    if done.returncode:
        raise BuildError(f"{Path(command[0]).name} failed: {_first_error(done.stdout + done.stderr)}")
    return done


def _first_error(output: str) -> str:
    """Return the first error line of a compiler's output, skipping lines about templates."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for line in lines:
        if re.search(r"\berror\b|fatal|No space|not found|cannot|killed", line, re.IGNORECASE):
            return line[:300]
    return lines[-1][:300] if lines else "it gave no reason; run it by hand"


@cache
def _version(program: str) -> str:
    """Return the lines of `--version` that name a compiler's release and build."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return " ".join(
        line for line in done.stdout.splitlines() if "release" in line or "++" in line or "Build" in line
    )


@cache
def _architectures(nvcc: str) -> frozenset[str]:
    try:
        done = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    return frozenset(done.stdout.split())


@cache
def _source_hash() -> str:
    content = hashlib.sha256()
    for path in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cu")]):
        content.update(path.name.encode() + b"\0" + path.read_bytes())
    return content.hexdigest()


def _file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
