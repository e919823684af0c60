"""A variant and its key in a profile say the same."""

import itertools

import pytest

from qsync.records.variant import PLAIN, Variant, variant_of

FLAGS = list(itertools.product((False, True), repeat=3))


@pytest.mark.parametrize("form", [PLAIN, "gelu", "fused", "codes"])
@pytest.mark.parametrize("mode", ["fp32", "int8_all", "int64"])
def test_a_key_names_its_variant(mode, form):
    every = [Variant(mode, form, *flags) for flags in FLAGS]
    assert [variant_of(str(variant)) for variant in every] == every
    assert len({str(variant) for variant in every}) == len(every)


def test_keys_are_those_of_the_files_of_before():
    assert str(Variant("bf16")) == "bf16"
    assert str(Variant("int8", "gelu", True)) == "int8 gelu narrowing"
    assert str(Variant("fp32", "codes", channels_last=True)) == "fp32 codes channels_last"
    assert str(Variant("fp32", as_traced=True)) == "fp32 as traced"


def test_a_mode_has_the_width_of_its_type():
    assert [Variant(mode).width for mode in ("fp64", "fp32", "bf16", "int8")] == [8, 4, 2, 1]
