"""What a training loop of an elastic job may do, and what is refused: real cards at a real lighthouse."""

from __future__ import annotations

import pytest
from lighthouses import lighthouse
from two_ranks import Program, environment

pytest.importorskip("torchft")
pytestmark = [pytest.mark.dist, pytest.mark.xdist_group("elastic")]

CARD = """
import os, signal, sys, torch, qsync
os.setsid()
signal.signal(signal.SIGTERM, signal.SIG_DFL)
torch.set_num_threads(1)
torch.manual_seed(0)
address, loop, passes = sys.argv[1], sys.argv[2], int(sys.argv[3])
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
data = [torch.randn(4) for _ in range(32)]
job = qsync.elastic(model, optimizer, data, batch_size=8, plan=False, lighthouse=address, timeout_s=5,
                    start_with=1, max_samples=8 // passes, num_workers=int(loop == "workers"))

def backward(batch):
    job.model(batch).square().mean().backward()

def ahead(step):
    last = None
    for batch in step:
        if last is not None:
            yield last
        last = batch
    yield last

for step in job.steps(num_steps=3):
    if loop != "accumulates" or step.number % 2 == 0:
        optimizer.zero_grad()
    for batch in {"list": list, "ahead": ahead}.get(loop, iter)(step):
        for part in batch.chunk(2) if loop == "chunks" else [batch]:
            backward(part)
    if loop == "workers" and step.number == 2:
        os.killpg(0, signal.SIGTERM)
    if loop == "late" and step.number == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    if step.arrived() and (loop != "accumulates" or step.number % 2):
        optimizer.step()
print("steps", job.step, "states", len(optimizer.state_dict()["state"]), flush=True)
"""


@pytest.fixture(scope="module")
def address():
    with lighthouse() as found:
        yield found


@pytest.fixture
def run(address, tmp_path):
    def run(loop, passes=1):
        script = tmp_path / "card.py"
        script.write_text(CARD)
        return Program(script, environment(tmp_path), address, loop, str(passes)).ended()

    return run


@pytest.mark.parametrize(
    ("loop", "passes"), [("plain", 1), ("plain", 4), ("list", 1), ("ahead", 1), ("chunks", 1)]
)
def test_loops_that_give_the_right_gradient_run(run, loop, passes):
    code, said = run(loop, passes)
    assert (code, said.splitlines()[-1]) == (0, "steps 3 states 2"), said


@pytest.mark.parametrize("loop", ["list", "ahead", "chunks"])
def test_micro_batches_that_are_taken_ahead_of_backward_are_refused(run, loop):
    code, said = run(loop, 4)
    assert code and "states" not in said
    assert "run forward and backward of each once, before the next" in said


def test_gradients_that_are_left_for_the_next_step_are_refused(run):
    code, said = run("accumulates")
    assert code and "states" not in said
    assert "call optimizer.step() and zero_grad() in every step" in said


def test_a_signal_to_all_processes_of_a_card_lets_it_finish_its_step(run):
    code, said = run("workers")
    assert (code, said.splitlines()[-1]) == (0, "steps 3 states 2"), said


def test_a_signal_in_the_last_step_leaves_the_optimizer_its_state(run):
    code, said = run("late")
    assert (code, said.splitlines()[-1]) == (0, "steps 3 states 2"), said
