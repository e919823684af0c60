"""Training loops of other libraries on two ranks: cases keep their verdicts, and refusals their sentences."""

from __future__ import annotations

import json

import pytest
from two_ranks import launch, said

from qsync.experiments.harness.ranks import run_on_ranks
from qsync.experiments.integrations import run_cases

# Every case trains several times: five minutes are not enough beside other work.
pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1200)]

TESTED = """
import json
from qsync.distributed import job
from qsync.experiments.integrations import run_cases

job.join_job(torch.device("cpu"))
rows = run_cases.run({"modules": run_cases.MODULES, "tested": True, "folder": cache}, None)
say("rows: " + json.dumps(rows))
dist.destroy_process_group()
"""


def check(rows):
    for row in rows:
        assert row["verdict"] == row["expected"] and row["says"] in row["sentence"], row
        assert "\n" not in row["sentence"]
        assert row["verdict"] != "works" or row["norm_error"] <= row["tolerance"], row


def test_a_way_to_train_by_each_library_and_refusals_keep_their_verdicts(tmp_path):
    of_rank_zero, _ = said(launch(tmp_path, TESTED, timeout_s=1000.0), "rows")
    check(rows := json.loads(of_rank_zero))
    works = {row["group"] for row in rows if row["verdict"] == "works"}
    assert works >= {"Accelerate", "Trainer", "Lightning", "FSDP2"} and len(rows) > 15


# More ways to train, save and resume; quick ones with shares are in test_shares_in_frameworks.py.
@pytest.mark.deep
@pytest.mark.parametrize("module", run_cases.MODULES)
def test_all_cases_keep_their_verdicts(module, tmp_path):
    config = {"modules": [module], "folder": str(tmp_path), "weak_share": 1.0}
    rows = run_on_ranks(run_cases.run, config, command="integrations", timeout_s=600.0)
    check(rows)
    assert len(rows) >= 5
