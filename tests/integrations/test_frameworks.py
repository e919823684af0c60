"""Training loops of other libraries on two ranks: cases keep their verdicts, and refusals their sentences."""

from __future__ import annotations

import json

import pytest
from two_ranks import launch, said

from qsync.experiments.harness.ranks import run_on_ranks
from qsync.experiments.integrations import run_cases

pytestmark = [pytest.mark.dist, pytest.mark.slow]

TESTED = """
import json
from qsync.distributed import job
from qsync.experiments.integrations import run_cases

job.join_job(torch.device("cpu"))
rows = run_cases.run({{"module": "{module}", "tested": True, "folder": cache}}, None)
say("rows: " + json.dumps(rows))
dist.destroy_process_group()
"""


def check(rows, at_least):
    assert len(rows) >= at_least
    for row in rows:
        assert row["verdict"] == row["expected"] and row["says"] in row["sentence"], row
        assert "\n" not in row["sentence"]
        assert row["verdict"] != "works" or row["norm_error"] <= row["tolerance"], row


@pytest.mark.parametrize(("module", "at_least"), zip(run_cases.MODULES, (2, 5, 5, 5, 4), strict=True))
def test_a_way_to_train_and_every_refusal_keep_their_verdicts(module, at_least, tmp_path):
    of_rank_zero, _ = said(launch(tmp_path, TESTED.format(module=module)), "rows")
    check(json.loads(of_rank_zero), at_least)


# Every case trains several times: five minutes are not enough beside other work.
@pytest.mark.deep  # more ways to train, save and resume; the quick test is of one of each library
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("module", run_cases.MODULES)
def test_all_cases_keep_their_verdicts(module, tmp_path):
    config = {"module": module, "folder": str(tmp_path), "weak_share": 1.0}
    check(run_on_ranks(run_cases.run, config, command="integrations", timeout_s=600.0), 10)
