"""Options of jobs: each keyword of a public function is a field of its record, with the same default."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields

import pytest
import torch

import qsync
from qsync.distributed.job_options import LEAST_WITH_BATCH_NORM, HybridOptions
from qsync.elastic_training.options import ElasticOptions
from qsync.errors import FormatError


@pytest.mark.parametrize(
    ("function", "record"), [(qsync.hybrid, HybridOptions), (qsync.elastic, ElasticOptions)]
)
def test_a_keyword_is_a_field_of_the_record(function, record):
    given = inspect.signature(function).parameters.values()
    asked = {p.name: p.default for p in given if p.kind is p.KEYWORD_ONLY or p.name == "loss_fn"}
    stated = {f.name: f.default for f in fields(record) if f.name != "plan_options"}
    assert {
        name: MISSING if default is inspect.Parameter.empty else default for name, default in asked.items()
    } == stated


def test_what_follows_from_ddp_and_the_loader():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    asked = HybridOptions(ddp_options={"bucket_cap_mb": 5}, base="bf16").settled(model)
    assert asked.bucket_cap_bytes == 5 * 2**20 and asked.ddp_options["gradient_as_bucket_view"]
    assert asked.for_plan == {"base": "bf16"} and not asked.takes_samples
    stated = (
        {"bitwise": True},
        {"ddp": False},
        {"compression": "fp32"},
        {"plan_options": {"levers": ["buckets"]}},
    )
    assert not asked.chooses_buckets and HybridOptions().settled(model).chooses_buckets
    assert not any(HybridOptions(**given).settled(model).chooses_buckets for given in stated)
    sampler = qsync.ShareSampler(8, batch_size=4)
    loader = torch.utils.data.DataLoader(range(8), batch_sampler=sampler)
    shared = HybridOptions(loader=loader).settled(model)
    assert shared.sampler is sampler and shared.takes_samples
    assert shared.plan_options == {"levers": ("share", "accumulate"), "least_samples": LEAST_WITH_BATCH_NORM}
    assert shared.facts()["the global batch of the loader"] == 4
    assert HybridOptions(loader=loader, ddp=False).settled(model).levers == ("share",)
    equal = HybridOptions(loader=loader, plan_options={"levers": ()}).settled(model)
    assert equal.plan_options == {"levers": ()}


def test_operators_may_save_less_by_pattern_or_by_lever():
    asked = [{}, {"saving_less": {"infer": ["*"]}}, {"levers": ("save_less",)}, {"levers": ("share",)}]
    assert [HybridOptions(plan_options=each).may_save_less for each in asked] == [False, True, True, False]


@pytest.mark.parametrize("cap", [0, -1, True, "25", 2.0**43])
def test_a_bucket_of_no_size(cap):
    with pytest.raises(FormatError, match="bucket_cap_mb must be positive"):
        HybridOptions(ddp_options={"bucket_cap_mb": cap}).settled(torch.nn.Linear(2, 2))
