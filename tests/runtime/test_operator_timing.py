"""Operators that are slower in the one precision asked for run in a precision up."""

from __future__ import annotations

import fcntl
import threading
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import qsync
from qsync import Precision, backend
from qsync.backend.devices import kernel_timing
from qsync.backend.devices.kernel_timing import apart
from qsync.backend.encoding import Operand
from qsync.backend.kernel_cache import Choices
from qsync.backend.selection.kernel_selection import Kernels
from qsync.runtime import assignment_timing, operator_timing, program
from qsync.runtime.planned_forward import program_of

INT8, BF16, FP32 = Precision.INT8, Precision.BF16, Precision.FP32
X = torch.randn(6, 8)
SLOW_FP32 = {("fp32", rows): 9.0 for rows in (4, 12)}


class Ticking(Kernels):
    """The CPU's kernels, which take the seconds of a table by the clock of a test."""

    plain_casts = ()  # each one ticks
    chosen, unsupported = {}, {}  # by this clock: the process's own kernels keep theirs

    def __init__(self, products, casts=None):
        super().__init__(torch.device("cpu"))
        self.products, self.casts, self.now = products, casts or {}, 0.0
        self._chosen, self._unsupported = self.chosen, self.unsupported

    def kernel(self, kind, precision, reference=False):
        found = super().kernel(kind, precision, reference)

        def ticking(target, out_type, *args, **kwargs):
            weight = args[1].value if isinstance(args[1], Operand) else args[1]
            self.now += self.products.get((str(precision), len(weight)), 0.0)
            return found(target, out_type, *args, **kwargs)

        return ticking

    def cast(self, tensor, target_type):
        what = target_type if len(tensor) == len(X) else f"weight {target_type}"
        self.now += self.casts.get(what, 0.0) * (tensor.ndim > 1)
        return super().cast(tensor, target_type)


@pytest.fixture
def on(tmp_path, monkeypatch):
    """Run on a machine with these kernels, where nothing was chosen yet."""

    def begin(kernels, fp32_s=0.0):
        def fastest(runs, *arguments):
            def plain():  # no kernel of the table
                kernels.now += fp32_s
                fp32()

            *others, fp32 = runs
            return kernel_timing.fastest([*others, plain], *arguments)

        with monkeypatch.context() as patch:
            patch.setenv("QSYNC_CACHE_DIR", str(tmp_path))
            choices = Choices("precisions", {})
        ticks = count()  # no kernel takes no time
        monkeypatch.setattr(operator_timing, "known_choices", lambda *_: choices)
        monkeypatch.setattr(operator_timing, "fastest", fastest)
        monkeypatch.setattr(
            kernel_timing, "time", SimpleNamespace(perf_counter=lambda: kernels.now + 1e-9 * next(ticks))
        )
        monkeypatch.setattr(backend, "select", lambda *_: kernels)
        return kernels

    return begin


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.small = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x):
        return self.small(self.wide(x).sin())


def ran(model, *inputs):
    model(*(inputs or (X,))).sum().backward()
    return program_of(model).assignment()


def test_what_is_slower_runs_one_precision_up_and_is_said(on, capsys):
    on(Ticking({("int8", 4): 1.0}))
    model = qsync.wrap(Two(), "int8")
    assert ran(model) == {"wide": INT8, "small": BF16}
    assert "Two: 1 of 2 products in int8 (1 bf16, 1 int8); see" in capsys.readouterr().err
    reason = "1 in bf16 because int8 is slower at these shapes (strict=True keeps it): small"
    assert reason in str(qsync.coverage(model))
    assert ran(qsync.wrap(Two(), "int8", strict=True)) == {"wide": INT8, "small": INT8}


@pytest.mark.parametrize("int8_s", [0.25, 1.0])
def test_fp32_is_compared_whatever_is_fastest_below_it(on, int8_s):
    on(Ticking({("int8", 4): int8_s}, {"weight bf16": 0.5}))
    assert ran(qsync.wrap(Two(), "int8")) == {"wide": INT8, "small": FP32}


@pytest.mark.filterwarnings("ignore:qsync")
def test_a_near_race_keeps_the_precision_asked_for(on):
    on(Ticking({("int8", 4): 1.004, ("int8", 12): 1.06, **SLOW_FP32}, {"weight bf16": 1.0}), fp32_s=9.0)
    found = ran(qsync.wrap(Two(), "int8"))
    assert found["small"] is INT8 and found["wide"] is not INT8


class Misleading(Ticking):
    """Kernels that are slow only where products of equal shape follow each other, or only where not."""

    slow_alone, in_backward, last = True, False, None

    def kernel(self, kind, precision, reference=False):
        found = Kernels.kernel(self, kind, precision, reference)

        def ticking(target, out_type, *args, **kwargs):
            rows = len(args[1].value if isinstance(args[1], Operand) else args[1])
            own_s = self.products.get((str(precision), rows), 0.0)
            is_slow, self.last = (self.last == rows) == self.slow_alone, rows
            result = found(target, out_type, *args, **kwargs)
            if is_slow and self.in_backward and result.requires_grad:
                result.register_hook(lambda _: self.tick(own_s))
            elif is_slow and not self.in_backward:
                self.tick(own_s)
            return result

        return ticking

    def tick(self, seconds):
        self.now += seconds


SLOW_INT8 = {("int8", 4): 1.0, ("int8", 12): 1.0}


def test_whole_passes_decide_between_what_is_asked_for_and_what_is_fastest_alone(on, monkeypatch):
    on(Misleading(SLOW_INT8, {"bf16": 0.1}))
    model = qsync.wrap(Two(), "int8")
    assert ran(model) == {"wide": INT8, "small": INT8}
    assert "2 in int8: wide, small" in str(qsync.coverage(model))
    on(Misleading(SLOW_INT8))  # a later process finds the choice
    monkeypatch.setattr(assignment_timing, "fastest", None)
    assert ran(qsync.wrap(Two(), "int8")) == {"wide": INT8, "small": INT8}


@pytest.mark.parametrize("in_backward", [False, True])
def test_the_types_of_autocast_are_a_candidate_below_16_bits(on, in_backward):
    kernels = Misleading(SLOW_INT8, {"weight bf16": 0.1})
    kernels.slow_alone, kernels.in_backward = False, in_backward
    on(kernels)
    model = qsync.wrap(Two(), "int8")
    assert set(ran(model).values()) == {BF16} and model(X).dtype is torch.float32
    reason = "2 in bf16 because int8 is slower in whole passes (strict=True keeps it): wide, small"
    assert reason in str(qsync.coverage(model))


def test_assignments_and_batches_are_each_compared_once(on, monkeypatch):
    compared, kernels = [], Misleading({**SLOW_INT8, ("int8_all", 4): 1.0, ("int8_all", 12): 1.0})

    def counted(runs, *arguments):
        compared.append(len(runs))
        return kernel_timing.fastest(runs, *arguments)

    on(kernels)
    monkeypatch.setattr(assignment_timing, "fastest", counted)
    for precision, batch, number in (
        ("int8", X, 1), ("int8", X, 1), ("int8", torch.randn(64, 8), 2), ("int8_all", X, 3),
    ):  # fmt: skip
        model = qsync.wrap(Two(), precision)
        for _ in range(2):
            ran(model, batch)
        assert len(compared) == number


def test_a_call_after_the_first_compares_nothing(on, monkeypatch):
    on(Misleading(SLOW_INT8))
    model = qsync.wrap(Two(), "int8")
    ran(model)
    monkeypatch.setattr(program, "fastest_assignment", None)
    ran(model)


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.norm, self.small = nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Linear(12, 4)

    def forward(self, x):
        return self.small(F.dropout(self.norm(self.wide(x)), 0.5))


def test_compared_passes_leave_statistics_gradients_and_random_states(on):
    found = []
    for strict in (False, True):
        kernels = on(Ticking({("int8", 4): 1.0}))
        torch.manual_seed(0)
        model = qsync.wrap(Stateful(), "int8", strict=strict)
        fired = []
        model.small.weight.register_post_accumulate_grad_hook(lambda p, fired=fired: fired.append(p))
        passes = kernels.now
        result = model(X)
        assert (kernels.now > passes + 4) == (not strict) and not fired
        assert all(parameter.grad is None for parameter in model.parameters())
        found.append([result.shape, torch.rand(3), model.norm.num_batches_tracked, model.norm.running_mean])
    (_, random, count, mean), (_, same_random, same_count, same_mean) = found
    assert torch.equal(random, same_random) and count == same_count == 1
    assert torch.allclose(mean, same_mean)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_a_graph_with_code_of_users_is_not_run_to_be_timed(on, monkeypatch):
    class Own(Two):
        def forward(self, x):
            return Doubled.apply(super().forward(x))

    on(Ticking({("int8", 4): 1.0}))
    monkeypatch.setattr(assignment_timing, "fastest", None)
    assert ran(qsync.wrap(Own(), "int8")) == {"wide": INT8, "small": BF16}


def test_a_choice_is_kept_for_later_processes(on, monkeypatch):
    on(Ticking({("int8", 4): 1.0}))
    first = ran(qsync.wrap(Two(), "int8"))
    on(Ticking({("int8", 12): 1.0}))  # a later process of the same machine
    monkeypatch.setattr(operator_timing, "fastest", None)
    assert ran(qsync.wrap(Two(), "int8")) == first


@pytest.mark.filterwarnings("ignore:qsync")
def test_operators_that_share_a_cast_share_its_time(on):
    class Heads(nn.Module):
        def __init__(self, num):
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(8, 4) for _ in range(num))

        def forward(self, x):
            return sum(head(x).sum() for head in self.heads)

    on(Ticking(SLOW_FP32, {"int8_row": 1.0, "weight bf16": 0.5}), fp32_s=9.0)
    assert set(ran(qsync.wrap(Heads(1), "int8")).values()) != {INT8}
    assert set(ran(qsync.wrap(Heads(3), "int8")).values()) == {INT8}


def test_a_result_that_is_read_in_fp32_is_cast_in_the_race(on):
    class Added(Two):
        def forward(self, x):
            return x + self.small(self.wide(x).sin()).repeat(1, 2)

    for kind, expected in ((Two, BF16), (Added, INT8)):
        on(Ticking({("int8", 4): 1.0, **SLOW_FP32}, {"fp32": 2.0, "weight bf16": 0.5}), fp32_s=9.0)
        model = qsync.wrap(nn.Sequential(kind(), nn.Linear(8 if kind is Added else 4, 2)), "int8")
        assert ran(model)["0.small"] is expected


class Stream(nn.Module):
    """A convolution with a norm and an activation behind it; two blocks on a residual stream."""

    def __init__(self):
        super().__init__()
        self.conv, self.batch_norm = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.norm, self.last_norm = nn.LayerNorm(8), nn.GroupNorm(2, 8)

    def forward(self, image):
        x = F.relu(self.batch_norm(self.conv(image))).mean((2, 3)).sin()  # in FP32
        x = x + F.dropout(self.first(x))
        x = x + self.second(self.norm(x))
        return self.last_norm(x)


def test_what_runs_in_the_type_that_an_operator_hands_on_is_timed_with_it(on, monkeypatch):
    on(Ticking({}))
    seen = []

    def fastest(runs, *_):
        with torch.profiler.profile() as trial:
            runs[-1]()
        seen.append({event.key for event in trial.key_averages()})
        return 0

    monkeypatch.setattr(operator_timing, "fastest", fastest)
    qsync.wrap(Stream(), "int8")(torch.randn(2, 1, 8, 8))
    norms = {f"aten::native_{kind}_norm" for kind in ("batch", "layer", "group")}
    conv, first, second = seen  # in order of the model
    assert conv & norms == {"aten::native_batch_norm"} and {"aten::relu", "aten::mean"} <= conv
    # The residual stream is read, and its next sum is the next operator's.
    assert first & norms == {"aten::native_layer_norm"} and {"aten::add", "aten::dropout"} <= first
    assert second & norms == {"aten::native_group_norm"} and "aten::add" in second


class Everything(nn.Module):
    """One operator of every kind; the last are recomputed in backward."""

    def __init__(self):
        super().__init__()
        self.table, self.conv, self.signal = nn.Embedding(9, 8), nn.Conv2d(1, 4, 3), nn.Conv1d(4, 4, 3)
        self.weight, self.fc = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8)
        self.lstm = nn.LSTM(8, 8)

    def forward(self, ids, mask):
        x, _ = self.lstm(self.table(ids))
        x = torch.addmm(self.weight[0], x.flatten(0, 1), self.weight).view(x.shape)
        q = x.view(2, 10, 2, 4).transpose(1, 2)
        x = F.scaled_dot_product_attention(q, q.sin(), q, mask).transpose(1, 2).reshape(2, 10, 8)
        x = torch.matmul(x, x.cos().transpose(1, 2))
        x = self.signal(self.conv(x.unsqueeze(1)).flatten(2)[:, :, :10])
        return checkpoint(lambda y: self.fc(y).relu(), x, use_reentrant=False)


def test_every_kind_of_operator_is_timed_alone_without_a_trace(on, monkeypatch):
    on(Ticking({}))
    seen = []

    def fastest(runs, *_):
        for run in runs:
            run()
        seen.append(len(runs))
        return 0

    monkeypatch.setattr(operator_timing, "fastest", fastest)
    torch.manual_seed(0)
    model = Everything()
    ids, mask = torch.randint(9, (2, 10)), torch.ones(10, 10, dtype=torch.bool)
    state = torch.get_rng_state()
    low = qsync.wrap(model, "int8")
    found = low(ids, mask)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    kinds = {op.kind for op in program_of(low).graph.adjustable}
    assert kinds == {"embedding", "addmm", "attention", "matmul", "conv2d", "conv1d", "linear", "rnn"}
    assert len(seen) == len(kinds)
    torch.manual_seed(0)
    assert torch.equal(found, qsync.wrap(Everything(), "int8", strict=True)(ids, mask))


def test_one_process_decides_for_those_that_ask_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(tmp_path))
    mine, other = Choices("any", {}), Choices("any", {})
    assert other.decided("a", 2, lambda: 1) == 1
    assert mine.decided("a", 2, lambda: 0) == 1 and mine.decided("b", 2, lambda: 0) == 0


def test_a_decision_that_runs_what_is_chosen_itself_does_not_wait_for_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(tmp_path))
    choices, found = Choices("any", {}), []

    def outer() -> int:
        return apart(lambda: choices.decided("inner", 3, lambda: 2)) - 1

    thread = threading.Thread(target=lambda: found.append(choices.decided("outer", 3, outer)), daemon=True)
    thread.start()
    thread.join(20.0)
    assert found == [1]
    assert [Choices("any", {}).get(key, 3) for key in ("inner", "outer")] == [2, 1]
    with next(tmp_path.glob("kernels/*.lock")).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it is free again


INDEXED = {
    "rows": lambda y: y[torch.tensor([0, 5, 3])],
    "an element of each row": lambda y: y[torch.arange(6), torch.tensor([31, 0, 1, 2, 3, 4])],
    "columns": lambda y: y[:, torch.tensor([31, 1])],
    "rows, repeated": lambda y: y.repeat_interleave(torch.tensor([1, 2, 1, 2, 1, 2]), 0, output_size=9),
    "rows of a draw": lambda y: y[torch.multinomial(torch.ones(6), 3)],
}


@pytest.mark.filterwarnings("ignore:qsync. .* of . products")
@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("form", INDEXED)
def test_a_result_that_whole_numbers_index_is_timed_without_them(form, precision):
    """Drawn ones would be out of range: the layer has more outputs than rows."""

    class Indexed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(8, 32)

        def forward(self, x):
            return INDEXED[form](self.fc(x))

    wrapped = qsync.wrap(Indexed(), precision)
    wrapped(X).square().sum().backward()
    assert wrapped.fc.weight.grad.isfinite().all()


class Images(nn.Module):
    """Two convolutions of one shape, of which the first alone is read by a lowered one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))

    def forward(self, x):
        return self.second(self.first(x).relu()).relu()


def test_images_alone_lie_as_in_the_step_and_so_do_their_gradients(monkeypatch):
    images = torch.randn(2, 8, 6, 6)
    model = qsync.wrap(Images(), "bf16", strict=True)
    model(images).sum().backward()
    (segment,), (lowered,) = program_of(model).segments, program_of(model).lowered
    part, seen, grad = operator_timing.Part(segment, lowered), [], torch.autograd.grad

    def seeing(results, leaves, gradients, **options):
        seen.append((results[0], gradients[0]))
        return grad(results, leaves, gradients, **options)

    monkeypatch.setattr(torch.autograd, "grad", seeing)
    for op in ("first", "second"):
        part.pass_of([op], BF16, backend.select("cpu"))()
    orders = [[t.is_contiguous(memory_format=torch.channels_last) for t in pair] for pair in seen]
    assert orders == [[True, True], [False, False]]  # callers of the model get the last image as torch's
    # Choices of one order are not taken for another.
    assert [part.description([op])[1] for op in ("first", "second")] == [(True,), (False,)]
    assert part.members("first") == ["first", "relu"]


def test_a_pass_takes_the_strides_that_a_step_has():
    expanded = operator_timing._laid_out(torch.ones(3, 4), (0, 1))
    assert expanded.shape == (3, 4) and expanded.stride() == (0, 1) and torch.equal(expanded[0], expanded[2])
    own, numbers = torch.ones(3, 4), torch.ones(3, 4, dtype=torch.int64)
    assert operator_timing._laid_out(own, (4, 1)) is own and operator_timing._laid_out(own, None) is own
    assert operator_timing._laid_out(numbers, (1, 3)) is numbers
    trained = operator_timing._laid_out(torch.ones(3, 4, requires_grad=True), (1, 3))
    assert trained.requires_grad and trained.is_leaf and trained.stride() == (1, 3)
