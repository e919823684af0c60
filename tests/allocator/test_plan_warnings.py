"""What a plan warns of: a precision that nobody asked for; and every warning names what to do about it."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields, replace

import pytest
from graphs import cluster_of, mlp, profile_of, sensitivity_of

import qsync
from qsync.allocator import allocate, check_plan, find_warnings, uniform
from qsync.allocator.explanation import plan_warnings
from qsync.allocator.planner import Options
from qsync.distributed.ddp_profiling import PROFILE_S_VARIABLE
from qsync.operators.precision import Precision
from qsync.records.cluster import Link
from qsync.records.plans import Plan

GRAPH = mlp(2)
ABLE = (Precision.FP32, Precision.BF16, Precision.INT8, Precision.INT8_ALL)
CLUSTER = cluster_of({"train": 1, "infer": 1}, precisions=ABLE)


def profiles(**steps: float):
    """Profiles in which the weak class takes so long in each precision."""
    strong = replace(profile_of(GRAPH, "train"), step_s={"fp32": 1.0})
    return {"train": strong, "infer": replace(profile_of(GRAPH, "infer", slow=2.0), step_s=steps)}


def asked(plan, **steps: float) -> bool:
    return any("int8_all" in text for text in find_warnings(GRAPH, plan, profiles(**steps), CLUSTER))


def test_int8_in_all_products_is_named_where_16_bits_are_no_faster():
    plan = uniform(GRAPH, profiles(), CLUSTER, {})
    assert asked(plan, fp32=2.0, bf16=2.1, int8=2.0)
    (text,) = (
        t for t in find_warnings(GRAPH, plan, profiles(fp32=2.0, bf16=2.1), CLUSTER) if "int8_all" in t
    )
    assert text.startswith("infer is no faster in bf16 than in FP32") and 'precisions=["int8_all"]' in text


def test_a_faster_order_of_ranks_is_named():
    hosts = cluster_of({"train": 2, "infer": 2}).on_hosts(2, Link(1e-4, 1e7, num_ranks=2))
    plan = uniform(GRAPH, profiles(), hosts, {})
    assert not any("order of ranks" in text for text in find_warnings(GRAPH, plan, profiles(), hosts))
    turns = [replace(host, ranks=(i, i + 2)) for i, host in enumerate(hosts.hosts)]
    apart = replace(hosts, hosts=tuple(turns))
    assert any("of ranks, 0, 2, 1, 3, an" in text for text in find_warnings(GRAPH, plan, profiles(), apart))


@pytest.mark.parametrize(
    "steps",
    [
        {"fp32": 2.0, "bf16": 2.1, "int8": 1.9},  # INT8 pays
        {"fp32": 2.0, "bf16": 2.1, "int8": 2.1, "int8_all": 2.2},  # it was looked for
        {"fp32": 2.0},  # nothing was looked for
        {"fp32": 0.9, "bf16": 2.1},  # nobody waits for this class
    ],
)
def test_it_is_not_named_where_it_would_help_nobody(steps):
    assert not asked(uniform(GRAPH, profiles(), CLUSTER, {}), **steps)


def test_it_is_not_named_for_a_class_that_is_lowered_or_lacks_it():
    kept = profiles(fp32=2.0, bf16=2.1)
    lowered = allocate(GRAPH, kept, sensitivity_of(GRAPH), CLUSTER, lower_all=True)
    assert lowered["infer"].lowered and not asked(lowered, fp32=2.0, bf16=2.1)
    without = cluster_of({"train": 1, "infer": 1}, precisions=ABLE[:3])
    plan = uniform(GRAPH, kept, without, {})
    assert not any("int8_all" in text for text in find_warnings(GRAPH, plan, kept, without))


def test_an_operator_without_a_time_in_the_base_is_compared_in_fp32():
    graph = mlp(3, 64, 64)
    profiles = {n: profile_of(graph, n, slow=s) for n, s in (("train", 1.0), ("infer", 3.0))}
    lacking = {mode: c for mode, c in profiles["infer"].ops["fc1"].items() if not mode.startswith("bf16")}
    profiles["infer"] = replace(profiles["infer"], ops={**profiles["infer"].ops, "fc1": lacking})
    plan = allocate(graph, profiles, sensitivity_of(graph), cluster_of(), base="bf16")
    assert plan["infer"].lowered
    assert isinstance(find_warnings(graph, plan, profiles, cluster_of()), list)


def noisy_plan(error: float, drift: float = 0.0, **options):
    profiles = {
        n: replace(profile_of(GRAPH, n, slow=s), error=error, drift=drift)
        for n, s in (("train", 1.0), ("infer", 2.0))
    }
    return profiles, allocate(GRAPH, profiles, sensitivity_of(GRAPH), CLUSTER, **options)


def test_a_plan_whose_gain_is_hidden_by_noise_makes_way_for_the_base():
    """What lowering saves is compared with what the profile can tell; a plan that is asked for stays."""
    profiles, steady = noisy_plan(0.001)
    assert steady["infer"].lowered and not steady.kept_base
    assert noisy_plan(0.001, drift=5.0)[1]["infer"].lowered, "both steps drift alike"
    profiles, plan = noisy_plan(0.15)
    assert not any(entry.lowered for entry in plan.classes.values())
    assert plan.kept_base.startswith("the plan saves ") and "slack=0" in plan.kept_base
    assert plan.kept_base in find_warnings(GRAPH, plan, profiles, CLUSTER)
    assert Plan.from_json(plan.to_json()).kept_base == plan.kept_base
    assert check_plan(GRAPH, plan, profiles, sensitivity_of(GRAPH), CLUSTER).violations == ()
    for asked_for in ({"slack": 0.0}, {"lower_all": True}, {"pins": {"fc1": "int8"}}):
        assert noisy_plan(0.15, **asked_for)[1]["infer"].lowered


def warnings_written() -> list[str]:
    """Every sentence in the code that finds warnings, with what it puts in by its source."""
    tree, known = ast.parse(inspect.getsource(plan_warnings)), vars(plan_warnings)

    def text(part: ast.expr) -> str:
        if isinstance(part, ast.Constant):
            return str(part.value)
        name = ast.unparse(part.value)  # type: ignore[attr-defined]
        return known[name] if isinstance(known.get(name), str) else "x"

    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    written = [
        "".join(map(text, node.values)) if isinstance(node, ast.JoinedStr) else str(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in docs
    ]
    return [one for one in written if len(one) > 60 and "; " in one]


def test_every_warning_names_the_option_or_the_function_that_does_what_it_suggests():
    options = {*inspect.signature(qsync.hybrid).parameters, *(field.name for field in fields(Options))}
    options |= {PROFILE_S_VARIABLE, "levers"}
    assert len(warnings_written()) >= 7
    for sentence in warnings_written():
        advice = sentence.rpartition("; ")[2] if "precisions=" not in sentence else sentence
        named = re.findall(r"\b(\w+)=", advice) or ["none"]
        assert set(named) <= options or "qsync.profile" in advice, sentence
