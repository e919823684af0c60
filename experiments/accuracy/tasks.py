"""What is trained to convergence: real data that Python, scikit-learn and torch bring along.

Each is a workload with a number of steps; a `start` is another one that the model was trained on before, in
FP32, so that the task is fine-tuning.
"""

from __future__ import annotations

import io
import keyword
import tokenize
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from qsync.errors import QSyncError
from qsync.experiments.workloads.bert import Bert
from qsync.experiments.workloads.gpt import Gpt
from qsync.experiments.workloads.resnet import ResNet
from qsync.experiments.workloads.surrogate import friedman_workload, impedance_workload
from qsync.experiments.workloads.text import load_text, windows
from qsync.experiments.workloads.unet import Denoised, UNet
from qsync.experiments.workloads.vgg import Vgg
from qsync.experiments.workloads.vit import Vit
from qsync.experiments.workloads.workload import Batch, Workload, digits_workload, seeded, text_workload

# Kinds of Python's tokens that a byte can be part of; 0 is what stands between them.
_KINDS = ("space", "keyword", "name", "number", "string", "comment", "operator")
_MOST_BYTES = 1_500_000  # of source whose tokens are found: some seconds
_SIDE = 32  # of the pieces of photographs
_ROWS, _CONTEXT = 8, 96  # of text
_HEADERS = Path(torch.__file__).parent / "include" / "ATen"  # C++, which torch brings along


@dataclass(frozen=True, slots=True)
class Task:
    """A workload with the steps that it takes; `start` names the workload that the weights come from.

    `family` is the name of another task with the same model.
    """

    make: Callable[[], Workload]
    steps: int
    start: Callable[[], Workload] | None = None
    start_steps: int = 0
    family: str = ""

    def workload(self) -> Workload:
        """Return the workload that is measured."""
        return _made(self.make)


@cache
def _made(make: Callable[[], Workload]) -> Workload:
    """Return a workload, whose data is read once a process."""
    return make()


def task_named(name: str) -> Task:
    """Return the task of this name. Raises QSyncError for an unknown one."""
    if name not in TASKS:
        raise QSyncError(f"there is no task {name!r}; choose from {', '.join(TASKS)}")
    return TASKS[name]


@cache
def _with_kinds() -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Return source and the kind of each byte, to train on and held out."""
    text = load_text()
    parts = (text.train[:_MOST_BYTES], text.heldout[: _MOST_BYTES // 5])
    return tuple((part, token_kinds(part)) for part in parts)


def token_kinds(source: np.ndarray) -> np.ndarray:
    """Return the kind of token that each byte of Python's source is part of, by its number in `_KINDS`.

    What cannot be read at the end, where the source was cut, is of kind 0.
    """
    text = bytes(np.where(source < 128, source, ord("?")).astype(np.uint8)).decode("ascii")
    starts = np.cumsum([0, *(len(line) for line in text.splitlines(keepends=True))])
    kinds = np.zeros(len(source), dtype=np.int64)
    try:
        for token in tokenize.generate_tokens(io.StringIO(text, newline="").readline):
            first, end = (starts[row - 1] + column for row, column in (token.start, token.end))
            kinds[first:end] = _KINDS.index(_kind(token))
    except (tokenize.TokenError, IndentationError, SyntaxError):
        pass
    return kinds


def _kind(token: tokenize.TokenInfo) -> str:
    if token.type == tokenize.NAME:
        return "keyword" if keyword.iskeyword(token.string) else "name"
    kinds = {tokenize.NUMBER: "number", tokenize.STRING: "string", tokenize.COMMENT: "comment",
             tokenize.OP: "operator"}  # fmt: skip
    return kinds.get(token.type, "space")


def _token_kinds_workload() -> Workload:
    """Return a BERT that says of each byte of source what kind of token it is part of."""
    size = _ROWS

    def taken(source: np.ndarray, kinds: np.ndarray, starts: np.ndarray) -> Batch:
        rows = np.stack([kinds[start : start + _CONTEXT] for start in starts])
        return windows(source, starts, _CONTEXT)[0], torch.from_numpy(rows)

    def batch(seed: int, step: int, rank: int) -> Batch:
        source, kinds = _with_kinds()[0]
        draw = np.random.default_rng((seed, step, rank))
        return taken(source, kinds, draw.integers(len(source) - _CONTEXT - 1, size=size))

    def heldout(num: int) -> list[Batch]:
        source, kinds = _with_kinds()[1]
        starts = np.linspace(0, len(source) - _CONTEXT - 2, num * size).astype(int)
        return [taken(source, kinds, starts[i::num]) for i in range(num)]

    def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def make() -> Bert:
        model = Bert(num_layers=3, width=192, num_heads=3, context=_CONTEXT)
        model.head = torch.nn.Linear(model.head.in_features, len(_KINDS))
        return model

    return Workload(
        "token kinds", lambda seed: seeded(make, seed), batch, loss_fn, heldout, 32, 5e-4,
        "BERT that says what kind of token each byte is; text: Python standard library",
    )  # fmt: skip


@cache
def _photographs() -> tuple[torch.Tensor, torch.Tensor]:
    """Return scikit-learn's two photographs (2, 3, H, W) in [-1, 1]: left parts, and right ones held out."""
    from sklearn.datasets import load_sample_image

    images = [torch.tensor(load_sample_image(name)).permute(2, 0, 1) for name in ("china.jpg", "flower.jpg")]
    both = torch.stack(images).float().div_(127.5).sub_(1.0)
    cut = both.shape[-1] * 4 // 5
    return both[..., :cut], both[..., cut:]


def _denoising_workload() -> Workload:
    """Return a UNet that finds the noise in pieces of photographs."""
    size = 8

    def pieces(images: torch.Tensor, draw: np.random.Generator) -> Batch:
        found = []
        for _ in range(size):
            which = int(draw.integers(len(images)))
            y, x = (int(draw.integers(images.shape[d] - _SIDE)) for d in (2, 3))
            found.append(images[which, :, y : y + _SIDE, x : x + _SIDE])
        return torch.stack(found), torch.zeros(size)

    def batch(seed: int, step: int, rank: int) -> Batch:
        return pieces(_photographs()[0], np.random.default_rng((seed, step, rank)))

    def heldout(num: int) -> list[Batch]:
        draw = np.random.default_rng(0)
        return [pieces(_photographs()[1], draw) for _ in range(num)]

    def loss_fn(found: Denoised, targets: torch.Tensor) -> torch.Tensor:
        return found.loss

    return Workload(
        "denoising", lambda seed: seeded(lambda: UNet(16), seed), batch, loss_fn, heldout, 32, 1e-3,
        "UNet that finds noise in photographs, 8 x 32 x 32; scikit-learn's china and flower",
    )  # fmt: skip


class _TabularNet(torch.nn.Module):
    """Residual layers with BatchNorm over measurements (n, `inputs`); logits (n, 2)."""

    def __init__(self, inputs: int, width: int, num_layers: int) -> None:
        super().__init__()
        self.stem = torch.nn.Linear(inputs, width)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.BatchNorm1d(width), torch.nn.ReLU(), torch.nn.Linear(width, 2 * width),
                torch.nn.ReLU(), torch.nn.Linear(2 * width, width),
            )
            for _ in range(num_layers)
        )  # fmt: skip
        self.head = torch.nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


@cache
def _tumours() -> tuple[Batch, Batch]:
    """Return scikit-learn's breast cancer data, standardized, to train on and (every fifth row) held out."""
    from sklearn.datasets import load_breast_cancer

    found = load_breast_cancer()
    values, labels = torch.tensor(found.data).float(), torch.tensor(found.target)
    heldout = torch.arange(len(labels)) % 5 == 0
    values = (values - values[~heldout].mean(0)) / values[~heldout].std(0)
    return (values[~heldout], labels[~heldout]), (values[heldout], labels[heldout])


def _tabular_workload() -> Workload:
    """Return a small net that tells tumours apart by 30 measurements."""
    size = 64

    def batch(seed: int, step: int, rank: int) -> Batch:
        values, labels = _tumours()[0]
        rows = torch.from_numpy(np.random.default_rng((seed, step, rank)).choice(len(labels), size, False))
        return values[rows], labels[rows]

    def heldout(num: int) -> list[Batch]:
        values, labels = _tumours()[1]
        return list(zip(values.chunk(num), labels.chunk(num), strict=True))

    make = lambda seed: seeded(lambda: _TabularNet(30, 256, 3), seed)  # noqa: E731
    return Workload(
        "tabular", make, batch, F.cross_entropy, heldout, 32, 3e-4,
        f"residual net with BatchNorm, {size} rows of 30; scikit-learn's breast cancer",
    )  # fmt: skip


def _digits(name: str, make: Callable[[], torch.nn.Module], size: int) -> Workload:
    return digits_workload(name, make, size, f"{name}, {size} images of 16 x 16; scikit-learn's digits")


def _gpt(data: Path | None = None, text: str = "Python standard library") -> Workload:
    make = lambda: Gpt(num_layers=3, width=192, num_heads=3, context=_CONTEXT)  # noqa: E731
    return text_workload(
        "gpt",
        make,
        _ROWS,
        _CONTEXT,
        f"byte-level GPT, {_ROWS} x {_CONTEXT} tokens; text: {text}",
        data=data,
    )


# Small nets with BatchNorm are where uniform INT8 is expected to hurt.
TASKS: Mapping[str, Task] = {
    "gpt": Task(_gpt, 800),
    "token_kinds": Task(_token_kinds_workload, 600),
    "resnet": Task(lambda: _digits("resnet", lambda: ResNet(channels=(16, 32, 64)), 32), 600),
    "vgg": Task(lambda: _digits("vgg", lambda: Vgg(((32,), (64,), (128,), (128,)), 256), 32), 600),
    "vit": Task(lambda: _digits("vit", lambda: Vit(num_layers=3, width=128, num_heads=2), 16), 600),
    "denoising": Task(_denoising_workload, 500),
    "tabular": Task(_tabular_workload, 120),
    "friedman": Task(friedman_workload, 1500),
    "impedance": Task(impedance_workload, 1500),
    "gpt_headers": Task(
        lambda: replace(_gpt(_HEADERS, "torch's C++ headers"), lr=3e-4), 400, _gpt, 800, "gpt"
    ),
}
