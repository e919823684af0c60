"""hybrid between real ranks: a plan, the same on every rank and bitwise the same weights; or one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from two_ranks import HEADER, Program, environment, launch, said, start_ranks

from qsync.records.plan_folder import Basis

pytestmark = pytest.mark.dist


def test_unequal_ranks_train_together_and_the_plan_is_kept(tmp_path):
    """The weak rank computes in low precision, the other in FP32; a second start measures nothing.

    A quarter of a core stays slower than the other rank whatever it lowers (at half of one, INT8 comes out
    even, and the noise of the profile decides who is lowered).
    """
    body = """
from qsync.backend.devices import emulation
from qsync.distributed import job
from qsync.backend.precisions_that_pay import emulation_note
from pathlib import Path
from qsync.runtime import planned_forward

ddp_profiling.PROFILE_S, profiled = 3.0, []
form_basis = ddp_profiling.form_basis
ddp_profiling.form_basis = lambda *args, **options: profiled.append(1) or form_basis(*args, **options)

measure_link, measured = job.measure_link, []
job.measure_link = lambda *args, **options: measured.append(1) or measure_link(*args, **options)

share = 0.25 if rank == 1 else None
options = {"loss_fn": loss_fn, "emulated_share": share, "cache_dir": cache}
options["slack"] = 0.0  # the fastest plan, however unsure a busy machine makes the profile
large = batch(size=256, width=512)

def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

def other_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.2)

net = make(width=512)
model = qsync.hybrid(net, large, make_optimizer=sgd, **options)
parallel = torch.nn.parallel.DistributedDataParallel
say(f"slowed: {emulation._slowed.by and emulation._slowed.by.helper_pid is not None}")
say(f"wrapper: {isinstance(model, parallel)} {type(model.module).__name__} {model.module is net}")

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for number in range(3):
    optimizer.zero_grad()
    size = 256 if number < 2 else 5
    loss_fn(model, batch(size, 512, seed=10 * number + rank)).backward()
    optimizer.step()
mine = parameters(model)
theirs = mine.clone()
dist.broadcast(theirs, 0)
say(f"identical: {torch.equal(mine, theirs)} {bool(mine.isfinite().all())}")
nodes = [node for lowered in planned_forward.program_of(net).lowered for node in lowered.nodes]
products = ("inner.0", "inner.1", "head")
modes = {n.op: n.mode for n in nodes if hasattr(n, "mode")} or dict.fromkeys(products, "fp32")
say(f"modes: {sorted({modes[op] for op in products})}")

folder = next(Path(cache).iterdir())
plan = qsync.Plan.load(folder / "plan.json")
strong, weak = sorted(plan.classes, key=lambda name: "emulated" in name)
say(f"base: {plan.base}")
planned = plan[(strong, weak)[rank]].assignment
say(f"as planned: {all(modes[op].split()[0] == planned[op] for op in products)}")
costs = qsync.Profile.load(folder / f"profile-{weak}.json").ops["inner.0"]
whole = {mode: cost.forward_s + cost.backward_s for mode, cost in costs.items()}
lower = [whole[mode] for mode in whole if mode[:4] in ("bf16", "int8")]
assert lower or emulation_note(torch.device("cpu"))
best = min(lower, default=float("inf"))
say(f"lowering pays: {best < 0.7 * whole[plan.base]}")
files = sorted(path.name for path in folder.iterdir() if "profile" not in path.name)
say(f"plan: {len(plan.classes)} {files}")

qsync.hybrid(make(width=512), large, make_optimizer=sgd, **options)
say(f"profiled: {len(profiled)}, links: {len(measured)}")
ddp_profiling.PROFILE_S = 0.3
qsync.hybrid(make(width=512), large, make_optimizer=other_sgd, **options)
say(f"profiled with another optimizer: {len(profiled)}")
dist.destroy_process_group()
"""
    output = launch(tmp_path, body)
    assert said(output, "wrapper") == ["True Net True"] * 2
    assert said(output, "slowed") == ["None", "True"]
    assert said(output, "identical") == ["True True"] * 2
    fast, weak = said(output, "modes")
    (base,) = {of_rank.removeprefix("True ") for of_rank in said(output, "base")}
    assert fast == f"['{base}']" and said(output, "as planned") == ["True"] * 2
    # Some processors multiply BF16 at less than FP32's rate (AVX-512 without AMX), or emulate it, and it is
    # not profiled: nothing is lowered there.
    assert "bf16" in weak or "int8" in weak or "True" not in said(output, "lowering pays")
    files = "['cluster.json', 'graph.json', 'plan.json', 'sensitivity.json']"
    assert said(output, "plan") == [f"2 {files}"] * 2
    assert said(output, "profiled") == ["1, links: 1"] * 2
    assert said(output, "profiled with another optimizer") == ["2", "2"]


def test_what_saves_less_is_profiled_searched_and_run(tmp_path):
    """In FP32 a budget holds only if the weak rank's first blocks save less."""
    body = """
from pathlib import Path
from qsync.lowering.incremental import lower
from qsync.records.save_less import ops_that_save_less
from qsync.runtime import planned_forward
from qsync.predictor.memory.peak import peak_memory

class Deep(torch.nn.Module):
    def __init__(self):
        super().__init__()
        blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)]
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

ddp_profiling.PROFILE_S = 0.1
profiler = ddp_profiling.DdpProfiler
measured_steps = profiler.measured_steps

def observed(self):
    steps = measured_steps(self)
    every = [k for k, _ in self.profiler.waits()]
    plain = [k for k in every if not self.profiler.saves_less(k)]
    say(f"links: {len(steps) == len(plain) < len(every)}")
    return steps

profiler.measured_steps = observed
wide = batch(size=1024)
net, name = Deep(), ["strong", "weak"][rank]
graph = qsync.capture(net, wide[0])
half = [f"blocks.{k}.*" for k in range(3)]
full, less = (
    peak_memory(lower(graph, {}, saving_less=able), num_ranks=2).peak_bytes
    for able in ((), ops_that_save_less(graph, half))
)
say(f"less: {less < full}")
model = qsync.hybrid(
    net, wide, loss_fn, cache_dir=cache, device_class=name, levers=["save_less"],
    budgets={"weak": (full + less) // 2}, pins={"*": "fp32"}, target_s=10.0,
    make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), precisions=["fp32"],
)
loss_fn(model, wide).backward()
(lowered,) = planned_forward.program_of(net).lowered
plan = qsync.Plan.load(next(Path(cache).glob("*/plan.json")))
able = ops_that_save_less(graph, plan[name].saving_less)
ran = [n.op for n in lowered.nodes if getattr(n, "form", "plain") != "plain"]
say(f"ran: {tuple(ran) == able} {len(able)} {plan.levers.without['save_less'].reason}")
dist.destroy_process_group()
"""
    output = launch(tmp_path, body)
    assert said(output, "less") == said(output, "links") == ["True", "True"]
    strong, weak = said(output, "ran")
    assert strong == "True 0 nothing fits in memory"
    assert weak.startswith("True ") and not weak.startswith("True 0 ")


def test_shares_are_planned_with_a_second_capture_and_predicted_again_after_a_restart(tmp_path):
    """The step that is asked for is out of reach without shares; all starts are planned from one profile."""
    body = """
from pathlib import Path
from qsync.distributed.monitoring import drift_monitor
from qsync.replayer import Recapture

form_basis, formed = ddp_profiling.form_basis, []

def first_basis(*args, **options):
    if not formed:
        formed.append(form_basis(*args, **options))
    return formed[0]

ddp_profiling.form_basis = first_basis
large, name = batch(size=256, width=512), ["strong", "weak"][rank]
options = dict(
    loss_fn=loss_fn, cache_dir=cache, device_class=name, emulated_share=0.25 if rank else None,
    precisions=["fp32"], base="fp32",
)
qsync.hybrid(make(width=512), large, **options)
step = [qsync.Plan.load(next(Path(cache).glob("*/plan.json"))).step_s]
dist.broadcast_object_list(step)
for start in ("first", "second"):
    # a second capture is named by who makes it: the model is called by position, or by name
    half = batch(size=128, width=512)[0] if start == "first" else {"x": batch(size=128, width=512)[0]}
    other = Recapture(qsync.capture(make(width=512), half), {})
    model = qsync.hybrid(
        make(width=512), large, **options, levers=["share"], other=other, target_s=0.8 * step[0]
    )
    predicted = drift_monitor.monitors.get(model)
    plans = {file: qsync.Plan.load(file) for file in Path(cache).glob("*/plan.json")}
    (folder, plan) = next((file.parent, plan) for file, plan in plans.items() if plan.levers)
    total = sum(plan.levers[of].samples for of in ("strong", "weak"))
    say(f"{start}: {predicted is not None} {len(plans)} {total} {Recapture.load(folder) is not None}")
    loss_fn(model, batch(size=plan.levers[name].samples, width=512)).backward()
say(f"profiled: {len(formed)}")
dist.destroy_process_group()
"""
    output = launch(tmp_path, body)
    assert said(output, "first") == said(output, "second") == ["True 2 512 True"] * 2
    assert said(output, "profiled") == ["1", "1"]


def test_a_model_in_evaluation_mode_is_planned_as_it_trains(tmp_path):
    body = """
import logging
from pathlib import Path
from qsync.records.graph import OpGraph

class Kept(logging.Handler):
    texts = []
    def emit(self, record):
        self.texts.append(record.getMessage())

logging.getLogger("qsync").addHandler(Kept())

class Dropping(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 8)

    def forward(self, x):
        if self.training:
            x = x * self.fc.weight.sum()
        return self.fc(F.dropout(self.norm(x), 0.5, self.training))

def loss_of(model, x):
    return model(x).square().mean()

graphs = []
for mode in (True, False):
    torch.manual_seed(0)
    model = Dropping().train(mode)
    qsync.hybrid(model, torch.randn(16, 64), loss_of, cache_dir=f"{cache}/{mode}")
    dist.barrier()
    (folder,) = Path(f"{cache}/{mode}").iterdir()
    graphs.append([op.name for op in OpGraph.load(folder / "graph.json").ops])
    say(f"{mode} kept: {[m.training for m in model.modules()] == [mode] * 3}")
say(f"alike: {graphs[0] == graphs[1] and len(graphs[0]) > 3}")
say(f"logged: {sum('in evaluation mode' in text for text in Kept.texts)}")
try:
    qsync.hybrid(Dropping().train(rank == 0), torch.randn(16, 64), loss_of, cache_dir=cache)
except QSyncError as error:
    say(f"unlike: {error}")
dist.destroy_process_group()
"""
    output = launch(tmp_path, body)
    assert [said(output, what) for what in ("True kept", "False kept", "alike")] == [["True", "True"]] * 3
    assert said(output, "logged") == ["1", "0"]
    assert all("the training mode differs between ranks" in text for text in said(output, "unlike"))


def test_a_given_plan_is_run_and_a_cache_that_is_malformed_is_made_anew(tmp_path):
    body = """
from pathlib import Path
from qsync.runtime import planned_forward
from qsync.records.plans import ClassPlan, Plan
from qsync.operators.precision import Precision

graph = qsync.capture(make(), batch()[0])
names = [op.name for op in graph.adjustable]
strong, weak = (ClassPlan(dict.fromkeys(names, p)) for p in (Precision.FP32, Precision.INT8))
plan = Plan(graph.model, graph.hash, {"strong": strong, "weak": weak})
net = make()
model = qsync.hybrid(net, plan=plan, device_class=["strong", "weak"][rank])
loss = train(model)
(lowered,) = planned_forward.program_of(net).lowered
modes = {n.op: n.mode for n in lowered.nodes if hasattr(n, "mode")}
say(f"modes: {modes['inner.0']} {bool(loss.isfinite())}")
mine, theirs = parameters(model), parameters(model)
dist.broadcast(theirs, 0)
say(f"identical: {torch.equal(mine, theirs)}")

qsync.hybrid(make(), batch(), loss_fn, cache_dir=cache)
dist.barrier()
kept = next(Path(cache).glob("*/plan.json"))
if rank == 0:
    kept.write_text("{ not json")
qsync.hybrid(make(), batch(), loss_fn, cache_dir=cache)
dist.barrier()
say(f"mended: {len(Plan.load(kept).classes)}")
dist.destroy_process_group()
"""
    output = launch(tmp_path, body)
    assert said(output, "modes") == ["fp32 True", "int8 True"]
    assert said(output, "identical") == ["True", "True"]
    assert said(output, "mended") == ["1", "1"]


def test_ranks_that_differ_are_told_so_on_every_rank_before_the_first_step(tmp_path):
    """One job for all cases: after each refusal the ranks are still in step."""
    body = """
from qsync.records.plans import ClassPlan, Plan
from qsync.operators.precision import Precision

class Other(Net):
    pass

torch.manual_seed(0)
attempt("class", model=Other() if rank else Net())
attempt("depth", model=make(depth=3 if rank else 2))
attempt("width", model=make(width=32 if rank else 64))
frozen = make()
frozen.head.requires_grad_(rank == 0)
attempt("frozen", model=frozen)

conv = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 4))
attempt("strides", model=conv.to(memory_format=torch.channels_last) if rank else conv)

version = torch.__version__
torch.__version__ = "2.12.0" if rank else "2.13.0"
attempt("torch", model=make())
torch.__version__ = version

graph = qsync.capture(make(), batch()[0])
precision = Precision.BF16 if rank else Precision.FP32
classes = {"c": ClassPlan({op.name: precision for op in graph.adjustable})}
attempt("plan", plan=Plan("Net", graph.hash, classes), device_class="c")
attempt("no plan", plan=None if rank else Plan("Net", graph.hash, classes), device_class="c")
attempt("batch", example_batch=batch(size=32 if rank else 16))
attempt("buckets", bucket_cap_mb=25 if rank else None)
attempt("options", slack=0.1, pins={"head": "fp32"} if rank else None)

class Nan(Net):
    pass
broken = batch()
if rank == 1:
    broken[0][0, 0] = float("nan")
attempt("nan", example_batch=broken)
attempt("missing", example_batch=None if rank else batch())
attempt("empty", example_batch=batch(size=0) if rank else batch())
attempt("loss", loss_fn=(lambda model, batch: model(batch[0])) if rank else loss_fn)

class Untraceable(Net):
    @torch.compiler.disable
    def forward(self, x):
        return super().forward(x)
torch.manual_seed(0)
attempt("untraceable", model=Untraceable())
attempt("lacking", precisions=["bf16", "tf32"])
from qsync.backend.devices import device_detection
processor = device_detection.processor
device_detection.processor = lambda: "Xeon" if rank else "EPYC"
attempt("hardware", device_class="c")
device_detection.processor = processor
attempt("memory", budgets={"c": 1}, device_class="c")
attempt("well", cache_dir=cache)
dist.destroy_process_group()
"""
    output = launch(tmp_path, body)
    for what, words in {
        "class": ["Net", "Other"],
        "depth": ["the number of parameters", "rank 0 has 6", "rank 1 has 8"],
        "width": ["(64, 64)", "(32, 32)"],
        "frozen": ["head.weight", "trained", "frozen"],
        "strides": ["0.weight", "strides (36, 9, 3, 1)", "strides (36, 1, 12, 4)"],
        "torch": ["torch differs", "2.13.0", "2.12.0"],
        "plan": ["the plan differs", "rank 0 has", "rank 1 has"],
        "no plan": ["the plan differs", "rank 0 has", "rank 1 has none"],
        "batch": ["the batch's shapes", "rank 0 has", "rank 1 has"],
        "buckets": ["bucket_cap_mb", "None", "25"],
        "options": ["pins differs", "rank 0 has nothing", "rank 1 has {'head': 'fp32'}"],
        "hardware": ["rank 1 has class 'c'", "hardware is Xeon, 1 thread", "EPYC, 1 thread"],
    }.items():
        sentences = said(output, what)
        assert sentences[0] == sentences[1], what
        assert sentences[0].startswith("MismatchError: "), sentences[0]
        assert all(word in sentences[0] for word in words), sentences[0]
    for what, words in {
        "nan": ["CalibrationError", "rank 1", "inner.0", "NaN"],
        "missing": ["CalibrationError", "rank 1", "the example batch is missing"],
        "empty": ["CalibrationError", "rank 1", "not empty"],
        "loss": ["CalibrationError", "rank 1", "shape (32, 4)"],
        "lacking": ["UnsupportedError", "tf32"],
        "memory": ["DoesNotFitError", "no assignment fits", "says what would fit"],
    }.items():
        sentences = said(output, what)
        assert sentences[0] == sentences[1], what
        assert all(word in sentences[0] for word in words), sentences[0]
    kept = said(output, "memory")[0].partition("qsync fit ")[2].partition(" says")[0]
    assert Basis.load(kept).graph.adjustable and not Path(kept, "plan.json").exists()
    for what in ("untraceable", "well"):  # DDP trains the one as it is
        assert said(output, what) == ["went through"] * 2


def test_a_rank_that_is_killed_while_training_is_named_and_the_others_stop(tmp_path):
    """Started by hand: torchrun itself would stop the other ranks of a host."""
    body = """
model = qsync.hybrid(make(), batch(), loss_fn, cache_dir=cache, timeout_s=3)
train(model, 1)
say("training: begun")
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP if sys.argv[1] == "stopped" else signal.SIGKILL)
train(model, 10**6)
"""
    script = tmp_path / "script.py"
    script.write_text(HEADER + body)
    jobs = [start_ranks([script] * 2, tmp_path / how, how) for how in ("killed", "stopped")]
    try:
        for ranks in jobs:
            code, complaint = ranks[0].ended(100)
            assert code not in (0, None)
            assert "rank 1" in complaint and "stop" in complaint, complaint[-2000:]
    finally:
        for ranks in jobs:
            ranks[1].kill()


def test_one_process_alone_needs_no_job(tmp_path):
    script = tmp_path / "script.py"
    body = """
model = qsync.hybrid(make(), batch(), loss_fn, cache_dir=cache)
say(f"alone: {type(model).__name__} {bool(train(model).isfinite())} {dist.is_initialized()}")
"""
    script.write_text(HEADER.replace('os.environ["RANK"]', "0") + body)
    code, output = Program(script, environment(tmp_path)).ended()
    assert code == 0, output[-2000:]
    assert "[0] alone: Net True False" in output
