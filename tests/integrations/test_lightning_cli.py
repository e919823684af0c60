"""QSyncStrategy as Lightning's own command line and registry make it."""

from __future__ import annotations

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from qsync.distributed.data_parallel import _DDP_ARGUMENTS, check_ddp_options, settled_options
from qsync.errors import FormatError
from qsync.integrations.lightning import QSyncStrategy

# Lightning 2.6 asks torch's trees for their leaves as torch no longer does.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning")

BY_CLASS = "--trainer.strategy.class_path=qsync.integrations.lightning.QSyncStrategy"


@pytest.mark.parametrize(
    ("given", "stated"),
    [
        (["--trainer.strategy=qsync"], {}),
        ([BY_CLASS], {}),
        ([BY_CLASS, "--trainer.strategy.find_unused_parameters=true"], {"find_unused_parameters": True}),
    ],
)
def test_lightning_cli_takes_the_strategy_by_name_and_by_class(monkeypatch, given, stated):
    pytest.importorskip("jsonargparse", "4.39")
    from lightning.pytorch.cli import LightningCLI

    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of what Lightning 2.6 calls
    own = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]
    monkeypatch.setattr("sys.argv", ["train.py", *own, *given])
    made = LightningCLI(BoringModel, run=False, save_config_callback=None, seed_everything_default=False)
    assert type(made.trainer.strategy) is QSyncStrategy
    assert made.trainer.strategy._ddp_kwargs == stated


def test_a_trainer_finds_the_strategy_by_its_name_and_ddp_stays_lightning_s():
    made = Trainer(accelerator="cpu", devices=1, logger=False, strategy="qsync")
    assert type(made.strategy) is QSyncStrategy
    assert StrategyRegistry["ddp"]["strategy"] is DDPStrategy


def test_every_default_of_ddp_is_accepted_and_what_differs_is_refused():
    defaults = {n: p.default for n, p in _DDP_ARGUMENTS.items() if p.default is not p.empty}
    assert {"output_device", "dim", "mixed_precision"} <= defaults.keys()
    check_ddp_options(defaults)
    assert settled_options(defaults, by_qsync=True) == {"gradient_as_bucket_view": False}  # it was stated
    assert settled_options({}, by_qsync=True) == {"gradient_as_bucket_view": True}
    assert settled_options({}, by_qsync=False) == {"gradient_as_bucket_view": False}  # a framework's own
    with pytest.raises(FormatError, match="does not accept output_device: a rank trains where"):
        check_ddp_options({**defaults, "output_device": 0})
    with pytest.raises(FormatError, match="static_graph must be True or False, found 0"):
        check_ddp_options({"static_graph": 0})
