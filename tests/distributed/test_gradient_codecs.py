"""Compressed sums between real ranks: equal bits, stated bytes, residuals, NaN and Inf, torch's PowerSGD."""

from __future__ import annotations

import pytest
import torch
from two_ranks import launch, said

from qsync.distributed.gradient_codecs import decode_int8, encode_int8, shape_in_memory
from qsync.errors import FormatError
from qsync.records.compression import BLOCK, Compression, kind_of, message_bytes

RANKS = 3
BODY = """
from qsync.distributed import gradient_codecs
from qsync.distributed.gradient_codecs import CompressedSum, Piece
from qsync.records.compression import Compression

dist.init_process_group("gloo")
ranks, passed = dist.get_world_size(), []

def counting(name, function, own):
    def counted(*tensors, **options):
        given = tensors[own]
        passed.append((name, given.numel() * given.element_size()))
        return function(*tensors, **options)
    return counted

dist.all_reduce = counting("all_reduce", dist.all_reduce, 0)
dist.all_to_all_single = counting("all_to_all", dist.all_to_all_single, 1)
gradient_codecs._all_gather = counting("all_gather", gradient_codecs._all_gather, 1)
pieces = [Piece("b", (70,)), Piece("w", (96, 80)), Piece("c", (8, 3, 3, 3)), Piece("v", (120, 64))]
size = 70 + 96 * 80 + 8 * 27 + 120 * 64

def gradient(seed, of=rank):
    return torch.randn(size, generator=torch.Generator().manual_seed(97 * seed + of))

def sizes(of):
    return [torch.Size(piece.shape).numel() for piece in of]

def exact(seed):
    return sum(gradient(seed, of).double() for of in range(ranks))

def is_same(tensor):
    everyone = [torch.empty_like(tensor) for _ in range(ranks)]
    dist.all_gather(everyone, tensor)
    return all(torch.equal(one.view(torch.int32), tensor.view(torch.int32)) for one in everyone)

for text in ("fp32", "bf16", "int8", "powersgd:2", "int8+feedback", "bf16+feedback"):
    kind, sums = Compression.parse(text), CompressedSum(None)
    shapes, off, same, lost = [piece.shape for piece in pieces], [], True, torch.zeros(size).double()
    for step in range(20):
        buffer = gradient(0)  # the same gradient in every step
        passed.clear()
        sums.sum_(buffer, pieces, kind)
        counts = passed == [tuple(message) for message in kind.messages(shapes, ranks)]
        same = same and is_same(buffer) and counts
        lost += buffer.double() - exact(0)
        off.append(float((buffer.double() - exact(0)).norm() / exact(0).norm()))
    say(f"{text}: {same} {off[0]:.6f} {float(lost.norm() / 20 / exact(0).norm()):.8f}")

kind, sums, whole = Compression.parse("int8+feedback"), CompressedSum(None), gradient(3)
sums.sum_(gradient(2), pieces, kind)
sums.sum_(whole, pieces, kind)  # the same in two buckets of another order
again, parts = CompressedSum(None), {}
again.sum_(gradient(2), pieces, kind)
for own in ([3, 1], [2, 0]):
    split = dict(zip((p.name for p in pieces), gradient(3).split(sizes(pieces))))
    before = {name: again.residuals[name].clone() for name in again.residuals}
    bucket = torch.cat([split[pieces[k].name] for k in own])
    carried = again._residual(bucket, [pieces[k] for k in own])
    parts |= {f"carried {own}": torch.equal(carried, torch.cat([before[pieces[k].name] for k in own]))}
say(f"other buckets: {all(parts.values())} {float(carried.norm()) > 0.0}")

for text in ("fp32", "bf16", "int8", "powersgd:2", "int8+feedback"):
    for name, value in (("Inf", float("inf")), ("NaN", float("nan"))):
        kind, sums = Compression.parse(text), CompressedSum(None)
        buffer = gradient(1)
        if rank == 1:
            buffer[70 + 85] = value
        sums.sum_(buffer, pieces, kind)
        found = bool(buffer[70 + 85].isfinite())
        buffer = gradient(1)
        sums.sum_(buffer, pieces, kind)  # the next step is whole again
        say(f"{text} {name}: {found} {bool(buffer.isfinite().all())}")
    buffer = torch.zeros(size)
    CompressedSum(None).sum_(buffer, pieces, Compression.parse(text))
    say(f"{text} zero: {int(buffer.count_nonzero())}")

passed.clear()
few = [Piece("few", (ranks * 256 - 1,))]
CompressedSum(None).sum_(torch.ones(ranks * 256 - 1), few, Compression.parse("int8"))
say(f"few: {passed}")

from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.nn.parallel import DistributedDataParallel as DDP

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 64))

state = theirs.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, random_seed=1)
peer, own = DDP(net()), DDP(net())
peer.register_comm_hook(state, theirs.powerSGD_hook)
from qsync.distributed.gradient_weighting import compress_gradients
compress_gradients(own, {"*": "powersgd:2"})
errors = {}
for name, model in {"theirs": peer, "ours": own}.items():
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(rank))
    lost, truth = 0.0, None
    for step in range(32):
        model.zero_grad()
        model(x).square().mean().backward()
        found = torch.cat([p.grad.flatten() for p in model.parameters()])
        if truth is None:
            plain = DDP(net())
            plain(x).square().mean().backward()
            truth = torch.cat([p.grad.flatten() for p in plain.parameters()])
        if step >= 16:
            lost += (found - truth).norm() ** 2 / truth.norm() ** 2 / 16
    errors[name] = float(lost)
say(f"torch: {is_same(found)} {errors['ours'] / errors['theirs']:.4f} {errors['ours']:.4f}")
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> str:
    return launch(tmp_path_factory.mktemp("codecs"), BODY, ranks=RANKS)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "least", "most", "over_steps"),
    [
        ("fp32", 0.0, 1e-6, 1e-6), ("bf16", 1e-3, 5e-3, 5e-3), ("int8", 3e-3, 2e-2, 2e-2),
        ("bf16+feedback", 1e-3, 5e-3, 4e-3), ("int8+feedback", 3e-3, 2e-2, 1e-3),
        ("powersgd:2", 0.3, 1.1, 0.85),
    ],
)  # fmt: skip
def test_sums_are_equal_on_all_ranks_near_the_exact_one_and_send_the_stated_bytes(
    output, kind, least, most, over_steps
):
    for text in said(output, kind):
        same, off, mean_off = text.split()
        assert same == "True" and least <= float(off) <= most and float(mean_off) <= over_steps, output


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "powersgd:2", "int8+feedback"])
def test_nan_and_inf_reach_every_rank_and_no_later_step(output, kind):
    for value in ("NaN", "Inf"):
        assert said(output, f"{kind} {value}") == ["False True"] * 2
    assert said(output, f"{kind} zero") == ["0"] * 2


@pytest.mark.dist
def test_small_buckets_other_buckets_and_the_peer(output):
    assert said(output, "few") == [f"[('all_reduce', {4 * (RANKS * BLOCK - 1)})]"] * 2
    assert said(output, "other buckets") == ["True True"] * 2
    for text in said(output, "torch"):
        same, ratio, _ = text.split()
        assert same == "True" and 0.5 < float(ratio) < 1.5, output


def test_int8_codes_are_nearest_and_take_a_byte_and_a_64th():
    values = torch.randn(2, 3 * BLOCK, generator=torch.Generator().manual_seed(0))
    message = encode_int8(values)
    assert message.shape == (2, message_bytes(3 * BLOCK)) == (2, 3 * BLOCK * 65 // 64)
    step = values.unflatten(1, (-1, BLOCK)).abs().amax(2, keepdim=True) / 127
    off = (decode_int8(message) - values).unflatten(1, (-1, BLOCK)).abs()
    assert bool((off <= step * 0.5001).all()) and float(off.max()) > 0.0


def test_kinds_are_read_and_a_bucket_of_several_travels_in_the_one_that_loses_least():
    assert [str(Compression.parse(text)) for text in ("powersgd", "int8+feedback")] == [
        "powersgd:4", "int8+feedback",
    ]  # fmt: skip
    for text in ("int4", "int8:3", "fp32+feedback", "powersgd:0", 8):
        with pytest.raises(FormatError, match="does not exist; choose"):
            Compression.parse(text)
    kinds = {"*": "int8", "head": "bf16"}
    assert kind_of(kinds, ["a", "b"]).kind == "int8" and kind_of(kinds, ["a", "head"]).kind == "bf16"
    mixed = {"a": "int8", "b": "int8+feedback", "c": "powersgd:2", "d": "powersgd:4"}
    assert kind_of(mixed, "abcd") == kind_of(mixed, "b") and kind_of(mixed, "cd") == kind_of(mixed, "d")
    assert kind_of({"head": "bf16"}, ["head"]).kind == "bf16" and kind_of({}, ["a"]).kind == "fp32"
    transposed = torch.nn.Parameter(torch.zeros(3, 5).t())
    assert shape_in_memory(transposed) == (3, 5) and shape_in_memory(torch.zeros(4, 1)) == (4, 1)
