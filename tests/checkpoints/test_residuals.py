"""Residuals of compressed gradients: saved by every rank, loaded by as many, dropped by any other number."""

from __future__ import annotations

import pytest
from two_ranks import launch, said

pytestmark = pytest.mark.dist
BODY = """
import logging
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel as DDP
from qsync.distributed.gradient_weighting import compress_gradients, compressed_sum_of

dist.init_process_group("gloo")
folder = Path(cache) / KIND.replace(":", "-")

def built(kind=KIND):
    model = DDP(make())
    compress_gradients(model, {"*": kind})
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

def stepped(model, optimizer, seeds):
    for seed in seeds:
        optimizer.zero_grad()
        loss_fn(model, batch(seed=10 * seed + rank)).backward()
        optimizer.step()
    return parameters(model)

if not folder.exists():
    model, optimizer = built()
    stepped(model, optimizer, range(3))
    qsync.save(folder, model, optimizer, step=3)
    went_on = stepped(model, optimizer, (3, 4))
model, optimizer = built()
stepped(model, optimizer, (7,))  # what is there before makes way
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("qsync").addHandler(handler)
logging.getLogger("qsync").setLevel(logging.INFO)
qsync.load(folder, model, optimizer)
if dist.get_world_size() == 2:
    loaded = stepped(model, optimizer, (3, 4))
    sums = compressed_sum_of(model)
    model, optimizer = built()
    qsync.load(folder, model, optimizer)
    compressed_sum_of(model).load({}, {})
    without = stepped(model, optimizer, (3, 4))
    own = torch.cat([each.flatten() for each in sums.residuals.values()])
    others = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(others, own)
    say(f"goes on: {torch.equal(loaded, went_on)} {torch.equal(without, went_on)} {torch.equal(*others)}")
    plain = make()
    qsync.load(folder, plain)
    say(f"plain: {len(list(folder.glob('gradient_residuals-rank*')))}")
else:
    held = compressed_sum_of(model).residuals
    say(f"dropped: {len(held)} {len([text for text in said if 'begin at zero' in text])}")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["int8+feedback", "powersgd:2"])
def test_residuals_go_on_on_as_many_ranks_and_begin_anew_on_others(tmp_path, kind):
    body = f"KIND = {kind!r}\n{BODY}"
    output = launch(tmp_path, body)
    assert said(output, "goes on") == ["True False False"] * 2
    assert said(output, "plain") == ["2"] * 2
    assert said(launch(tmp_path, body, ranks=3), "dropped") == ["0 1", "0 0"]
