"""A parameter that a step does not use is named before training, unless DDP is told of it."""

from __future__ import annotations

import pytest
from two_ranks import launch, said

SCRIPT = """
class Idle(Net):
    def __init__(self):
        super().__init__()
        self.idle = torch.nn.Linear(4, 4)

def attempt_hybrid(**options):
    torch.manual_seed(0)
    return qsync.hybrid(Idle(), batch(), loss_fn, cache_dir=cache, **options)

try:
    attempt_hybrid()
except qsync.QSyncError as error:
    say(f"refused: {error}")
model = attempt_hybrid(ddp_options={"find_unused_parameters": True})
train(model, 3)
say("trained: yes")
DDP = torch.nn.parallel.DistributedDataParallel
torch.manual_seed(0)
model = Idle()
DDP._set_params_and_buffers_to_ignore_for_model(model, ["idle.weight", "idle.bias"])
train(qsync.hybrid(model, batch(), loss_fn, cache_dir=cache), 3)
say("ignored: yes")
"""


@pytest.mark.dist
def test_an_unused_parameter_is_named_with_what_to_do(tmp_path):
    output = launch(tmp_path, SCRIPT)
    refused = said(output, "refused")
    assert len(refused) == 2
    for text in refused:
        assert "a step gives 'idle.weight' no gradient, and DDP waits for one" in text
        assert 'ddp_options={"find_unused_parameters": True}' in text
    assert said(output, "trained") == said(output, "ignored") == ["yes", "yes"]
