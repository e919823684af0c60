"""The workspace of each kernel, against the allocator's events in a step of few operators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from qsync.backend import int8_products  # noqa: E402
from qsync.backend.kernels.attention import attention_bf16  # noqa: E402
from qsync.experiments.harness.ranks import process_group_of_one  # noqa: E402
from qsync.experiments.memory import memory_runs  # noqa: E402
from qsync.operators.precision import Precision  # noqa: E402
from qsync.operators.registry import PRECISIONS_BY_KIND  # noqa: E402
from qsync.records.save_less import can_save_less  # noqa: E402

FP32, BF16, INT8, INT8_ALL = memory_runs.PRECISIONS


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    """Multiply attention in BF16 by the kernel that the model describes, even where torch's is faster."""
    torch._dynamo.reset()
    patch = pytest.MonkeyPatch()
    patch.setattr(attention_bf16, "_torch_is_faster", lambda *_: False)
    with process_group_of_one():
        yield
    patch.undo()


class Attention(nn.Module):
    """Attention with its three products before it."""

    def __init__(self, heads: int, mask: str = "", dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.mask, self.dropout = heads, mask, dropout
        self.products = nn.ModuleList(nn.Linear(32 * heads, 32 * heads, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = (p(x).view(batch, tokens, self.heads, 32).transpose(1, 2) for p in self.products)
        mask = None
        if self.mask == "tokens":
            mask = torch.zeros(tokens, tokens)
        elif self.mask:
            mask = torch.zeros(batch, self.heads, tokens, tokens)
            mask = mask[0] if self.mask == "heads alone" else mask
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.dropout)
        return y.transpose(1, 2).reshape(batch, tokens, width)


def linears() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256))


def convolutions(channels: int, between: tuple[nn.Module, ...] = ()) -> nn.Module:
    first, second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
    return nn.Sequential(first, *between, second)


def folded(channels: int) -> tuple[nn.Module, ...]:
    """Two convolutions whose INT8 gradients fold: of single pixels, and of windows with a stride."""
    return nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, channels, 3, stride=2, padding=1)


def ending_in_a_norm(*layers: nn.Module) -> nn.Module:
    """Convolutions whose last gradient lies channels-last, as a norm's does, not as a loss's."""
    return nn.Sequential(*layers, nn.BatchNorm2d(layers[-1].out_channels))


class OneHeadOfKeys(nn.Module):
    """Attention whose queries share one head of keys and values, which broadcasts."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.products = heads, nn.Linear(128, 32 * (heads + 2))
        self.last = nn.Linear(32 * heads, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.products(x).split([32 * self.heads, 32, 32], -1)
        q, k, v = (t.unflatten(-1, (-1, 32)).transpose(1, 2) for t in (q, k, v))
        return self.last(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Vocabulary(nn.Module):
    """Logits of many words, which the model casts to FP32, and their cross-entropy inside."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 4096, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = torch.arange(len(x))
        return F.cross_entropy(self.head(x).float().view(len(x), -1), words)


class Scaled(nn.Module):
    """Products scaled by numbers, by a tensor without a gradient, and by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 256)
        self.register_buffer("divisor", torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y = (0.5 * y).tanh() / 3 + (y / self.divisor).tanh()
        return self.second(y * y).sum(-1, keepdim=True)


class Expanded(nn.Module):
    """A product that broadcasts an operand, as votes of capsules do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.last = nn.Linear(64, 64), nn.Linear(4, 4)
        self.votes = nn.Linear(64, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.votes(x[:1]).view(1, -1, 4, 64), self.seen(x).unsqueeze(-1)
        return self.last((left @ right).squeeze(-1)).sum(-1, keepdim=True)


class Pairs(nn.Module):
    """A bilinear layer between linear ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(96, 96), nn.Linear(96, 64), nn.Linear(24, 32)
        self.pair = nn.Bilinear(96, 64, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.pair(self.first(x), self.second(x)))


class Tied(nn.Module):
    """Two products of one large weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1024, 1024) / 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, self.weight).tanh(), self.weight)


class QueriesInOrder(Attention):
    """Attention whose queries are concatenated, by which the order of its result is another one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = (p(x).view(batch, tokens, self.heads, 32).transpose(1, 2) for p in self.products)
        q = torch.cat([q[..., :16], q[..., 16:]], -1)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()
        return self.last(y.view(batch, tokens, width)).sum(-1, keepdim=True)

    def __init__(self, heads: int) -> None:
        super().__init__(heads)
        self.last = nn.Linear(32 * heads, 32 * heads)


class Broken(nn.Module):
    """Two halves, traced apart, of which the second one saves what the first one hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 1024), nn.Linear(1024, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        torch._dynamo.graph_break()
        return self.second(y.tanh()).sum(-1, keepdim=True)


def in_channels_last(*layers: nn.Module) -> nn.Module:
    return ending_in_a_norm(*layers).to(memory_format=torch.channels_last)


def depthwise(window: int) -> nn.Module:
    return nn.Conv2d(64, 64, window, padding=window // 2, groups=64)


class RowsAsImages(nn.Module):
    """A convolution of rows of tokens, which lie channels-last as an image, while its weight does not."""

    def __init__(self, side: int, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.side, self.convolution = side, convolution
        self.rows = nn.Linear(8, convolution.in_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = self.rows(x).transpose(1, 2).unflatten(2, (self.side, self.side))
        return self.convolution(image).flatten(2).transpose(1, 2).sum(-1, keepdim=True)


class Signals(nn.Module):
    """A convolution of signals, scaled before it and normalized after it."""

    def __init__(self, convolution: nn.Conv1d) -> None:
        super().__init__()
        self.scale, self.convolution = nn.Parameter(torch.ones(1, 64, 1)), convolution
        self.norm, self.last = nn.GroupNorm(64, 64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.convolution(x * self.scale)).mean(2)).unsqueeze(1)


def block() -> nn.Module:
    followers = nn.GELU(), nn.LayerNorm(256), nn.Dropout(0.1)
    return nn.Sequential(nn.Linear(256, 256), *followers, nn.Linear(256, 256))


TOKENS, LONG, IMAGES = (8, 128, 128), (2, 1024, 64), (8, 32, 16, 16)
# Name: the model, the shape of its batch.
MODELS = {
    "linear": (linears, (1024, 256)),
    "linear, few rows": (linears, (64, 256)),
    "attention": (lambda: Attention(4), TOKENS),
    "attention, long": (lambda: Attention(2), LONG),
    "attention, short": (lambda: Attention(4), (128, 8, 128)),
    "attention, windows": (lambda: Attention(4, "heads"), (24, 48, 128)),
    "attention, dropout": (lambda: Attention(4, dropout=0.1), TOKENS),
    "attention, mask": (lambda: Attention(4, "tokens"), TOKENS),
    "attention, mask of heads": (lambda: Attention(4, "heads"), TOKENS),
    "attention, mask of heads alone": (lambda: Attention(4, "heads alone"), TOKENS),
    "attention, one head of keys": (lambda: OneHeadOfKeys(4), TOKENS),
    "convolution, unfolded": (lambda: convolutions(256), (8, 256, 4, 4)),
    "convolution, unfolded forward": (lambda: convolutions(256), (32, 256, 4, 4)),
    "convolution, normalized": (lambda: ending_in_a_norm(*convolutions(256)), (8, 256, 4, 4)),
    "convolution, folded": (lambda: ending_in_a_norm(*folded(64)), (8, 64, 16, 16)),
    "batch norm": (lambda: convolutions(32, (nn.BatchNorm2d(32), nn.ReLU())), IMAGES),
    "convolution, stride": (
        lambda: nn.Sequential(nn.Conv2d(32, 32, 1), nn.Conv2d(32, 16, 3, stride=2, padding=1)), IMAGES,
    ),
    "convolution, channels last": (
        lambda: in_channels_last(nn.Conv2d(64, 128, 3), nn.Conv2d(128, 128, 1), nn.Conv2d(128, 64, 3)),
        (8, 64, 16, 16),
    ),
    "convolution, channels last, to a pixel": (
        lambda: in_channels_last(nn.Conv2d(128, 128, 1), nn.Conv2d(128, 128, 3, stride=2, padding=1)),
        (8, 128, 2, 2),
    ),
    "convolution, groups": (
        lambda: in_channels_last(nn.Conv2d(64, 64, 3, groups=8), depthwise(7), depthwise(3)), (8, 64, 16, 16),
    ),
    "convolution, rows": (
        lambda: RowsAsImages(4, nn.Conv2d(128, 256, 3, stride=2, padding=1)), (4, 16, 8),
    ),
    "convolution, rows, groups": (
        lambda: RowsAsImages(2, nn.Conv2d(256, 256, 3, padding=1, groups=256)), (4, 4, 8),
    ),
    "convolution, rows, groups, stride": (
        lambda: RowsAsImages(3, nn.Conv2d(256, 256, 3, stride=2, padding=1, groups=256)), (4, 9, 8),
    ),
    "convolution, few channels": (
        lambda: nn.Sequential(
            nn.Conv2d(64, 64, 1), nn.Conv2d(64, 64, 5, stride=2, padding=2, groups=64),
            nn.Conv2d(64, 64, 1, groups=4),
        ),
        (8, 64, 16, 16),
    ),
    "convolution, signals": (lambda: Signals(nn.Conv1d(64, 64, 3, padding=1)), (8, 64, 256)),
    "convolution, signals, stride": (lambda: Signals(nn.Conv1d(64, 64, 10, stride=5)), (8, 64, 256)),
    "convolution, signals, groups": (
        lambda: Signals(nn.Conv1d(64, 64, 4, padding=3, groups=64)), (8, 64, 256),
    ),
    "convolution, transposed": (
        lambda: nn.Sequential(nn.ConvTranspose2d(64, 32, 2, 2), nn.GELU(), nn.AvgPool2d(2)),
        (8, 64, 16, 16),
    ),
    "convolution, volumes": (
        lambda: nn.Sequential(nn.Conv3d(16, 32, 3, padding=1), nn.GELU(), nn.Conv3d(32, 16, 3, padding=1)),
        (4, 16, 8, 16, 16),
    ),
    "block": (block, (1024, 256)),
    "vocabulary": (Vocabulary, (512, 64)),
    "scaled": (Scaled, (1024, 256)),
    "expanded": (Expanded, (64, 64, 64)),
    "tied": (Tied, (64, 1024)),
    "bilinear": (Pairs, (512, 96)),
    "queries in order": (lambda: QueriesInOrder(4), TOKENS),
    "broken": (Broken, (512, 256)),
}  # fmt: skip
EXACT = 0.0025  # of the peak; a few kilobytes of scratch
# The precisions in which each is measured, with the tolerance.
CASES = {
    "linear": {FP32: EXACT, INT8: EXACT, INT8_ALL: EXACT, Precision.MXFP8: EXACT},
    "linear, few rows": {FP32: EXACT, INT8: EXACT, INT8_ALL: EXACT, Precision.MXFP8: EXACT},
    "attention": {FP32: 0.01, BF16: 0.005, INT8: EXACT},
    "attention, long": {BF16: 0.005, INT8: EXACT},
    "attention, short": {BF16: 0.005, INT8: EXACT},
    "attention, windows": {BF16: 0.005, INT8: EXACT},
    "attention, dropout": {FP32: EXACT, BF16: 0.005, INT8: EXACT},
    "attention, mask": {FP32: 0.01, BF16: 0.005},
    "attention, mask of heads": {BF16: 0.005},
    "attention, one head of keys": {FP32: EXACT},
    "attention, mask of heads alone": {FP32: EXACT},
    "convolution, unfolded": {FP32: EXACT, INT8: EXACT},
    "convolution, unfolded forward": {INT8: 0.005},
    "convolution, normalized": {INT8_ALL: EXACT},
    "convolution, folded": {INT8_ALL: EXACT},
    "batch norm": {FP32: EXACT},
    "convolution, stride": {FP32: EXACT},
    "convolution, channels last": {FP32: EXACT},
    "convolution, channels last, to a pixel": {FP32: EXACT},
    "convolution, groups": {FP32: EXACT},
    "convolution, rows": {FP32: EXACT},
    "convolution, rows, groups": {FP32: EXACT},
    "convolution, rows, groups, stride": {FP32: EXACT},
    "convolution, few channels": {FP32: EXACT},
    "convolution, signals": {FP32: EXACT, BF16: 0.05, INT8: EXACT},  # oneDNN's scratch
    "convolution, signals, stride": {FP32: EXACT, INT8: EXACT},
    "convolution, signals, groups": {FP32: EXACT},
    "convolution, transposed": {FP32: EXACT},
    "convolution, volumes": {FP32: EXACT, BF16: 0.04},  # oneDNN's scratch differs between processors
    "block": {INT8: EXACT},
    "vocabulary": {FP32: EXACT, BF16: EXACT},
    "scaled": {FP32: EXACT},
    "expanded": {FP32: 0.01, BF16: 0.01, INT8: 0.08, Precision.MXFP8: 0.08},
    "tied": {FP32: 0.025},  # and the gradient of an activation that is freed before
    "bilinear": {FP32: EXACT, BF16: EXACT},
    "queries in order": {FP32: 0.01, INT8: 0.03},
    "broken": {FP32: EXACT},
}

# oneDNN's kernels for AMX allocate other scratch, which the memory model does not know.
WITH_AMX = 0.025 if torch.cpu._is_amx_tile_supported() else 0.0


@pytest.fixture(scope="module")
def trained() -> dict[tuple[str, bool], memory_runs.Trained]:
    """Models in training, made when a case asks for them."""
    return {}


def test_a_tied_weight_takes_no_more_than_predicted_by_the_fastest_kernel_of_fp32():
    torch.manual_seed(0)
    make, shape = MODELS["tied"]
    step = memory_runs.Trained(make(), (torch.randn(shape), torch.randn(shape)), lambda y, of: (y * of).sum())
    found = step.measure(memory_runs.Choice({op.name: FP32 for op in step.graph.adjustable}))
    weight = max(value.num_elements for value in step.graph.parameters) * 4
    assert 0 <= found["predicted_peak_bytes"] - found["peak_bytes"] <= 1.05 * weight


@pytest.mark.filterwarnings("ignore:Grad strides do not match")  # torch's, of depthwise weights in blocks
@pytest.mark.parametrize(
    ("name", "precision", "saves_less", "tolerance"),
    [
        *((name, p, False, tolerance) for name, case in CASES.items() for p, tolerance in case.items()),
        ("batch norm", FP32, True, EXACT),
        ("block", INT8, True, EXACT),
    ],
)
def test_the_peak_of_a_step_is_as_predicted(
    trained, name, precision, saves_less, tolerance, monkeypatch, fast_products
):
    # The memory model knows the products of oneDNN, not those in tiles (docs/limits.md).
    monkeypatch.setattr(int8_products, "_uses_tiles", lambda *_: False)
    key = name, precision is FP32
    if key not in trained:
        make, shape = MODELS[name]
        torch.manual_seed(0)
        x = torch.randn(shape)
        # The memory model counts with torch's own FP32 products, but for bilinear layers. FP32's fastest
        # kernel, which a timing chooses, copies a transposed operand, or returns a tied weight's gradient as
        # it lies.
        bitwise = precision is FP32 and name != "bilinear"
        trained[key] = memory_runs.Trained(
            make(), (x, x), lambda y, of: (y * of[tuple(map(slice, y.shape))]).sum(), bitwise=bitwise
        )
    step = trained[key]
    able = {op.name: op for op in step.graph.adjustable}
    assignment = {
        op: precision if precision in PRECISIONS_BY_KIND[able[op].kind] else Precision.INT8 for op in able
    }
    less = tuple(op.name for op in step.graph.ops if can_save_less(op)) if saves_less else ()
    found = step.measure(memory_runs.Choice(assignment, less))
    # Four bytes more: the weight of all targets together, which cross_entropy keeps.
    assert found["saved_bytes"] - found["predicted_saved_bytes"] in (0, 4)
    above = found["peak_bytes"] - found["throughout_bytes"]
    assert found["predicted_peak_bytes"] - found["throughout_bytes"] == pytest.approx(
        above, rel=max(tolerance, WITH_AMX)
    )
