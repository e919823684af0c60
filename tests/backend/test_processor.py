"""What the processor is called, and that casts use only what the system grants of it."""

from __future__ import annotations

import re

import pytest

from qsync.backend.casts import build_cpu
from qsync.backend.devices import processor

CPUINFO = "processor : 0\nmodel name : EPYC\ncpu family : 25\nmodel : 17\nflags : {}\n\nprocessor : 1\n"
ZEN4 = (
    "sse4_2 fma f16c movbe popcnt bmi2 avx avx2 vaes vpclmulqdq gfni avx512f avx512dq avx512ifma avx512cd "
    "avx512bw avx512vl avx512_bf16 avx512vbmi avx512_vbmi2 avx512_vnni avx512_bitalg avx512_vpopcntdq"
)
GUEST = " ".join(flag for flag in ZEN4.split() if not flag.startswith(("avx512", "gfni")))


def name_with(monkeypatch: pytest.MonkeyPatch, tmp_path, flags: str) -> str:
    """The name of a processor of these flags."""
    path = tmp_path / "cpuinfo"
    path.write_text(CPUINFO.format(flags))
    monkeypatch.setattr(processor, "_CPUINFO", path)
    processor._described.cache_clear()
    try:
        return processor.processor()
    finally:
        processor._described.cache_clear()


@pytest.mark.parametrize(
    "flags, widest",
    [
        (ZEN4, "AVX-512 BF16"),
        (ZEN4 + " amx_tile amx_bf16 amx_int8", "AMX"),
        ("avx2 avx512f avx512_vnni", "AVX-512 VNNI"),
        ("avx2 avx512f", "AVX-512"),
        ("avx2 avx_vnni", "AVX2 VNNI"),
        (GUEST, "AVX2"),
    ],
)
def test_guests_with_other_instruction_sets_are_other_processors(monkeypatch, tmp_path, flags, widest):
    assert name_with(monkeypatch, tmp_path, flags) == f"EPYC 25.17 {widest}"


def test_a_processor_without_any_of_them_has_its_plain_name(monkeypatch, tmp_path):
    assert name_with(monkeypatch, tmp_path, "sse2") == "EPYC 25.17"


@pytest.mark.deep  # half a minute of LLVM; the next one is quick, and fails on what is not told
@pytest.mark.skipif(not processor.granted_flags() & {"avx2"}, reason="needs an x86 processor's flags")
def test_casts_use_no_instruction_set_that_is_withheld():
    """LLVM knows a Zen 4 by its model, and takes AVX-512 for granted, which a hypervisor may withhold."""
    wide, narrow = (
        build_cpu.compiled_for("znver4", frozenset(flags.split())).mod.inspect_source("asm")
        for flags in (ZEN4, GUEST)
    )
    assert re.search(r"%zmm\d", wide)
    assert not re.search(r"%[zk](mm)?\d|%[xy]mm(1[6-9]|2\d|3[01])", narrow)
    assert re.search(r"vfmadd\w+ps\s.*%ymm", narrow)  # what is granted stays in use


def test_what_is_withheld_is_told_from_what_is_tuned():
    known = ["avx2", "avx512f", "avx512vnni", "sse4.1", "fast-lzcnt", "prefer-256-bit", "amx-tile", "fma"]
    assert build_cpu.withheld(known, {"avx2", "fma", "avx512f", "sse4_1"}) == ["avx512vnni", "amx-tile"]
    assert build_cpu.withheld(known, {"avx2", "fma", "avx512f", "avx512_vnni", "amx_tile"}) == []
