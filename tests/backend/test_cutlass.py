"""The CUTLASS products: that they compile, refuse in sentences, and compute what the reference does.

No GPU is needed but for the tests marked `cuda`. What runs here instead: the sources are compiled for every
architecture; the epilogue is compiled for the CPU (cutlass_output.cpp); and everything above the C functions
runs against `Emulated`, which does with memory what gemm.h and conv.h say.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import shutil
import stat
import struct
import subprocess
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from kernel_calls import agreement_db, call, outcome, sample
from torch.nn import functional as F

from qsync.backend import cuda_build, reference_kernel
from qsync.backend.cutlass import compiled_products, convolution, linear, products
from qsync.backend.cutlass.tuning import LaunchSetting, Tuner, search
from qsync.backend.int8_products import LONGEST_INT32_SUM
from qsync.errors import BuildError, UnsupportedError
from qsync.operators.precision import Precision

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on the PATH")
needs_gpu = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
FP16_FAMILIES = ("fp16_gemm", "fp16_conv")
# The tensor-core instructions of each architecture, as PTX has them.
INSTRUCTIONS = {
    "70": ("mma.sync.aligned.m8n8k4",),
    "75": ("mma.sync.aligned.m16n8k8", "mma.sync.aligned.m8n8k16.row.col.satfinite.s32.s8.s8.s32"),
    "80": ("mma.sync.aligned.m16n8k16", "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32.satfinite"),
}
INSTRUCTIONS["89"] = INSTRUCTIONS["90"] = INSTRUCTIONS["80"]


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch, tmp_path):
    """Each test looks for compilers anew, and keeps what it builds to itself."""
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(tmp_path / "cache"))
    remembered = (
        cuda_build.toolchain,
        cuda_build._version,
        cuda_build._architectures,
        compiled_products._attempt,
    )
    for function in remembered:
        function.cache_clear()
    yield
    for function in remembered:
        function.cache_clear()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The library for sm_80 with one tile of each product, and the folder with its PTX."""
    folder = tmp_path_factory.mktemp("cutlass")
    cuda_build.compile_to(folder / "products.so", "80", all_tiles=False, keep=folder)
    return folder / "products.so"


# --- Compiling


@needs_nvcc
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "architecture", ["80", *(pytest.param(name, marks=pytest.mark.deep) for name in ("70", "75", "89", "90"))]
)
def test_the_sources_compile_for(architecture, compiled, tmp_path):
    families = FP16_FAMILIES if architecture == "70" else cuda_build.FAMILIES
    path = compiled if architecture == "80" else tmp_path / "products.so"
    if path != compiled:
        try:
            cuda_build.compile_to(path, architecture, families, all_tiles=False, keep=tmp_path)
        except BuildError as refusal:
            assert architecture == "70" and "nvidia-cuda-nvcc-cu12" in str(refusal)
            pytest.skip(str(refusal))
    ptx = next(path.parent.glob("*.ptx")).read_text()
    assert f".target sm_{architecture}" in ptx
    assert {(MACHINE_CODE, int(architecture)), (PTX, int(architecture))} <= embedded(path)
    assert all(instruction in ptx for instruction in INSTRUCTIONS[architecture])
    loaded = compiled_products.Library(path)
    assert loaded.architecture == architecture
    found = {name for name in compiled_products.PRODUCTS if loaded.tiles(name)}
    assert found == {name for name, (_, family) in compiled_products.PRODUCTS.items() if family in families}


PTX, MACHINE_CODE = 1, 2  # kinds of entries of a fat binary


def embedded(library: Path) -> set[tuple[int, int]]:
    """Return kind and architecture of what nvcc embedded in a library."""
    content, found, at = library.read_bytes(), set(), 0
    while (at := content.find(b"\x50\xed\x55\xba", at)) >= 0:
        _, header, size = struct.unpack_from("<HHQ", content, at + 4)
        entry, at = at + header, at + header + size
        while entry < at:
            kind, _, own, length = struct.unpack_from("<HHIQ", content, entry)
            found.add((kind, struct.unpack_from("<I", content, entry + 28)[0]))
            entry += own + length
    return found


@pytest.mark.parametrize(
    ("asked", "found"),
    [("", "90"), ("75", "75"), ("70", "70"), ("90", "90"), *((bad, None) for bad in ("100", "5", "sm_75"))],
)
def test_kernels_of_an_older_card_run_on_a_newer_one(asked, found, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setenv("QSYNC_CUDA_ARCHITECTURE", asked)
    if found is not None:
        assert cuda_build.architecture(torch.device("cuda")) == found
        return
    with pytest.raises(BuildError, match="must lie between 70 and this GPU's 90, found .*; unset it"):
        cuda_build.architecture(torch.device("cuda"))


def test_volta_has_no_int8():
    with pytest.raises(BuildError, match="no INT8 tensor cores: use FP16"):
        cuda_build.compile_to(Path("unused.so"), "70", ["int8_gemm"])


def test_the_headers_state_python_s_constants():
    text = (cuda_build.SOURCES / "launch.h").read_text()
    stated = dict(re.findall(r"constexpr int (\w+) = (\d+);", text))
    assert int(stated["kLongestInt32Sum"]) == LONGEST_INT32_SUM
    assert int(stated["kAlignmentBytes"]) == products._ALIGNMENT_BYTES


def test_an_nvcc_without_volta_names_what_compiles_for_it(tmp_path, monkeypatch):
    pretend_nvcc(tmp_path, monkeypatch, architectures=("75", "80"))
    monkeypatch.setattr(cuda_build, "_assemblers", list)
    with pytest.raises(
        BuildError, match="no longer compiles for sm_70: pip install nvidia-cuda-nvcc-cu12"
    ) as error:
        cuda_build.toolchain("70")
    assert_one_sentence(error)


def test_an_architecture_that_nvcc_does_not_know(tmp_path, monkeypatch):
    pretend_nvcc(tmp_path, monkeypatch, architectures=("75",))
    with pytest.raises(
        BuildError, match="does not compile for sm_130: put an nvcc on the PATH that lists"
    ) as error:
        cuda_build.toolchain("130")
    assert_one_sentence(error)


# --- A machine that cannot compile


def pretend_nvcc(tmp_path, monkeypatch, architectures=("80",), result="exit 0"):
    """An nvcc before all others: it lists architectures, counts compilations, then does `result`."""
    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    listing = "\n".join(f"echo compute_{a}" for a in architectures)
    nvcc.write_text(
        f"""#!/bin/sh
case "$1" in
  --list-gpu-arch) {listing}; exit 0;;
  --version) echo "release 99.9"; exit 0;;
esac
echo x >> {tmp_path}/compilations
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done
{result}
"""
    )
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    monkeypatch.setattr(cuda_build, "_compilers", lambda found=cuda_build._compilers: found()[:1])
    return tmp_path / "compilations"


def assert_one_sentence(error):
    text = str(error.value)
    assert "\n" not in text and not text.endswith("."), text


def test_no_nvcc(monkeypatch):
    monkeypatch.setattr(cuda_build, "_compilers", list)
    with pytest.raises(BuildError, match="need nvcc, which is not installed: install") as error:
        compiled_products.load("80", "int8_gemm")
    assert_one_sentence(error)
    assert compiled_products.unavailable("80", ("int8_gemm", "fp16_gemm")) == str(error.value)


def test_no_headers(tmp_path, monkeypatch):
    pretend_nvcc(tmp_path, monkeypatch)
    monkeypatch.setattr(cuda_build, "find_spec", lambda name: None)
    monkeypatch.delenv("CUTLASS_PATH", raising=False)
    with pytest.raises(BuildError, match="pip install nvidia-cutlass") as error:
        compiled_products.load("80", "int8_gemm")
    assert_one_sentence(error)


@pytest.mark.parametrize(
    "said", ["products.cu(1): error: no such thing", "fatal: No space left on device", "", "Killed"]
)
def test_a_failed_compilation_is_tried_once_and_says_why(said, tmp_path, monkeypatch):
    counter = pretend_nvcc(tmp_path, monkeypatch, result=f"echo warning: x; echo '{said}' >&2; exit 2")
    reasons = [compiled_products.unavailable("80", ("int8_gemm",)) for _ in range(3)]
    assert len(set(reasons)) == 1 and reasons[0].startswith("nvcc failed: ") and "\n" not in reasons[0]
    assert said in reasons[0]
    assert counter.read_text().count("x") == 1
    assert not [p for p in (tmp_path / "cache").rglob("*.so")]


def test_an_nvcc_that_cannot_run(tmp_path, monkeypatch):
    broken = tmp_path / "bin" / "nvcc"
    broken.parent.mkdir()
    broken.write_bytes(b"\x7fELF from another machine")
    broken.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(cuda_build, "_compilers", lambda: [str(broken)])
    assert "does not compile for sm_80" in compiled_products.unavailable("80", ("int8_gemm",))


@needs_nvcc
@pytest.mark.slow
def test_the_cache(compiled, tmp_path, monkeypatch):
    counter = pretend_nvcc(tmp_path, monkeypatch, result=f'cp {compiled} "$out"')
    path = cuda_build.library("80", ["int8_gemm"])
    assert path.parent.is_relative_to(tmp_path / "cache")
    assert cuda_build.library("80", ["int8_gemm"]) == path
    assert counter.read_text().count("x") == 1
    path.write_bytes(path.read_bytes()[:1000])  # cut short: never loaded, built anew
    assert compiled_products.load("80", "int8_gemm").tiles("int8_nt")
    assert counter.read_text().count("x") == 2
    monkeypatch.setattr(cuda_build, "_source_hash", lambda: "other sources")
    assert cuda_build.library("80", ["int8_gemm"]) != path


@needs_nvcc
@pytest.mark.slow
def test_a_cache_that_cannot_be_written(compiled, tmp_path, monkeypatch):
    pretend_nvcc(tmp_path, monkeypatch, result=f'cp {compiled} "$out"')
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(tmp_path / "file"))
    assert compiled_products.unavailable("80", ("int8_gemm",)) is None


def test_a_library_that_cannot_be_loaded(tmp_path, monkeypatch):
    pretend_nvcc(tmp_path, monkeypatch, result='echo "no library" > "$out"')
    assert "cannot be loaded" in compiled_products.unavailable("80", ("int8_gemm",))


# --- The C functions, without a GPU


def c_fields(header, struct):
    """The fields of a C structure, in order: (name, is a pointer)."""
    text = (cuda_build.SOURCES / header).read_text()
    body = re.search(rf"struct {struct} {{(.*?)}};", text, re.DOTALL).group(1)
    declarations = re.sub(r"//.*", "", body).split(";")
    fields = []
    for declaration in filter(str.strip, declarations):
        kind, names = re.match(r"\s*(int|void const|void|float const)\s(.*)", declaration, re.DOTALL).groups()
        fields += [(name.strip().lstrip("*"), kind != "int") for name in names.split(",")]
    return fields


@pytest.mark.parametrize(
    ("header", "struct", "here"),
    [("gemm.h", "QsyncGemm", compiled_products._Gemm), ("conv.h", "QsyncConv", compiled_products._Conv)],
)
def test_structures_are_those_of_the_headers(header, struct, here):
    assert c_fields(header, struct) == [(name, kind is ctypes.c_void_p) for name, kind in here._fields_]


def gemm_arguments(**changes):
    plain = dict.fromkeys(("alpha", "row_scale", "column_scale", "bias", "stream"))
    sizes = {"m": 32, "n": 48, "k": 64, "lda": 64, "ldb": 64, "slices": 1, "rows_per_scale": 1, "device": 0}
    return {**plain, **sizes, "a": 4096, "b": 8192, "out": 65536, "out_type": 0} | changes


def conv_arguments(**changes):
    sizes = dict(zip("nhwckrspq", (2, 8, 8, 32, 16, 3, 3, 8, 8), strict=True))
    place = dict.fromkeys(("pad_h", "pad_w", "stride_h", "stride_w", "dilation_h", "dilation_w"), 1)
    plain = dict.fromkeys(("alpha", "row_scale", "column_scale", "bias", "stream"))
    rest = {"slices": 1, "a": 4096, "b": 8192, "out": 65536, "out_type": 0, "rows_per_scale": 64, "device": 0}
    return {**sizes, **place, **plain, **rest} | changes


def refused(call, arguments, refusals):
    for product, changes, reason in refusals:
        with pytest.raises(UnsupportedError, match=re.escape(reason)) as error:
            call(product, 0, arguments(**changes))
        assert_one_sentence(error)


@needs_nvcc
@pytest.mark.slow
def test_what_products_and_convolutions_refuse(compiled):
    loaded = compiled_products.Library(compiled)
    refused(loaded.gemm, gemm_arguments, [
        ("int8_nt", {"k": 60}, "multiple of 16: pad them"),
        ("int8_nt", {"lda": 72}, "multiple of 16"),
        ("int8_nt", {"ldb": 48}, "overlap"),
        ("fp16_nn", {"n": 50, "ldb": 50}, "rows of 64 and 50 elements are no multiple of 8"),
        ("fp16_tn", {"m": 30, "lda": 30, "ldb": 48}, "rows of 30 and 48 elements are no multiple of 8"),
        ("int8_nt", {"m": 0}, "0 x 48 x 64 is empty"),
        ("int8_nt", {"a": 4100}, "multiple of 16 bytes"),
        ("int8_nt", {"b": 8200}, "multiple of 16 bytes"),
        ("int8_nt", {"out": 65540}, "multiple of 16 bytes"),
        ("int8_nt", {"slices": 3}, "3 slices of an inner dimension of 64 are too many"),
        ("int8_nt", {"slices": 0}, "too many"),
        ("fp16_nt", {"slices": 2, "bias": 4096}, "without bias"),
        ("fp16_nt", {"slices": 2, "out_type": 1}, "FP32"),
        ("int8_nt", {"k": 133168, "lda": 133168, "ldb": 133168}, "133168 products may overflow"),
    ])  # fmt: skip
    with pytest.raises(UnsupportedError, match="no such tile"):
        loaded.gemm("int8_nt", 7, gemm_arguments())
    with pytest.raises(UnsupportedError, match="product 5 was not compiled"):
        loaded.gemm("fp16_fprop", 0, gemm_arguments())
    refused(loaded.conv, conv_arguments, [
        ("int8_fprop", {"c": 24}, "24 and 16 channels are no multiple of 16"),
        ("fp16_dgrad", {"k": 12}, "32 and 12 channels are no multiple of 8"),
        ("fp16_dgrad", {"dilation_w": 2}, "no input gradient"),
        ("fp16_fprop", {"r": 40}, "a filter of 40 x 3"),
        ("fp16_fprop", {"n": 1 << 20}, "2^29 elements"),
        ("fp16_fprop", {"q": 0}, "is empty"),
        ("fp16_dgrad", {"slices": 2}, "slices are for weight gradients"),
        ("fp16_wgrad", {"out": 65544}, "multiple of 16 bytes"),
        ("int8_fprop", {"c": 16384}, "147456 products may overflow"),
    ])  # fmt: skip


@needs_nvcc
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and the addresses are made up")
def test_without_a_gpu_cuda_says_so(compiled):
    loaded = compiled_products.Library(compiled)
    for name in compiled_products.PRODUCTS:
        run, arguments = (
            (loaded.gemm, gemm_arguments())
            if name[-2] in "nt" and len(name) == 7
            else (loaded.conv, conv_arguments())
        )
        with pytest.raises(RuntimeError, match="CUDA says: "):
            run(name, 0, arguments)


@needs_nvcc
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on the PATH")
def test_the_epilogue_on_the_cpu(tmp_path):
    tools = cuda_build.toolchain("80")
    cuda = Path(os.path.realpath(shutil.which("nvcc"))).parent.parent
    roots = [cuda, *sorted(Path("/usr/local").glob("cuda*"))]
    include = next((root / "include" for root in roots if (root / "include" / "cuda_fp16.h").is_file()), None)
    if include is None:
        pytest.skip("CUDA's headers are not where nvcc is")
    program = tmp_path / "cutlass_output"
    flags = ["-std=c++17", "-O1", "-g", "-w", "-fpermissive", "-fsanitize=address,undefined"]
    folders = [f"-I{f}" for f in (tools.headers, cuda_build.SOURCES, include, include / "cccl")]
    source = Path(__file__).parents[1] / "support" / "cutlass_output.cpp"
    command = ["g++", *flags, "-fno-sanitize-recover=all", *folders, str(source), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_nvcc
@pytest.mark.parametrize("name", ["NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS"])
def test_flags_of_the_environment_make_another_library(name, monkeypatch):
    """The tests compile fast and slow code; no job may find it."""
    monkeypatch.setattr(cuda_build, "compile_to", lambda path, *_: path.write_bytes(b"x"))
    monkeypatch.delenv(name, raising=False)
    plain = cuda_build.library("80", ["int8_gemm"])
    monkeypatch.setenv(name, "-lineinfo")
    assert cuda_build.library("80", ["int8_gemm"]) != plain


# --- Tuning


def cost(setting):
    """A landscape with one minimum: the middle tile in two slices."""
    return abs(int(setting.tile.partition("x")[0]) - 128) + abs(math.log2(setting.slices) - 1) + 0.5


TILES = ("64x64x64/5", "128x128x64/4", "256x128x64/3")


def test_the_fastest_setting_wins_and_is_measured_once(tmp_path):
    asked = []

    def measure(setting):
        asked.append(setting)
        return cost(setting)

    tuner = Tuner(tmp_path / "folder" / "tiles.jsonl")
    for _ in range(2):
        assert tuner.best("int8_nt 8 8 8", TILES, (1, 2, 4), measure) == LaunchSetting("128x128x64/4", 2)
    assert len(asked) == len(set(asked)) == 9
    again = Tuner(tmp_path / "folder" / "tiles.jsonl")
    assert again.best("int8_nt 8 8 8", TILES, (1, 2, 4), pytest.fail) == LaunchSetting("128x128x64/4", 2)


def test_a_large_space_is_searched_in_few_trials():
    tiles = tuple(f"{m}x128x64/3" for m in range(8, 264, 8))
    asked = []
    setting, seconds = search(tiles, (1, 2, 4, 8), lambda s: asked.append(s) or cost(s))
    assert len(asked) <= 24
    assert seconds == cost(setting) == min(map(cost, asked))


def test_the_search_is_deterministic_and_leaves_random_state_alone():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    tiles = tuple(f"{m}x128x64/3" for m in range(8, 264, 8))
    assert search(tiles, (1, 2), cost) == search(tiles, (1, 2), cost)
    assert torch.equal(torch.rand(1), expected)


def test_ties_go_to_the_setting_named_first():
    assert search(TILES, (1, 2), lambda s: 1.0)[0] == LaunchSetting(TILES[0], 1)


def test_settings_that_cannot_run_are_passed_over(tmp_path):
    def measure(setting):
        if setting.tile != TILES[2]:
            raise UnsupportedError("this tile takes too much shared memory")
        return 1.0

    assert search(TILES, (1,), measure)[0].tile == TILES[2]
    with pytest.raises(UnsupportedError, match="too much"):
        search(TILES[:2], (1,), measure)


def test_a_file_cut_short_is_measured_again(tmp_path):
    path = tmp_path / "tiles.jsonl"
    tuner = Tuner(path)
    tuner.best("a", TILES, (1, 2), cost)
    tuner.best("b", TILES, (1, 2), cost)
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        cut = Tuner(path)
        for key in "ab":
            assert cut.best(key, TILES, (1, 2), cost) == LaunchSetting("128x128x64/4", 2)
        known = Tuner(path)
        assert all(known.best(key, TILES, (1, 2), pytest.fail) for key in "ab")


@pytest.mark.parametrize(
    "junk", ["[]", "{}", '{"key": 1}', "null", "\xff\x00", '{"key": "a", "tile": 3, "slices": "x"}']
)
def test_lines_that_are_none_are_skipped(junk, tmp_path):
    path = tmp_path / "tiles.jsonl"
    path.write_text(junk + '\n{"key": "a", "tile": "64x64x64/5", "slices": 2}\n', encoding="latin-1")
    assert Tuner(path).best("a", TILES, (1, 2), pytest.fail) == LaunchSetting("64x64x64/5", 2)


def test_a_setting_that_this_library_lacks_is_measured_again(tmp_path):
    path = tmp_path / "tiles.jsonl"
    path.write_text(
        '{"key": "a", "tile": "1x1x1/1", "slices": 2}\n{"key": "b", "tile": "64x64x64/5", "slices": 99}\n'
    )
    assert Tuner(path).best("a", TILES, (1, 2), cost) == LaunchSetting("128x128x64/4", 2)
    assert Tuner(path).best("b", TILES, (1, 2), cost) == LaunchSetting("128x128x64/4", 2)


def test_a_file_that_cannot_be_written_costs_nothing_but_time(tmp_path):
    (tmp_path / "file").write_text("")
    tuner = Tuner(tmp_path / "file" / "tiles.jsonl")
    assert tuner.best("a", TILES, (1, 2), cost) == LaunchSetting("128x128x64/4", 2)
    assert tuner.best("a", TILES, (1, 2), pytest.fail) == LaunchSetting("128x128x64/4", 2)


# --- Everything above the C functions, on the CPU


def memory(address, shape, strides, dtype):
    """The tensor that lies at an address."""
    last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    buffer = (ctypes.c_char * (last * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype).as_strided(shape, strides)


def packed(shape):
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


class Emulated:
    """What the compiled library does with memory, by the words of gemm.h and conv.h, in FP64."""

    def tiles(self, product):
        return ("128x128x64/4",)

    def store(self, sums, scaling, slices, out, out_type):
        """The epilogue: sums (slices, M, N)."""
        _, rows, columns = sums.shape
        assert out % 16 == 0 and (slices == 1 or (scaling["bias"] is None and out_type == 0))

        def vector(name, length):
            return (
                None
                if scaling[name] is None
                else memory(scaling[name], [length], [1], torch.float32).double()
            )

        num_scales = (rows - 1) // scaling["rows_per_scale"] + 1
        for name, length in (("alpha", 1), ("column_scale", columns)):
            sums = sums if scaling[name] is None else sums * vector(name, length)
        if scaling["row_scale"] is not None:
            of_row = torch.arange(rows) // scaling["rows_per_scale"]
            sums = sums * vector("row_scale", num_scales)[of_row].unsqueeze(1)
        if scaling["bias"] is not None:
            sums = sums + vector("bias", columns)
        dtype = [torch.float32, torch.bfloat16, torch.float16][out_type]
        memory(out, sums.shape, packed(sums.shape), dtype).copy_(sums)

    def gemm(self, product, tile, g):
        form, layout = product.split("_")
        dtype = torch.int8 if form == "int8" else torch.float16
        m, n, k = g["m"], g["n"], g["k"]
        a_shape, b_shape = (k, m) if layout == "tn" else (m, k), (n, k) if layout == "nt" else (k, n)
        for shape, stride, address in ((a_shape, g["lda"], g["a"]), (b_shape, g["ldb"], g["b"])):
            alignment = 16 // dtype.itemsize
            assert (
                shape[1] % alignment == 0
                and stride % alignment == 0
                and stride >= shape[1]
                and address % 16 == 0
            )
        a = memory(g["a"], a_shape, [g["lda"], 1], dtype).double()
        b = memory(g["b"], b_shape, [g["ldb"], 1], dtype).double()
        a, b = a.t() if layout == "tn" else a, b.t() if layout == "nt" else b
        bounds = [k * i // g["slices"] for i in range(g["slices"] + 1)]
        sums = torch.stack([a[:, i:j] @ b[i:j] for i, j in pairwise(bounds)])
        self.store(sums, g, g["slices"], g["out"], g["out_type"])

    def conv(self, product, tile, c):
        form, name = product.split("_")
        dtype = torch.int8 if form == "int8" else torch.float16
        x, w = tuple(c[i] for i in "nhwc"), tuple(c[i] for i in "krsc")
        y = tuple(c[i] for i in "npqk")
        assert c["c"] % (16 // dtype.itemsize) == 0 and (name == "fprop" or c["k"] % 8 == 0)
        shapes = {"fprop": (x, w, y), "dgrad": (y, w, x), "wgrad": (y, x, w)}[name]
        a, b = (
            memory(c[i], s, packed(s), dtype).double().permute(0, 3, 1, 2)
            for i, s in zip("ab", shapes, strict=False)
        )
        place = [(c[f"{i}_h"], c[f"{i}_w"]) for i in ("stride", "pad", "dilation")]
        if name == "fprop":
            out = F.conv2d(a, b, None, *place)
        elif name == "dgrad":
            out = torch.nn.grad.conv2d_input((x[0], x[3], x[1], x[2]), b, a, *place)
        else:
            out = torch.nn.grad.conv2d_weight(b, (w[0], w[3], w[1], w[2]), a, *place)
        out = out.permute(0, 2, 3, 1)
        assert tuple(out.shape) == shapes[2]
        rows = out.shape[0] if name == "wgrad" else math.prod(out.shape[:3])
        parts = out.reshape(rows, -1) / c["slices"]
        self.store(parts.expand(c["slices"], -1, -1), c, c["slices"], c["out"], c["out_type"])


@pytest.fixture(params=[1, 2], ids=["whole", "sliced"])
def emulated(request, monkeypatch):
    """CPU tensors go through the products as if the CPU were a GPU, whole or, where allowed, in slices."""

    def setting(call, inner):
        may = not call.product.endswith(("fprop", "dgrad"))
        return LaunchSetting("128x128x64/4", request.param if may else 1)

    monkeypatch.setattr(products, "load", lambda architecture, family: Emulated())
    monkeypatch.setattr(products, "architecture", lambda device: "80")
    monkeypatch.setattr(products, "_on", lambda device: nullcontext())
    monkeypatch.setattr(products, "_stream", lambda device: 0)
    monkeypatch.setattr(products, "_setting", setting)


LINEARS = {
    "linear": (F.linear, lambda m, k, n: [(m, k), (n, k), (n,)], {}),
    "addmm": (torch.addmm, lambda m, k, n: [(n,), (m, k), (k, n)], {}),
}
MAKE = {"linear": linear.linear, "addmm": linear.addmm, "conv2d": convolution.conv2d}
# Signal to noise of the result and of the gradients, in decibels: as in test_backend_cuda.
LEAST_DB = {"fp16": (50, 45), "int8": (100, 45), "int8_all": (100, 22)}


def assert_agrees(kind, precision, target, tensors, options):
    kernel, plain = MAKE[kind](precision), reference_kernel(kind, precision)
    got = outcome(kernel, kind, precision, target, tensors, **options)
    expected = outcome(plain, kind, precision, target, tensors, **options)
    # The result lies as lowering says, gradients as that of which they are.
    if kind == "conv2d":
        assert got[0].is_contiguous(memory_format=torch.channels_last)
        assert got[1].stride() == tensors[0].stride() or {0, 1} & {*tensors[0].shape}
    else:
        assert got[0].stride() == target(*tensors, **options).stride() or {0, 1} & {*got[0].shape}
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
        assert agreement_db(a, b) >= LEAST_DB[precision][min(i, 1)], (
            f"tensor {i}: {agreement_db(a, b):.0f} dB"
        )


def normal(*shapes):
    return [sample(*shape, seed=i) for i, shape in enumerate(shapes)]


SIZES = [(64, 32, 48), (1, 8, 8), (17, 24, 40), (33, 37, 11), (3, 5, 1), (1, 1, 1), (200, 7, 130), (0, 32, 8)]


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.INT8, Precision.INT8_ALL])
@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("sizes", SIZES)
def test_linear_layers_agree_with_the_reference(kind, precision, sizes, emulated):
    target, shapes, options = LINEARS[kind]
    assert_agrees(kind, precision, target, normal(*shapes(*sizes)), options)


# What torch says of its own "same" padding with an even filter.
same_padding_is_copied = pytest.mark.filterwarnings("ignore:Using padding='same'")
CONVOLUTIONS = [
    # x, W, options
    ((2, 32, 9, 7), (48, 32, 3, 3), {"padding": 1}),
    ((1, 3, 8, 8), (5, 3, 3, 3), {}),
    ((2, 20, 11, 8), (8, 20, 3, 2), {"stride": 2, "padding": (1, 0)}),
    ((3, 16, 8, 8), (24, 16, 1, 1), {"stride": (2, 2)}),
    ((2, 16, 7, 9), (16, 16, 2, 4), {"padding": "same"}),
    ((2, 8, 6, 6), (8, 8, 3, 3), {"padding": "valid", "stride": (1, 3)}),
    ((0, 3, 8, 8), (5, 3, 3, 3), {}),
]


@same_padding_is_copied
@pytest.mark.parametrize("precision", [Precision.FP16, Precision.INT8])
@pytest.mark.parametrize(("x", "weight", "options"), CONVOLUTIONS)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_convolutions_agree_with_the_reference(precision, x, weight, options, layout, emulated):
    tensors = normal(x, weight, (weight[0],))
    if layout == "channels_last":
        tensors[:2] = [t.to(memory_format=torch.channels_last) for t in tensors[:2]]
    assert_agrees("conv2d", precision, torch.conv2d, tensors, options)


LOWER = [Precision.FP16, Precision.INT8, Precision.INT8_ALL]


@pytest.mark.parametrize("precision", LOWER[:2])
def test_tiny_gradients_survive(precision, emulated):
    x, w = normal((16, 32), (8, 32))
    tiny = torch.full((16, 8), 1e-12)
    _, dx, _ = outcome(linear.linear(precision), "linear", precision, F.linear, [x, w], tiny)
    assert agreement_db(dx, tiny @ w) > 30


@pytest.mark.parametrize("precision", LOWER)
def test_higher_dimensions_no_bias_and_bf16(precision, emulated):
    x, w = normal((2, 3, 40), (24, 40))
    y = call(linear.linear(precision), "linear", precision, F.linear, [x, w], "bf16")
    assert y.dtype is torch.bfloat16 and y.shape == (2, 3, 24) and agreement_db(y, F.linear(x, w)) > 30


@pytest.mark.parametrize("wanted", [0, 1])
@pytest.mark.parametrize("precision", LOWER)
def test_only_the_gradients_that_are_wanted(precision, wanted, emulated):
    leaves = [t.requires_grad_(i == wanted) for i, t in enumerate(normal((16, 32), (8, 32)))]
    call(linear.linear(precision), "linear", precision, F.linear, leaves).sum().backward()
    assert leaves[wanted].grad is not None and leaves[1 - wanted].grad is None


def test_a_row_with_nan_or_inf_is_nan(emulated):
    x, w = normal((4, 32), (8, 32))
    x[1, 3], x[2, 5] = math.nan, math.inf
    y = call(linear.linear(Precision.INT8), "linear", Precision.INT8, F.linear, [x, w])
    assert y[1:3].isnan().all() and y[[0, 3]].isfinite().all()


def test_views_are_read_as_they_lie_or_copied(emulated):
    data = torch.randint(-127, 128, (64, 96), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    operands = [
        data[:, :48],
        data[3:40:2, 16:48],
        data.t()[:50],
        data[:1, 5:40],
        data[:, 1:33],
        data[:1].expand(4, 96),
    ]
    for a in operands:
        b = data[: a.shape[1] // 2, : a.shape[1]] if a.shape[1] <= 96 else data
        expected = a.double() @ b.double().t()
        assert torch.equal(products.gemm("int8_nt", a, b).double(), expected)


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.INT8])
@pytest.mark.parametrize(
    ("x", "weight", "options", "reason"),
    [
        ((2, 8, 6, 6), (8, 4, 3, 3), {"groups": 2}, "no grouped convolutions"),
        ((2, 8, 9, 9), (8, 8, 3, 3), {"dilation": 2}, "dilated convolutions"),
        ((8, 6, 6), (8, 8, 3, 3), {}, "batch dimension"),
        ((2, 8, 34, 34), (8, 8, 33, 33), {}, "filters longer than 32"),
    ],
)
def test_convolutions_that_cutlass_lacks_run_in_fp16(precision, x, weight, options, reason):
    convolution._warn_once.cache_clear()
    tensors = normal(x, weight, weight[:1])
    for said in (pytest.warns(UserWarning, match=f"{reason}; it runs in FP16"), nullcontext()):
        with said if precision is Precision.INT8 else nullcontext():
            got = outcome(MAKE["conv2d"](precision), "conv2d", precision, torch.conv2d, tensors, **options)
        plain = reference_kernel("conv2d", Precision.FP16)
        expected = outcome(plain, "conv2d", Precision.FP16, torch.conv2d, tensors, **options)
        assert all(agreement_db(a, b) > 45 for a, b in zip(got, expected, strict=True))


def test_addmm_in_fp16_with_factors_is_left_to_torch():
    tensors = normal((8,), (4, 16), (16, 8))
    got, expected = (
        outcome(kernel, "addmm", Precision.FP16, torch.addmm, tensors, alpha=2, beta=0.5)
        for kernel in (linear.addmm(Precision.FP16), reference_kernel("addmm", Precision.FP16))
    )
    assert all(agreement_db(a, b) > 45 for a, b in zip(got, expected, strict=True))


def test_addmm_with_factors_is_refused():
    tensors = normal((8,), (4, 8), (8, 8))
    with pytest.raises(UnsupportedError, match="alpha=2"):
        call(linear.addmm(Precision.INT8), "addmm", Precision.INT8, torch.addmm, tensors, alpha=2)


# --- On a GPU


def here_or_skip(family):
    reason = compiled_products.unavailable(products.architecture(torch.device("cuda", 0)), (family,))
    if reason:
        pytest.skip(reason)
    return compiled_products.load(products.architecture(torch.device("cuda", 0)), family)


class TestOnAGpu:
    pytestmark = needs_gpu

    @pytest.fixture(autouse=True)
    def kept_builds(self, monkeypatch):
        """Compiled once for all of these tests, where the user keeps them."""
        monkeypatch.delenv("QSYNC_CACHE_DIR")

    @pytest.mark.parametrize("product", ["int8_nt", "fp16_nt", "fp16_nn", "fp16_tn"])
    @pytest.mark.parametrize("sizes", [(128, 128, 128), (1, 16, 16), (300, 200, 1000), (77, 136, 4096)])
    def test_every_tile_and_slicing(self, product, sizes, monkeypatch):
        loaded = here_or_skip(compiled_products.PRODUCTS[product][1])
        m, n, k = sizes
        layout = product[-2:]
        a = torch.randint(-8, 9, (k, m) if layout == "tn" else (m, k), device="cuda")
        b = torch.randint(-8, 9, (n, k) if layout == "nt" else (k, n), device="cuda")
        dtype = torch.int8 if product.startswith("int8") else torch.float16
        rows, columns, bias = torch.rand(m).cuda(), torch.rand(n).cuda(), torch.rand(n).cuda()
        sums = (a.t() if layout == "tn" else a).double() @ (b.t() if layout == "nt" else b).double()
        expected = sums * rows.double().unsqueeze(1) * columns.double() + bias.double()
        for tile in loaded.tiles(product):
            for slices in (1, 2, 4):
                if slices > 1 and k // slices < 128:
                    continue
                monkeypatch.setattr(products, "_setting", lambda *_, t=tile, s=slices: LaunchSetting(t, s))
                for out in (torch.float32, torch.bfloat16, torch.float16):
                    scaling = products.Scaling(rows=rows, columns=columns, bias=bias)
                    got = products.gemm(product, a.to(dtype), b.to(dtype), scaling, out)
                    assert agreement_db(got, expected) > {4: 100, 2: 40}[out.itemsize], (tile, slices, out)

    @pytest.mark.parametrize("product", ["int8_nt", "fp16_nt", "fp16_nn", "fp16_tn"])
    def test_large_products_are_faster_than_fp32(self, product):
        here_or_skip(compiled_products.PRODUCTS[product][1])
        a, b = (torch.randn(4096, 4096, device="cuda") for _ in range(2))
        dtype = torch.int8 if product.startswith("int8") else torch.float16
        narrow = [t.mul(20).to(dtype) for t in (a, b)]
        fast = products._seconds(lambda: products.gemm(product, *narrow))
        plain = products._seconds(lambda: a @ b)
        assert fast < plain, f"{fast * 1e3:.2f} ms, FP32 {plain * 1e3:.2f} ms"
