"""A rank that dies between the collectives of a compressed exchange ends the others' step with an error."""

from __future__ import annotations

import pytest
from two_ranks import HEADER, start_ranks

pytestmark = pytest.mark.dist
BODY = """
from torch.nn.parallel import DistributedDataParallel as DDP
from qsync.distributed import gradient_codecs
from qsync.distributed.gradient_weighting import compress_gradients

dist.init_process_group("gloo")
model = DDP(make())
compress_gradients(model, {"*": "int8"})
train(model, 2)
if rank == 1:
    gradient_codecs._all_gather = lambda *_, **__: os._exit(7)  # in the thread that exchanges
try:
    train(model, 1)
    say("went through")
except RuntimeError as error:
    say(f"raised: {'closed' in str(error) or 'reset' in str(error)}")
"""


def test_a_death_in_mid_exchange_is_an_error_and_no_wait(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(HEADER + BODY)
    ranks = start_ranks([script, script], tmp_path)
    (first, said), (second, _) = (ranks[rank].ended(120.0) for rank in (0, 1))
    assert second == 7 and first == 0 and "raised: True" in said, said
