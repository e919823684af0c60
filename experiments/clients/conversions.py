"""Conversions of each client to qsync: the changed lines and nothing else."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qsync.errors import QSyncError

MOST_LINES = 5  # limit of changed lines per conversion
_OPTIONS = "OPTIONS"  # placeholder for the keyword arguments of qsync.hybrid


@dataclass(frozen=True, slots=True)
class Client:
    """A training script, its changed lines, and the path of its checkpoint."""

    name: str
    checkpoint: str
    changes: tuple[tuple[str, str], ...]  # a text that occurs once in the script, and its replacement

    def plain(self) -> str:
        """Return the script without qsync."""
        return Path(__file__).with_name(f"{self.name}.py").read_text(encoding="utf-8")

    def converted(self, options: Mapping[str, Any] | None = None) -> str:
        """Return the script with qsync. Raises QSyncError for a change that does not apply."""
        text = self.plain()
        for before, after in self.changes:
            if text.count(before) != 1:
                raise QSyncError(
                    f"{self.name}.py contains {before!r} {text.count(before)} times instead of "
                    "once; correct its change in CLIENTS"
                )
            text = text.replace(before, after)
        return text.replace(_OPTIONS, repr(dict(options or {})))

    def lines_changed(self) -> int:
        """Return the number of lines replaced, added or removed."""
        texts = self.plain().splitlines(), self.converted().splitlines()
        blocks = difflib.SequenceMatcher(None, *texts, autojunk=False).get_opcodes()
        return sum(max(a1 - a0, b1 - b0) for tag, a0, a1, b0, b1 in blocks if tag != "equal")


_IMPORT = ("from torch import nn\n", "from torch import nn\nimport qsync\n")
CLIENTS = {
    client.name: client
    for client in (
        Client(
            "nanogpt", "ckpt.pt",
            (_IMPORT, ("DDP(model)", "qsync.hybrid(model, (X, Y), lambda m, xy: m(*xy)[1], **OPTIONS)")),
        ),
        Client(
            "imagenet", "checkpoint.pth.tar",
            (
                _IMPORT,
                ("    model = DistributedDataParallel(make_model())\n    criterion = nn.CrossEntropyLoss()\n",
                 "    criterion = nn.CrossEntropyLoss()\n"
                 "    batch = torch.utils.data.default_collate("
                 "[train_set[i] for i in range(args.batch_size)])\n"
                 "    model = qsync.hybrid(\n"
                 "        make_model(), batch, lambda m, xy: criterion(m(xy[0]), xy[1]), **OPTIONS)\n"),
            ),
        ),
        Client(
            "dcgan", "net.pth",
            (
                _IMPORT,
                ("    netG, netD = DDP(netG), DDP(netD)\n",
                 "    pair = (images[: args.batch_size], real_labels)\n"
                 "    netD = qsync.hybrid(netD, pair, lambda m, xy: criterion(m(xy[0]), xy[1]), **OPTIONS)\n"
                 "    netG = qsync.hybrid(\n"
                 "        netG, fixed_noise, lambda m, z: criterion(netD(m(z)), real_labels), **OPTIONS)\n"),
            ),
        ),
        Client(
            "diffusion", "0000020.pt",
            (
                _IMPORT,
                ("DDP(make_model())",
                 "qsync.hybrid(\n"
                 "        make_model(), (images[: args.batch_size], torch.arange(args.batch_size)),\n"
                 "        lambda m, xt: F.mse_loss(m(*xt), xt[0]), **OPTIONS)"),
            ),
        ),
        Client(
            "siamese", "siamese_network.pt",
            (
                _IMPORT,
                ("DDP(make_model())",
                 "qsync.hybrid(\n"
                 "        make_model(), pairs(*torch.arange(2 * args.batch_size).view(2, -1)), pair_loss,\n"
                 "        **OPTIONS)"),
            ),
        ),
        Client(
            "lstm_lm", "model.pt",
            (
                _IMPORT,
                ("DDP(model)",
                 "qsync.hybrid(\n"
                 "        model, (*get_batch(0), hidden), lambda m, b: criterion(m(b[0], b[2])[0], b[1]),\n"
                 "        **OPTIONS)"),
            ),
        ),
        Client(
            "hf_finetune", "final/model.safetensors",
            (
                ("from torch import nn\n",
                 "from torch import nn\nfrom qsync.integrations.transformers import QSyncTrainer\n"),
                ("Trainer(model=model", "QSyncTrainer(hybrid_options=OPTIONS, model=model"),
            ),
        ),
        Client(
            "accelerate_loop", "model.bin",
            (
                _IMPORT,
                ("    model = make_model()\n",
                 "    batch = tuple(part[: args.batch_size] for part in dataset.tensors)\n"
                 "    model = qsync.hybrid(\n"
                 "        make_model(), batch, lambda m, b: F.cross_entropy(m(b[0]), b[1]), **OPTIONS)\n"),
            ),
        ),
        Client(
            "lightning_fit", "last.ckpt",
            (
                ("from torch import nn\n",
                 "from torch import nn\nfrom qsync.integrations.lightning import QSyncStrategy\n"),
                ('strategy="ddp"', "strategy=QSyncStrategy(hybrid_options=OPTIONS)"),
            ),
        ),
        Client(
            "fsdp2_loop", "model_state_dict.pt",
            (
                _IMPORT,
                ("    model = make_model()\n",
                 "    model = qsync.hybrid(\n"
                 "        make_model(), torch.zeros(args.batch_size, 64, dtype=torch.long),\n"
                 "        lambda m, t: F.cross_entropy(m(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten()),\n"
                 "        ddp=False, **OPTIONS)\n"),
            ),
        ),
    )
}  # fmt: skip
