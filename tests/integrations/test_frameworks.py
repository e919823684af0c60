"""Training loops of other libraries on two ranks: cases keep their verdicts, and refusals their sentences."""

from __future__ import annotations

import pytest

from qsync.experiments.harness.ranks import run_on_ranks
from qsync.experiments.integrations import run_cases

# Every case trains several times: five minutes are not enough beside other work.
pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1200)]

# Cases that run here, by module; None: it works, else part of the sentence that its user reads. The page of
# results has all of them.
CASES = {
    "loop_cases": {
        "three calls of the model in one loss": None,
        "a GAN: two hybrids, two optimizers": None,
        "distillation: a hybrid teacher without gradients, a hybrid student": None,
        "state dicts of model and optimizer into the plain model, and back": None,
        "safetensors: saved planned, loaded plain": None,
        "`qsync.hybrid(model, ddp=False)`, then one's own DDP": None,
        "`qsync.hybrid(model, ddp=False)`, and no DDP at all": "averaged only if the loop does that",
    },
    "accelerate_cases": {
        "`gradient_accumulation_steps=2`, `accelerator.accumulate`": None,
        "`save_state`, `load_state`": None,
        "`qsync.hybrid(model, ddp=False)`: Accelerate wraps it": None,
        '`mixed_precision="bf16"` before the hybrid: the base': None,
        '`mixed_precision="bf16"` around a hybrid of another base': 'give base="bf16" to qsync.hybrid',
        "a plan with shares and as many passes as `gradient_accumulation_steps`": None,
        "`qsync.token_mean` in Accelerate's own DDP, accumulation 2": None,
        "`accelerator.prepare` of a LengthSampler's loader": "leave its loader out of accelerator.prepare",
        "a plan with shares and other passes than `gradient_accumulation_steps`": "give Accelerator(",
    },
    "trainer_cases": {
        "`gradient_accumulation_steps=2`, losses by tokens": None,
        "`evaluate()`, `predict()`, `eval_on_start`": None,
        "resumed under another plan": None,
        "`torch_compile=True`": "not in torch_compile (qsync traces the model itself)",
        "levers": "plan without levers",
        "a dataset that can be read once": "can be read only once",
        "an option that the Trainer states": "the Trainer states base itself",
        "other accumulation on the ranks": "gradient_accumulation_steps differs between ranks",
    },
    "lightning_cases": {
        "`self.net(x)` in training_step": None,
        "a part in evaluation mode": None,
        "validation before and during training, `test`, `predict`": None,
        "saved and resumed: bitwise the uninterrupted run": None,
        "resumed under another plan": None,
        "manual optimization without it": "training_step returns no loss to profile",
        "two networks in training_step": "calls net and other; call one network",
        "DDPStrategy around a LightningModule that holds a hybrid": "by the world size again",
        "other accumulation on the ranks": "accumulate_grad_batches differs between ranks",
        "a misspelt DDP option of the strategy": "did you mean find_unused_parameters?",
    },
    "sharding_cases": {
        "`qsync.hybrid(model, ddp=False)`, then `fully_shard` on blocks and model": None,
        "`fully_shard(hybrid)`, which is in DDP": "sharded after qsync.hybrid",
        "`fully_shard` before `qsync.hybrid`": "call qsync.hybrid(model, ..., ddp=False) first",
        "sharded and planned, saved, loaded into a plain model that was never sharded": None,
        "a plain model in DDP saved, loaded into a hybrid, optimizer included": None,
        "`get_peft_model`, then `qsync.hybrid`": None,
        "`get_peft_model` after `qsync.hybrid`": "does not average body.0.lora_A.default.weight",
        "a layer that exchanges its sequence inside": None,
    },
}  # fmt: skip
LOGGED = {"resumed under another plan": "under another plan"}


@pytest.mark.parametrize("module", run_cases.MODULES)
def test_cases_keep_their_verdicts(module, tmp_path):
    config = {"module": module, "only": list(CASES[module]), "folder": str(tmp_path), "weak_share": 1.0}
    found = {row["name"]: row for row in run_on_ranks(run_cases.run, config, command="integrations")}
    assert found.keys() == CASES[module].keys()
    for name, sentence in CASES[module].items():
        row = found[name]
        if sentence is None:
            assert row["verdict"] == "works" and row["norm_error"] <= row["tolerance"], row
            assert LOGGED.get(name, "") in row["sentence"]
        else:
            assert row["verdict"] == ("warns" if "averaged only" in sentence else "refused"), row
            assert sentence in row["sentence"] and "\n" not in row["sentence"], row
