"""Plans of sharded models: every block runs its own part, also where blocks are alike."""

from __future__ import annotations

import pytest
from two_ranks import launch, said

import qsync
from qsync.runtime.sharded_blocks import Block

BODY = """
import copy
from torch.distributed.fsdp import fully_shard
from qsync.records.plans import ClassPlan, Plan
from qsync.runtime import planned_forward

dist.init_process_group("gloo")

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.up, self.down = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)
    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(8, 16)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.head = torch.nn.Linear(16, 4)
    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def sharded(model):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)

def filled(model):
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model

def modes(model):
    ran = {}
    for name, module in model.named_modules():
        if module in planned_forward.programs:
            for lowered in planned_forward.programs[module].lowered:
                adjustable = {op.name for op in lowered.graph.adjustable}
                for node in lowered.nodes:
                    if hasattr(node, "mode") and node.op in adjustable:
                        ran[f"{name}.{node.op}".strip(".").removesuffix(".linear")] = node.mode
    return ran

torch.manual_seed(0)
model = Model()
x = torch.randn(32, 8, generator=torch.Generator().manual_seed(rank))
graph = qsync.capture(model, x)
wanted = {op.name: "fp32" for op in graph.adjustable} | {
    "blocks.0.up": "int8", "blocks.1.down": "bf16", "blocks.2.up": "bf16", "head": "int8"
}
assignment = {op: qsync.Precision(p) for op, p in wanted.items()}
plan = Plan(graph.model, graph.hash, {"here": ClassPlan(assignment)})
plain = copy.deepcopy(model)
qsync.hybrid(model, plan=plan, device_class="here", ddp=False)
sharded(model)(x).square().mean().backward()
ran = modes(model)
say(f"ran: {ran == wanted} {ran}")
ran_in_fp32 = plain(x).square().mean()
ran_in_fp32.backward()
for p in plain.parameters():
    dist.all_reduce(p.grad)
    p.grad /= 2
own = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
exact = torch.cat([p.grad.flatten() for p in plain.parameters()])
off = float((own - exact).norm() / exact.norm())
say(f"gradients: {0 < off < 0.1} {off}")

other = Model()
qsync.hybrid(other, plan=plan, device_class="here", ddp=False)
other.extra = torch.nn.Linear(4, 4)
forward = Model.forward
Model.forward = lambda self, x: self.extra(forward(self, x)) if hasattr(self, "extra") else forward(self, x)
try:
    sharded(other)(x)
    say("other: went through")
except QSyncError as error:
    say(f"other: {error}")
Model.forward = forward

def on_meta():
    with torch.device("meta"):
        return Model()

try:
    qsync.hybrid(on_meta(), plan=plan, device_class="here", ddp=False)
except QSyncError as error:
    say(f"on meta: {error}")
first = qsync.hybrid(filled(on_meta()), plan=plan, device_class="here", ddp=False)
later = filled(sharded(on_meta()))
qsync.wrap(later, plan, device_class="here")
for what, one in (("filled first", sharded(first)), ("sharded first", later)):
    one(x).square().mean().backward()
    say(f"{what}: {modes(one) == wanted} {modes(one)}")
dist.destroy_process_group()
"""


@pytest.mark.dist
def test_every_block_runs_its_part_of_the_plan(tmp_path):
    output = launch(tmp_path, BODY)
    assert all(text.startswith("True") for text in said(output, "ran")), said(output, "ran")
    assert all(text.startswith("True") for text in said(output, "gradients"))
    for text in said(output, "other"):
        assert "the plan lacks extra.linear of the sharded Linear" in text
    for text in said(output, "on meta"):  # the orders that frameworks.md gives
        assert "the model is on the meta device, without weights: call model.to_empty(device=...)" in text
    for what in ("filled first", "sharded first"):
        assert all(text.startswith("True") for text in said(output, what)), said(output, what)


ALONE = """
model = qsync.hybrid(make(), batch(), loss_fn, cache_dir=cache)
train(model)
say(f"ddp: {isinstance(model, torch.nn.parallel.DistributedDataParallel)} {dist.get_world_size()}")
"""


@pytest.mark.dist
def test_one_process_under_torchrun_gets_a_ddp_of_one_rank(tmp_path):
    output = launch(tmp_path, ALONE, ranks=1)
    assert "[0] ddp: True 1" in output


def test_an_operator_of_the_sharded_module_itself_has_the_name_that_it_has_in_the_model():
    names = ("layers.0.attention", "layers.0.attention#2", "layers.0.attention.out", "layers.0.up")
    assignment = dict.fromkeys(names, qsync.Precision.BF16)
    block = Block("layers.0.attention", assignment)
    found = [block.name_in_plan(own) for own in ("attention", "attention#2", "out", "matmul")]
    assert found == [*names[:3], None]
    assert Block("layers.0.up", assignment).name_in_plan("linear") == "layers.0.up"
