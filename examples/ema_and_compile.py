"""A wrapped model stays wrapped: its moving average, a deep copy, a file and torch.compile run in INT8 too.

python examples/ema_and_compile.py
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import qsync


def main() -> None:
    """Train in INT8, and compare what every form of the model returns with plain FP32."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
    plain, x = copy.deepcopy(model), torch.randn(512, 32)
    target = torch.sin(x @ torch.randn(32, 8))

    qsync.wrap(model, "int8", strict=True)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(50):
        optimizer.zero_grad()
        mse_loss(model(x), target).backward()
        optimizer.step()
        average.update_parameters(model)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        torch.save(model, path)
        loaded = torch.load(path, weights_only=False)  # a whole model is a pickle: load your own alone
    forms = {
        "the model": model,
        "its moving average": average.module,
        "a deep copy": copy.deepcopy(model),
        "loaded from a file": loaded,
        "in torch.compile": torch.compile(model, backend="aot_eager"),
    }
    for name, form in forms.items():
        with torch.no_grad():
            found = form(x)
            plain.load_state_dict({k.removeprefix("_orig_mod."): v for k, v in form.state_dict().items()})
            difference = (found - plain(x)).norm() / found.norm()
        print(f"{name}: loss {mse_loss(found, target):.4f}, {difference:.2%} from FP32 with the same weights")
    qsync.unwrap(model)
    with torch.no_grad():
        plain.load_state_dict(model.state_dict())
        print(f"unwrapped: {(model(x) - plain(x)).norm():.0f} from FP32")


if __name__ == "__main__":
    main()
