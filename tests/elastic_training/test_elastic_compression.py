"""Compressed gradients of an elastic job: equal bits, a new begin with new cards, a death costs the step."""

from __future__ import annotations

import pytest
from two_ranks import HEADER, said, start_ranks

pytestmark = pytest.mark.dist
BODY = """
from torch.distributed import TCPStore
from qsync.distributed import gradient_codecs
from qsync.distributed.gradient_weighting import compressed_sum_of
from qsync.elastic_training.elastic_ddp import ElasticDDP, MembershipGroup

port = int(os.environ["MASTER_PORT"])
store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
cards = MembershipGroup(20.0, "gloo")
alone = cards.form(f"127.0.0.1:{port}/alone-{rank}", 0, 1)
model = ElasticDDP(make(), cards, {"*": "int8+feedback"}, process_group=alone)

def gradient(own=rank):
    model.zero_grad()
    model.hook.samples, model.hook.passes, model.hook.num_equal = 32, 1, model.process_group.size()
    loss_fn(model, batch(seed=own)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])

def plain(*seeds):
    whole = make()
    (sum(loss_fn(whole, batch(seed=seed)) for seed in seeds) / len(seeds)).backward()
    return torch.cat([p.grad.flatten() for p in whole.parameters()])

say(f"alone: {torch.equal(gradient(), plain(rank))}")
for meeting in ("first", "second"):
    model.reform(cards.form(f"127.0.0.1:{port}/{meeting}", rank, 2))
    sums = model.hook.compressed.sums
    begins = len(sums.residuals)
    found = gradient()
    lost = float((found - plain(0, 1)).norm() / found.norm())
    store.set(f"{meeting}{rank}", found.numpy().tobytes())
    same = store.get(f"{meeting}0") == store.get(f"{meeting}1")
    carried = float(sums.residuals["head.weight"].abs().max()) > 0.0
    say(f"{meeting}: {begins} {same} {1e-4 < lost < 2e-2} {carried}")
say(f"saved: {compressed_sum_of(model)}")
model.reform(cards.form(f"127.0.0.1:{port}/again-{rank}", 0, 1))
say(f"alone again: {torch.equal(gradient(), plain(rank))}")
model.reform(cards.form(f"127.0.0.1:{port}/third", rank, 2))
if rank == 1:
    gradient_codecs._all_gather = lambda *_, **__: os._exit(7)  # in the thread that exchanges
found = gradient()
say(f"dead: {cards.failure is not None} {bool(found.any())}")
"""


def test_cards_get_equal_bits_begin_anew_with_each_other_and_survive_a_death(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(HEADER + BODY)
    ranks = start_ranks([script, script], tmp_path)
    (first, output), (second, other) = (ranks[rank].ended(120.0) for rank in (0, 1))
    assert (first, second) == (0, 7), (output, other)
    assert said(output + other, "alone") == ["True"] * 2
    for meeting in ("first", "second"):
        assert said(output + other, meeting) == ["0 True True True"] * 2
    assert said(output + other, "saved") == ["None"] * 2
    assert said(output + other, "alone again") == ["True"] * 2
    assert "[0] dead: True False" in output
