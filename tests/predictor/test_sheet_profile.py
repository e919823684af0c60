"""Profiles from data sheets alone: rooflines below, and hosts that launch."""

from __future__ import annotations

import pytest
from graphs import encoder

from qsync import planning
from qsync.predictor.cost_model.model import costs_of
from qsync.predictor.cost_model.op_calls import calls, least_s
from qsync.predictor.cost_model.sheet_profile import PartsOfPeaks, assumed_sensitivity, sheet_profile
from qsync.records.cluster import Cluster, DeviceClass, Link
from qsync.records.datasheets import DATASHEETS, datasheet
from qsync.replayer import Recapture
from qsync.replayer.levers.batch_size import reach

GRAPH = encoder(2, width=512, rows=4096)


def step_s(name, graph=GRAPH, base="fp32"):
    sheet = datasheet(name)
    card = DeviceClass(name, "cuda", 1, sheet.memory_bytes, sheet.precisions, datasheet=name)
    cluster = Cluster((card,), Link(1e-5, 1e10))
    profiles = {name: sheet_profile(graph, sheet, name)}
    return planning.plan(graph, profiles, assumed_sensitivity(graph), cluster, base=base).step_s


@pytest.mark.parametrize("name", DATASHEETS)
def test_no_cost_is_below_the_roofline(name):
    sheet, model = datasheet(name), PartsOfPeaks()
    for _, call in calls(GRAPH):
        mode = "fp16" if call.is_product and "fp16" in sheet.flops_per_s else "fp32"
        found = costs_of(model, [(call, mode)], sheet)[0].forward_s
        least = least_s(call, mode, "forward", sheet)
        assert least <= found <= 2 * least


def test_stronger_cards_are_faster_and_lower_precisions_too():
    assert step_s("H100") < step_s("A100") < step_s("T4") < step_s("P100") * 2
    assert step_s("A100", base="bf16") < 0.5 * step_s("A100")


def test_a_small_batch_waits_for_its_launches():
    small, tiny = encoder(2, width=512, rows=8), encoder(2, width=512, rows=4)
    assert step_s("H100", tiny) == pytest.approx(step_s("H100", small), rel=0.02)
    assert step_s("H100", small) == pytest.approx(step_s("A100", small), rel=0.2)


def test_what_moves_no_bytes_is_not_launched_and_the_optimizer_moves_seven_numbers():
    sheet = datasheet("A100")
    found = sheet_profile(GRAPH, sheet, "A100")
    views = [op.name for op in GRAPH.ops if op.kind in ("view", "output")]
    launched = {name: sum(c.total_s for c in modes.values()) for name, modes in found.launches.ops.items()}
    assert views and all(launched[name] == 0.0 for name in views)
    assert all(seconds > 0.0 for name, seconds in launched.items() if name not in views)
    trained = sum(value.num_elements for value in GRAPH.parameters if value.requires_grad)
    assert found.optimizer_s == pytest.approx(7 * 4 * trained / sheet.bytes_per_s / 0.8)


def test_a_data_sheet_s_costs_hold_at_any_number_of_samples():
    graphs = [encoder(1, width=64, rows=rows) for rows in (32, 16)]
    first, second = (sheet_profile(graph, datasheet("T4"), "T4") for graph in graphs)
    assert reach(first, graphs[0], Recapture(graphs[1], {"T4": second})) == (1, 32 * 64)


def test_8_bits_are_no_faster_than_16_on_an_h100():
    """As its kernels were measured."""
    _, call = max(calls(GRAPH), key=lambda pair: pair[1].flops)
    int8, bf16 = costs_of(PartsOfPeaks(), [(call, "int8_all"), (call, "bf16")], datasheet("H100"))
    assert int8.total_s == pytest.approx(bf16.total_s, rel=0.15)


def test_more_bits_and_fewer_operations_count_for_less():
    omega = assumed_sensitivity(GRAPH).omega
    op = GRAPH.adjustable[0].name
    assert omega[op]["int8"] > omega[op]["bf16"] > omega[op]["fp16"] > 0.0
