"""The length sampler between real ranks: every sequence once, the same steps everywhere, or one sentence."""

from __future__ import annotations

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from two_ranks import launch, said

import qsync
from qsync.distributed.monitoring.drift_monitor import Prediction, note_prediction
from qsync.errors import FormatError, MismatchError, UnsupportedError
from qsync.replayer.costs.sequence_costs import SequenceCost

BODY = """
from qsync.distributed.agreement import agree

def net():
    torch.manual_seed(0)
    layers = torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 11)
    return torch.nn.Sequential(torch.nn.Embedding(11, 16), *layers)

mean = lambda model, b: F.cross_entropy(model(b[0]).flatten(0, 1), b[1].flatten(), ignore_index=-100)
x = torch.randint(0, 11, (4, 24))
model = qsync.hybrid(net(), (x, x), mean, cache_dir=cache, device_class=("strong", "weak")[rank])

generator = torch.Generator().manual_seed(1)
lengths = torch.randint(2, 24, (22,), generator=generator).tolist()
rows = [torch.randint(0, 11, (n,), generator=generator) for n in lengths]

def pad(rows):
    padded = torch.nn.utils.rnn.pad_sequence
    return padded(rows, True), padded([row.flip(0) for row in rows], True, -100)

sampler = qsync.LengthSampler(model, lengths, 8)
everyone = agree("steps", lambda: list(sampler))
steps = [sorted(a + b) for a, b in zip(*everyone)]
say(f"once: {len(sampler)} {[len(s) for s in steps]} {sorted(sum(steps, [])) == list(range(22))}")
sampler.set_epoch(1)
say(f"epochs: {list(sampler) != everyone[rank]}")
rest = qsync.LengthSampler(model, lengths, 8, drop_last=True, shuffle=False)
say(f"drop: {len(rest)} {len(list(rest))}")
single = qsync.LengthSampler(model, lengths[:9], 8, shuffle=False)  # one sequence is left for two ranks
say(f"wrapped: {sorted(sum(agree('steps', lambda: list(single)[-1]), []))}")

loader = torch.utils.data.DataLoader(rows, batch_sampler=sampler, collate_fn=pad)
sampler.set_epoch(0)
batch = next(iter(loader))
model.zero_grad()
qsync.token_mean(model, mean(model, batch), (batch[1] != -100).sum()).backward()
mine = torch.cat([p.grad.flatten() for p in model.parameters()])
whole = net()
mean(whole, pad([rows[i] for i in steps[0]])).backward()
exact = torch.cat([p.grad.flatten() for p in whole.parameters()])
say(f"gradient: {float((mine - exact).norm() / exact.norm()) < 0.1}")  # a lowered rank rounds

def attempt(what, do):
    try:
        do()
        say(f"{what}: went through")
    except QSyncError as error:
        say(f"{what}: {error}")

attempt("other lengths", lambda: qsync.LengthSampler(model, lengths[rank:], 8))
attempt("no prediction", lambda: qsync.LengthSampler(whole, lengths, 8))
attempt("one rank", lambda: qsync.LengthSampler(model, lengths, 8 if rank else 0))
dist.destroy_process_group()
"""


@pytest.mark.dist
def test_every_sequence_is_taken_once_by_one_rank(tmp_path):
    output = launch(tmp_path, BODY)
    assert said(output, "once") == ["3 [8, 8, 6] True"] * 2
    assert said(output, "epochs") == ["True"] * 2
    assert said(output, "drop") == ["2 2"] * 2
    assert said(output, "wrapped") == ["[0, 8]"] * 2
    assert said(output, "gradient") == ["True"] * 2
    sentences = {
        "other lengths": "the lengths of sequences differs between ranks",
        "no prediction": "this model has no predicted cost per sequence",
        "one rank": "failed on rank 0: batch_size must be a whole number of at least 1, found 0",
    }
    for what, sentence in sentences.items():
        assert all(sentence in text for text in said(output, what)), said(output, what)


def test_a_process_alone_takes_every_batch_whole():
    model = torch.nn.Linear(2, 2)
    cost = SequenceCost(1.0, 1.0, 0.0)
    note_prediction(model, Prediction({}, {"here": 1}, {"here": cost}), "here")
    sampler = qsync.LengthSampler(model, [3, 1, 2, 5], 2, shuffle=False)
    assert [sorted(batch) for batch in sampler] == [[0, 1], [2, 3]]
    assert len(qsync.LengthSampler(model, [3, 1, 2, 5, 4], 2, drop_last=True)) == 2
    with pytest.raises(FormatError, match="lengths must be positive whole numbers"):
        qsync.LengthSampler(model, [3, 0], 2)
    with pytest.raises(FormatError, match="max_tokens must be a whole number of at least 1, found -1"):
        qsync.LengthSampler(model, [3], 2, max_tokens=-1)
    assert list(BatchSamplerShard(sampler, 2, 0)) == list(sampler)
    with pytest.raises(UnsupportedError, match="leave split_batches out"):
        BatchSamplerShard(sampler, 2, 0, split_batches=True)
    with pytest.raises(MismatchError, match="class here has no sequence costs, only other"):
        qsync.LengthSampler(model, [3], 2, costs={"other": cost})
