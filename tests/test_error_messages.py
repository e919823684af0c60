"""Error messages: one line each, and none repeats a long value of the file that it is about."""

from __future__ import annotations

import copy
import pickle

import pytest
from graphs import cluster_of, encoder, profile_of
from hypothesis import given, settings
from hypothesis import strategies as st

from qsync.errors import FormatError, MismatchError, QSyncError, shortened
from qsync.operators.precision import Precision
from qsync.predictor.cost_model.model import CostModel
from qsync.records.cluster import Cluster
from qsync.records.graph import OpGraph
from qsync.records.plans import ClassPlan, Plan, Predicted
from qsync.records.profiles import Profile

GRAPH = encoder(1)
_LONGEST_MESSAGE = 600  # characters


def plan() -> Plan:
    assignment = {op.name: Precision.FP32 for op in GRAPH.adjustable}
    return Plan(GRAPH.model, GRAPH.hash, {"infer": ClassPlan(assignment, Predicted(0.1, 0.0, 1, 0.0), "abc")})


def read_plan(value):
    read = Plan.from_json(value)
    read.check_graph(GRAPH)
    read["train"].assignment["head"]


def read_graph(value):
    profile_of(GRAPH).check_graph(OpGraph.from_json(value))


def read_profile(value):
    profile = Profile.from_json(value)
    for op in profile.ops:
        profile.precisions_of(op)
    profile.check_graph(GRAPH)
    profile.check_class(cluster_of().classes[0])


def read_cluster(value):
    Cluster.from_json(value)["train"]


FILES = {
    "plan": (plan().to_json(), read_plan),
    "graph": (GRAPH.to_json(), read_graph),
    "profile": ({**profile_of(GRAPH).to_json(), "machine": {"hardware": "A"}}, read_profile),
    "cluster": (cluster_of().to_json(), read_cluster),
    "costs": (
        {"kind": "cost model", "version": 1, "error": None, "sheets": [], "samples": []},
        CostModel.from_json,
    ),
}
TEXTS = st.sampled_from(
    ["a" * 5000, "layer " * 900, "a.b/" * 1250, "it's " * 1000, "\n" * 5000, 'x"y' * 1700]
)
LONG = st.one_of(
    TEXTS,
    TEXTS.map(lambda text: {text: 1.0}),
    TEXTS.map(lambda text: {text: {text: text}}),
    TEXTS.map(lambda text: [[text, [text]]]),
    st.just(list(range(1700))),
    st.just([[0] * 50] * 50),
    st.just(10**4000),
)


def places(value, path=()):
    """Return where a JSON value may be changed: the path to each of its entries."""
    found = [path] if path else []
    entries = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, (list, tuple))
        else ()
    )
    for key, entry in entries:
        found += places(entry, (*path, key))
    return found


def changed(value, path, long, as_key):
    """Return a copy in which one entry is a long value, or has a long key."""
    value = copy.deepcopy(value)
    parent = value
    for key in path[:-1]:
        if isinstance(parent[key], tuple):
            parent[key] = list(parent[key])
        parent = parent[key]
    if as_key and isinstance(parent, dict) and isinstance(long, str):
        parent[long] = parent.pop(path[-1])
    else:
        parent[path[-1]] = long
    return value


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_an_error_about_a_malformed_file_is_short_and_one_line(name, data):
    value, read = FILES[name]
    path = data.draw(st.sampled_from(places(value)))
    try:
        read(changed(value, path, data.draw(LONG), data.draw(st.booleans())))
    except QSyncError as error:
        assert len(str(error)) <= _LONGEST_MESSAGE and "\n" not in str(error), str(error)


def test_values_are_shortened_to_their_beginning_and_length():
    assert shortened("int7") == "'int7'" and shortened("int7", quote=False) == "int7"
    assert shortened("a" * 5000, most=10) == "'aaaaaaaaa...' (5000 characters)"
    assert shortened(list(range(5000))).startswith("[0, 1, 2, ") and "... (" in shortened(list(range(5000)))
    assert shortened("two\nlines", quote=False) == "two lines" and "\n" not in shortened("two\nlines")
    assert shortened(KeyError("head")) == "'head'"
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert shortened(deep) == "a list" and shortened(10**5000) == "a int"


def test_every_error_bounds_what_it_repeats():
    long = "b" * 5000
    for message in (f"no operator {long!r}; plan again", f"no operator {long}; plan again"):
        error = MismatchError(message)
        assert str(error).startswith("no operator ") and str(error).endswith("; plan again")
        assert "(5000 characters)" in str(error) and len(str(error)) < 200
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
    prose = "the plan's classes' names are DDP's: " + "give another name, " * 40 + "it's not the model's"
    assert str(FormatError(prose)) == prose
    assert FormatError("few", 3).args == ("few", 3)
