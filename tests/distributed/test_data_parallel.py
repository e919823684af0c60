"""DDP as users know it, around a planned model: its options, its contexts, its pickles; and averaged once."""

from __future__ import annotations

import inspect

import pytest
from torch.nn.parallel import DistributedDataParallel
from two_ranks import launch, said

from qsync.distributed.data_parallel import _WHY_NOT, DDP_OPTIONS

pytestmark = pytest.mark.dist

START = """
import copy, io
from pathlib import Path
from qsync.records.profiles import Profile
from torch.nn.parallel import DistributedDataParallel as DDP
from qsync.errors import FormatError
from qsync.runtime.planned_forward import program_of

dist.init_process_group("gloo")
options = {"loss_fn": loss_fn, "cache_dir": cache}

def norm(model):
    return float(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm())

def same(model):
    mine = parameters(model)
    theirs = mine.clone()
    dist.broadcast(theirs, 0)
    return torch.equal(mine, theirs)

def refused(what, do):
    try:
        do()
        say(f"{what}: went through")
    except QSyncError as error:
        say(f"{what}: {type(error).__name__}: {error}")
"""

ONCE = """
expected = DDP(make(), gradient_as_bucket_view=True)
loss_fn(expected, batch(seed=rank)).backward()
model = qsync.hybrid(make(), batch(), **options)
loss_fn(model, batch(seed=rank)).backward()
say(f"norm: {abs(norm(model) / norm(expected) - 1) < 1e-6}")

refused("ddp", lambda: DDP(model))
refused("again", lambda: qsync.hybrid(model, batch(), **options))
refused("inside again", lambda: qsync.hybrid(model.module, batch(), **options))

class Around(torch.nn.Module):  # as a LightningModule holds its net
    def __init__(self, net):
        super().__init__()
        self.net, self.scale = net, torch.nn.Parameter(torch.ones(()))
    def forward(self, x):
        return self.net(x) * self.scale

refused("held", lambda: qsync.hybrid(Around(model), batch(), **options))
refused("inside", lambda: DDP(Around(model))(batch()[0]))
refused("compiled", lambda: torch.compile(DDP(Around(model)))(batch()[0]))

def last(model):
    names = list(vars(model))  # a group that dies with the reducer may wait for ever (torch 2.13)
    return names.index("process_group") > names.index("reducer")

copied = copy.deepcopy(model)
buffer = io.BytesIO()
torch.save(model, buffer)
buffer.seek(0)
loaded = torch.load(buffer, weights_only=False)
for what, other in (("copied", copied), ("loaded", loaded), ("compiled hybrid", torch.compile(model))):
    other.zero_grad()
    loss_fn(other, batch(seed=rank)).backward()
    say(f"{what}: {abs(norm(other) / norm(expected) - 1) < 1e-6} {isinstance(other, DDP)}")
say(f"group last: {all(map(last, (model, copied, loaded)))}")

for parameter in copied.module.inner.parameters():
    parameter.requires_grad_(False)
frozen = qsync.hybrid(qsync.unwrap(copied), batch(), **options)
loss_fn(frozen, batch(seed=rank)).backward()
for parameter in frozen.parameters():
    parameter.requires_grad_(True)
refused("unfrozen", lambda: frozen(batch()[0]))

def grown(model):
    model.module.head = torch.nn.Sequential(model.module.head, torch.nn.Linear(4, 4))

for what, change in (("grown", grown), ("converted", lambda model: model.bfloat16())):
    changed = qsync.hybrid(make(), batch(), **options)
    loss_fn(changed, batch(seed=rank)).backward()
    change(changed)
    refused(what, lambda: changed(batch()[0]))

class Sliced(Net):  # as Hugging Face's decoders run their first layers
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(2))
    def forward(self, x):
        x = self.inner(x)
        for layer in self.layers[:2]:
            x = layer(x)
        return self.head(F.gelu(x))

sliced = qsync.hybrid(Sliced(), batch(), **options)
for _ in range(4):
    loss_fn(sliced, batch(seed=rank)).backward()
say(f"traced at most once: {len(program_of(sliced.module)._entries) <= 1}")
dist.destroy_process_group()
"""


def test_gradients_are_averaged_once_whoever_wraps_the_model_again(tmp_path):
    output = launch(tmp_path, START + ONCE)
    assert said(output, "norm") == ["True"] * 2
    assert said(output, "group last") == ["True"] * 2
    for what in ("copied", "loaded"):
        assert said(output, what) == ["True True"] * 2
    assert said(output, "compiled hybrid") == ["True False"] * 2  # of torch.compile's own class
    for what in ("ddp", "inside", "compiled"):
        assert all("would divide its gradients by the world size again" in t for t in said(output, what))
    for what, named in (("again", "the model is"), ("inside again", "the model is"), ("held", "its net is")):
        for text in said(output, what):
            assert (
                text.startswith("UnsupportedError") and f"{named} already in DistributedDataParallel" in text
            )
    for text in said(output, "unfrozen"):
        assert text.startswith("MismatchError") and "does not average inner.0.weight (and 3 more)" in text
    for text in said(output, "grown"):  # though its first call has gone through
        assert text.startswith("MismatchError") and "does not average head.1.weight (and 1 more)" in text
    assert said(output, "traced at most once") == ["True"] * 2
    for text in said(output, "converted"):
        assert text.startswith("MismatchError") and "inner.0.weight was converted to torch.bfloat16" in text


OPTIONS = """
from torch.distributed.algorithms.join import Join

class Unused(Net):
    def __init__(self):
        super().__init__()
        self.spare = torch.nn.Linear(4, 4)

torch.manual_seed(0)
unused = qsync.hybrid(Unused(), batch(), ddp_options={"find_unused_parameters": True}, **options)
train(unused)
say(f"unused: {same(unused)} {unused.module.spare.weight.grad is None}")

copies = {"static_graph": True, "gradient_as_bucket_view": False}
apart = os.path.join(cache, "copies")
qsync.hybrid(make(), batch(), **{**options, "cache_dir": apart})
static = qsync.hybrid(make(), batch(), ddp_options=copies, **{**options, "cache_dir": apart})
train(static)
say(f"static: {same(static)} {static.static_graph} {static.gradient_as_bucket_view}")
weights = [p.nbytes for p in static.parameters()]
kept = 3 * sum(weights) + 4 * len(weights)  # AdamW's two moments and its counters, and DDP's buckets
profiles = map(Profile.load, Path(apart).rglob("profile-*"))
say(f"buckets: { {profile.optimizer_bytes for profile in profiles} == {kept, kept - sum(weights)} }")

group = dist.new_group()
grouped = qsync.hybrid(make(), batch(), ddp_options={"process_group": group, "bucket_cap_mb": 1}, **options)
train(grouped)
say(f"group: {same(grouped)} {grouped.process_group is group} {grouped.bucket_bytes_cap}")

whole = DDP(make())
for k in range(2):
    with whole.no_sync() if k == 0 else __import__("contextlib").nullcontext():
        loss_fn(whole, batch(seed=k + rank)).backward()
options["bitwise"] = True  # as DDP
model = qsync.hybrid(make(), batch(), **options)
names = [[list(m.state_dict()), [name for name, _ in m.named_parameters()]] for m in (model, whole)]
say(f"names: {names[0] == names[1]}")
with model.no_sync():
    loss_fn(model, batch(seed=rank)).backward()
loss_fn(model, batch(seed=1 + rank)).backward()
say(f"no_sync: {abs(norm(model) / norm(whole) - 1) < 1e-6}")

def uneven(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for k in range(2 + 2 * rank):
            optimizer.zero_grad()
            loss_fn(model, batch(seed=k + rank)).backward()
            optimizer.step()
    return parameters(model)

say(f"join: {torch.equal(uneven(DDP(make())), uneven(qsync.hybrid(make(), batch(), **options)))}")

class Normed(Net):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.SyncBatchNorm(64)
    def forward(self, x):
        return self.head(F.gelu(self.norm(self.inner(x))))

refused("sync batch norm", lambda: qsync.hybrid(Normed(), batch(), **options))  # torch has none on CPUs
dist.destroy_process_group()
"""


def test_options_and_contexts_of_ddp_are_those_of_ddp(tmp_path):
    output = launch(tmp_path, START + OPTIONS)
    assert said(output, "unused") == ["True True"] * 2
    assert said(output, "static") == ["True True False"] * 2
    assert said(output, "buckets") == ["True"] * 2
    assert said(output, "group") == [f"True True {2**20}"] * 2
    for what in ("names", "no_sync", "join"):
        assert said(output, what) == ["True"] * 2
    for text in said(output, "sync batch norm"):
        assert "SyncBatchNorm expected input tensor to be on GPU" in text


BAD = """
ddp_profiling.form_basis = lambda *_, **__: say("profiled: something")
def bad(what, **changes):
    refused(what, lambda: qsync.hybrid(make(), batch(), **{**options, **changes}))

bad("misspelt", ddp_options={"find_unused_parameter": True})
bad("casts", ddp_options={"mixed_precision": 1})
bad("flag", ddp_options={"static_graph": 1})
bad("mapping", ddp_options=["static_graph"])
bad("twice", ddp_options={"bucket_cap_mb": 4}, bucket_cap_mb=8)
bad("bucket", ddp_options={"bucket_cap_mb": -4})
bad("no bucket", bucket_cap_mb=0)
bad("differ", ddp_options={"static_graph": True} if rank else {})
bad("one rank", ddp_options={"nothing": 1} if rank else {})
groups = [dist.new_group([0]), dist.new_group([1])]
bad("part", ddp_options={"process_group": groups[rank]})
bad("no group", ddp_options={"process_group": 3})
bad("argument", lossfn=1)
bad("planner", slak=0.1)
bad("value", slack="much")
bad("range", slack=-1.0)
bad("ddp", ddp="no")
dist.destroy_process_group()
"""


def test_what_ddp_does_not_have_is_refused_before_anything_is_profiled(tmp_path):
    output = launch(tmp_path, START + BAD)
    assert "profiled: something" not in output
    sentences = {
        "misspelt": "did you mean find_unused_parameters?",
        "casts": "does not accept mixed_precision: the plan decides every cast",
        "flag": "static_graph must be True or False, found 1",
        "mapping": "must be a mapping",
        "twice": "bucket_cap_mb is given twice",
        "bucket": "bucket_cap_mb must be positive, found -4",
        "no bucket": "bucket_cap_mb must be positive, found 0",
        "differ": "MismatchError: DDP's static_graph differs between ranks",
        "one rank": "failed on rank 1: ddp_options: there is no argument 'nothing'",
        "part": "process_group has 1 of the job's 2 ranks",
        "no group": "process_group must be torch.distributed's, found 3",
        "argument": "there is no argument 'lossfn'; did you mean loss_fn?",
        "planner": "there is no argument 'slak'; did you mean slack?",
        "value": "an option has a value of another type",
        "range": "slack must not be negative",
        "ddp": "ddp must be True or False, found 'no'",
    }
    for what, sentence in sentences.items():
        assert all(sentence in text for text in said(output, what)), said(output, what)


def test_every_argument_of_ddp_is_taken_or_refused_with_a_reason():
    arguments = {
        name for name in inspect.signature(DistributedDataParallel.__init__).parameters if name != "self"
    }
    assert arguments <= {*DDP_OPTIONS, *_WHY_NOT}
