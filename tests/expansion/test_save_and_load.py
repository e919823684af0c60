"""Grown models on disk: read back as they were, or not written at all."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model

import qsync
from qsync.errors import FormatError, MismatchError, UnsupportedError
from qsync.experiments.workloads.gpt import Gpt

ARGUMENTS = {"num_layers": 2, "width": 16, "num_heads": 2, "context": 8, "vocab": 11, "tied": True}
TOKENS = torch.arange(16).view(2, 8) % 11


def small(**changes):
    torch.manual_seed(0)
    model = Gpt(**{**ARGUMENTS, **changes}).double()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.1 * torch.randn_like(value))
    return model


def plan_of(model, **options):
    return qsync.plan_expansion(model, qsync.recipe_of(model).to(width=24, layers=3), **options)


def own_folder(folder: Path, model=None) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"class": "qsync.experiments.workloads.gpt:Gpt", "arguments": ARGUMENTS})
    )
    save_model(model or small(), str(folder / "model.safetensors"))
    return folder


def pretrained(folder: Path, kind: str = "gpt2"):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=16, n_head=2, n_layer=2, n_positions=16, **sizes)
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=16, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2,
            intermediate_size=32, tie_word_embeddings=True, **sizes,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    model = model.double()
    transformers.logging.disable_progress_bar()
    model.save_pretrained(folder)
    return model


def test_a_class_of_ones_own_comes_back_as_it_was(tmp_path):
    model = small()
    plan = plan_of(model)
    big = plan.expand(model)
    qsync.save_expanded(big, tmp_path / "big", plan, ARGUMENTS)
    again = qsync.load_expanded(tmp_path / "big")
    assert again.blocks[0].norm1.eps == big.blocks[0].norm1.eps != model.blocks[0].norm1.eps
    assert torch.equal(again(TOKENS), big(TOKENS))
    assert qsync.verify_expansion(model, again, TOKENS).passed


def test_weights_alone_are_another_model(tmp_path):
    """Without the eps of the norms, which no state dict holds."""
    model = small()
    big = plan_of(model).expand(model)
    bare = qsync.recipe_of(model).build(model, plan_of(model).sizes).double()
    bare.load_state_dict(big.state_dict())
    assert not qsync.verify_expansion(model, bare, TOKENS).passed


def test_a_model_grows_twice_through_folders(tmp_path):
    model = small()
    folder = own_folder(tmp_path / "a", model)
    for before, after, width in (("a", "b", 24), ("b", "c", 40)):
        source = qsync.load_expanded(tmp_path / before)
        plan = qsync.plan_expansion(source, qsync.recipe_of(source).to(width=width))
        qsync.save_expanded(plan.expand(source), tmp_path / after, plan, ARGUMENTS)
    assert folder.is_dir()
    assert qsync.verify_expansion(model, qsync.load_expanded(tmp_path / "c"), TOKENS).passed


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_hugging_face_models_come_back_with_their_eps(tmp_path, kind):
    model = pretrained(tmp_path / "small", kind)
    plan = plan_of(model)
    qsync.save_expanded(plan.expand(model), tmp_path / "big", plan)
    again = qsync.load_expanded(tmp_path / "big")
    assert qsync.verify_expansion(model, again, {"input_ids": TOKENS}).passed
    # One eps for all norms: their own library reads it from the config.
    plain = type(model).from_pretrained(tmp_path / "big", dtype="auto")
    assert qsync.verify_expansion(model, plain, {"input_ids": TOKENS}).passed


def test_a_constant_that_the_class_computes_from_sizes_comes_back_as_it_was(tmp_path):
    """Gemma's scale of embeddings is the root of the width, in a buffer that no state dict holds."""
    from transformers import GemmaConfig, GemmaForCausalLM

    fields = {"vocab_size": 64, "num_hidden_layers": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1,
              "eos_token_id": 2}  # fmt: skip

    def build(_, sizes):
        heads, kv_heads = sizes["heads"], sizes.get("kv_heads", sizes["heads"])
        return GemmaForCausalLM(GemmaConfig(
            **fields, hidden_size=sizes["width"], intermediate_size=sizes["mlp"],
            num_attention_heads=heads, num_key_value_heads=kv_heads,
        ))  # fmt: skip

    small = build(None, {"width": 32, "mlp": 64, "heads": 4, "kv_heads": 2}).eval()
    inputs = {"input_ids": torch.arange(3, 12)[None]}
    plan = qsync.plan_expansion(small, qsync.derive_recipe(small, inputs).recipe(build).to(width=48))
    qsync.save_expanded(plan.expand(small), tmp_path / "big", plan)
    assert qsync.verify_expansion(small, qsync.load_expanded(tmp_path / "big"), inputs).passed
    path = tmp_path / "big" / "expansion.json"
    path.write_text(path.read_text().replace("embed_scale", "no_scale"))
    with pytest.raises(FormatError, match="no_scale. is .* no such constant; grow the model again"):
        qsync.load_expanded(tmp_path / "big")


@pytest.fixture
def expand(command):
    return partial(command, "expand")


def test_the_command_grows_weights_average_and_optimizer(tmp_path, expand):
    model = pretrained(tmp_path / "small")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
    model.save_pretrained(tmp_path / "small")
    average = {name: 0.9 * value.detach() for name, value in model.named_parameters()}
    save_file(average, tmp_path / "small" / "ema.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "small" / "optimizer.pt")

    code, out, err = expand(
        tmp_path / "small", "--to", "width=24", "--to", "layers=3", "--out", tmp_path / "big", "--json"
    )
    assert code == 0, err
    told = json.loads(out)
    assert told["sizes"]["width"] == 24 and told["split"] == "scalar" and told["verified"]["passed"]

    big = qsync.load_expanded(tmp_path / "big")
    assert qsync.verify_expansion(model, big, {"input_ids": TOKENS}).passed
    new = torch.optim.AdamW(big.parameters(), lr=1e-3)
    new.load_state_dict(torch.load(tmp_path / "big" / "optimizer.pt", weights_only=True))
    fresh = [p for p in big.parameters() if p not in new.state]
    assert fresh and all(state["step"] == 2 for state in new.state.values())
    grown = load_file(tmp_path / "big" / "ema.safetensors")
    assert set(grown) == {name for name, _ in big.named_parameters()}
    for name, value in big.named_parameters():  # linear in the weights, but for what is drawn for the rest
        assert grown[name].shape == value.shape
    bias = "transformer.h.0.mlp.c_fc.bias"
    assert torch.allclose(grown[bias], 0.9 * big.get_parameter(bias).detach())


class Scaled(Gpt):
    """Embeddings times the root of the width, as some families have them: no table can say that."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weight = self.positions.weight
        positions = weight[: tokens.shape[1]] * weight.shape[1] ** 0.5
        x = self.tokens(tokens) + positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    recipe = replace(
        Gpt.recipe, build=lambda small, sizes: Scaled(2, sizes["width"], sizes["heads"], 8, 11, tied=True)
    )


def test_what_is_not_lossless_is_not_written(tmp_path, expand):
    folder = own_folder(tmp_path / "small")
    change(folder / "config.json", **{"class": f"{__name__}:Scaled"})
    save_file({"tokens": TOKENS}, tmp_path / "inputs.safetensors")
    inputs = ("--inputs", tmp_path / "inputs.safetensors")
    code, _, err = expand(folder, "--to", "width=24", "--out", tmp_path / "big", *inputs)
    assert code == 2 and "NOT the same function" in err and "nothing was written" in err
    assert not (tmp_path / "big").exists()


def test_a_plan_alone_writes_nothing(tmp_path, expand):
    own_folder(tmp_path / "small")
    code, out, err = expand(tmp_path / "small", "--to", "width=24")
    assert code == 0, err
    assert "stream 16 copied to 16 + 8 average" in out and "nothing written" in out
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_the_command_verifies_on_inputs_of_ones_own(tmp_path, expand):
    own_folder(tmp_path / "small")
    save_file({"tokens": TOKENS}, tmp_path / "inputs.safetensors")
    inputs = ("--inputs", tmp_path / "inputs.safetensors")
    code, out, err = expand(tmp_path / "small", "--to", "width=24", "--out", tmp_path / "big", *inputs)
    assert code == 0, err
    assert "verified: the same function" in out
    code, out, err = expand(tmp_path / "small", "--to", "width=24", "--out", tmp_path / "other")
    assert code == 0 and "not verified" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the target size is missing; give it with --to"),
        (["--to", "width=8"], "width would shrink from 16 to 8"),
        (["--to", "wide=32"], "no size 'wide'; choose from"),
        (["--to", "width=big"], "takes a whole number"),
        (["--to", "width=28"], "not a multiple of the head width 8"),
        (["--to", "width=32", "--split", "odd"], "unknown split 'odd': choose from random, scalar, even"),
        (["--to", "layers=5"], "to at most 4 blocks, found 5; grow in two steps"),
        (["--to", "width=32", "--inputs", "none.safetensors"], "none.safetensors does not exist"),
    ],
)
def test_bad_options_are_one_sentence_and_nothing_is_written(tmp_path, expand, arguments, message):
    own_folder(tmp_path / "small")
    code, _, err = expand(tmp_path / "small", *arguments, "--out", tmp_path / "big")
    assert code == 2 and message in err and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_nothing_is_written_over(tmp_path):
    model = small()
    plan = plan_of(model)
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "notes.txt").write_text("mine")
    with pytest.raises(FormatError, match="already exists and is never overwritten"):
        qsync.save_expanded(plan.expand(model), tmp_path / "big", plan, ARGUMENTS)
    assert (tmp_path / "big" / "notes.txt").read_text() == "mine"


class Bare(torch.nn.Module):
    """A class without a recipe."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inp, self.out = torch.nn.Linear(4, width), torch.nn.Linear(width, 3)


BARE = qsync.Recipe(
    "bare", "inp _ -> hidden\nout hidden -> _", build=lambda small, sizes: type(small)(sizes["hidden"])
)


def test_a_model_that_could_not_be_loaded_is_not_saved(tmp_path):
    class Local(Bare):
        recipe = BARE

    gpt = small()
    others = {
        "needs a recipe to build a Bare": (Bare(), BARE.to(hidden=24), {}),
        "could not import the class": (Local(), BARE.to(hidden=24), {}),
        "Gpt does not accept these arguments .*'wide'": (gpt, Gpt.recipe.to(width=24), {"wide": 3}),
    }
    for said, (model, recipe, arguments) in others.items():
        plan = qsync.plan_expansion(model, recipe)
        with pytest.raises((FormatError, UnsupportedError), match=said):
            qsync.save_expanded(plan.expand(model), tmp_path / "big", plan, arguments)
    plan = plan_of(gpt)
    with pytest.raises(MismatchError, match="the grown model has .*; give what plan.expand"):
        qsync.save_expanded(gpt, tmp_path / "big", plan, ARGUMENTS)
    with pytest.raises(FormatError, match="plan is a NoneType"):
        qsync.save_expanded(gpt, tmp_path / "big", None, ARGUMENTS)
    assert not any(tmp_path.iterdir())
    with pytest.raises(FormatError, match="folder is a NoneType"):
        qsync.load_expanded(None)


def test_a_process_killed_while_it_writes_leaves_no_folder(tmp_path):
    own_folder(tmp_path / "small")
    code = f"""
import os, signal, qsync
from qsync.expansion.io import save
save.save_model = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
model = qsync.load_expanded({str(tmp_path / "small")!r})
plan = qsync.plan_expansion(model, qsync.recipe_of(model).to(width=24))
save.save_expanded(plan.expand(model), {str(tmp_path / "big")!r}, plan, {ARGUMENTS})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=240)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "big").exists()


def change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_weights_that_do_not_match_their_config(tmp_path):
    folder = own_folder(tmp_path / "small")
    change(folder / "config.json", arguments={**ARGUMENTS, "width": 24})
    with pytest.raises(
        MismatchError, match=r"has .* of shape .*, but config.json expects .*; give the config"
    ):
        qsync.load_expanded(folder)
    change(folder / "config.json", arguments={**ARGUMENTS, "num_layers": 3})
    with pytest.raises(MismatchError, match="lacks blocks.2"):
        qsync.load_expanded(folder)
    pretrained(tmp_path / "gpt2")
    change(tmp_path / "gpt2" / "config.json", n_embd=24)
    with pytest.raises(MismatchError, match="do not match its config.json"):
        qsync.load_expanded(tmp_path / "gpt2")


def test_folders_that_hold_no_model(tmp_path):
    folder = own_folder(tmp_path / "small")
    with pytest.raises(FormatError, match="cannot read"):
        qsync.load_expanded(tmp_path / "none")
    for config, message in (
        ({"class": "qsync.experiments.workloads.gpt:Nothing"}, "cannot be imported"),
        ({"class": "nowhere:Gpt"}, "cannot be imported"),
        (
            {"class": "qsync.experiments.workloads.gpt:Gpt", "arguments": {"wide": 3}},
            "does not accept these arguments",
        ),
        ({"name": "a model"}, "does not name a model"),
        ({"model_type": "gpt2", "architectures": ["NoSuchModel"]}, "names no class of transformers"),
    ):
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(FormatError, match=message):
            qsync.load_expanded(folder)
    (folder / "config.json").write_text(
        json.dumps({"class": "qsync.experiments.workloads.gpt:Gpt", "arguments": ARGUMENTS})
    )
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(FormatError, match="not a safetensors file"):
        qsync.load_expanded(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FormatError, match="model.safetensors is missing; save the weights"):
        qsync.load_expanded(folder)


def test_quantized_weights_are_refused(tmp_path):
    pretrained(tmp_path / "gpt2")
    change(tmp_path / "gpt2" / "config.json", quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(UnsupportedError, match="quantized by bitsandbytes; grow the model in floating point"):
        qsync.load_expanded(tmp_path / "gpt2")
    folder = own_folder(tmp_path / "own")
    weights = {name: value.to(torch.int8) for name, value in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(UnsupportedError, match="quantized"):
        qsync.load_expanded(folder)


def test_an_average_of_another_model_is_refused(tmp_path, expand):
    folder = own_folder(tmp_path / "small")
    save_file({"tokens.weight": torch.zeros(11, 16)}, folder / "ema.safetensors")
    code, _, err = expand(folder, "--to", "width=24", "--out", tmp_path / "big")
    assert code == 2 and "ema.safetensors lacks" in err
    assert not (tmp_path / "big").exists()


def test_code_of_a_folder_is_never_run(tmp_path):
    pretrained(tmp_path / "gpt2")
    (tmp_path / "gpt2" / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    change(tmp_path / "gpt2" / "config.json", auto_map={"AutoModelForCausalLM": "mine.Mine"})
    assert type(qsync.load_expanded(tmp_path / "gpt2")).__name__ == "GPT2LMHeadModel"
    change(tmp_path / "gpt2" / "config.json", architectures=["Mine"])
    with pytest.raises(FormatError, match="names no class of transformers in `architectures`"):
        qsync.load_expanded(tmp_path / "gpt2")
    assert not (tmp_path / "ran").exists()


def test_shards_are_read_and_a_missing_or_cut_one_is_named(tmp_path):
    model = pretrained(tmp_path / "gpt2")
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert qsync.load_expanded(tmp_path / "shards").config.n_embd == 16
    last = sorted((tmp_path / "shards").glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:50])
    with pytest.raises(FormatError, match="cannot be read as a GPT2LMHeadModel: .*; save it again"):
        qsync.load_expanded(tmp_path / "shards")
    last.unlink()
    with pytest.raises(
        FormatError, match=f"cannot be read as a GPT2LMHeadModel: .*{last.name}; save it again"
    ):
        qsync.load_expanded(tmp_path / "shards")


def test_adapters_in_a_folder_are_refused(tmp_path):
    pretrained(tmp_path / "gpt2")
    (tmp_path / "gpt2" / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="adapters of peft, which do not grow; merge them"):
        qsync.load_expanded(tmp_path / "gpt2")


def test_the_command_grows_fields_of_a_config_twice_and_says_what_that_costs(tmp_path, expand):
    model = pretrained(tmp_path / "small").float()  # operators in FP64 are not lowered, nor counted
    model.save_pretrained(tmp_path / "small")
    change = "n_embd=1.5x,n_head=1.5x,n_layer=+1"
    code, out, err = expand(tmp_path / "small", "--to", change, "--out", tmp_path / "big", "--json")
    assert code == 0, err
    told = json.loads(out)
    before, after = (
        sum(p.numel() for p in one.parameters()) for one in (model, qsync.load_expanded(tmp_path / "big"))
    )
    assert told["forecast"]["parameters"] == f"{before:,} -> {after:,} ({after / before:.2f} x)"
    assert "57% of the steps" in told["forecast"]["training"] and "(3." in next(
        value for name, value in told["forecast"].items() if name.startswith("FLOPs")
    )
    code, _, err = expand(tmp_path / "big", "--to", "n_embd=2x,n_head=2x", "--out", tmp_path / "twice")
    assert code == 0, err
    twice = qsync.load_expanded(tmp_path / "twice")
    assert twice.config.n_embd == 48 and twice.config.n_layer == 3
    assert qsync.verify_expansion(model, twice, {"input_ids": TOKENS}).passed
