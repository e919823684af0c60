"""INT8 products: the compiled ones of AMX against oneDNN's exact sums and the pass behind them."""

import threading

import pytest
import torch

from qsync.backend import int8_products
from qsync.backend.casts.cast_ops import dequantize
from qsync.backend.casts.epilogues import Activation, dequantize_activated
from qsync.backend.devices.amx import has_amx
from qsync.backend.int8_products import LONGEST_INT32_SUM, activated_product, int8_sums, scaled_product

needs_amx = pytest.mark.skipif(not has_amx(torch.device("cpu")), reason="needs a processor with AMX")
DTYPES = (torch.float32, torch.bfloat16)
# (rows, inner, columns): whole tiles, parts of tiles in each, one tile only, several chunks and blocks
SHAPES = ((64, 64, 64), (33, 65, 47), (32, 1, 32), (300, 700, 95), (257, 1088, 64), (520, 96, 1000))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def codes(*shape, seed=0, transposed=False):
    generator = torch.Generator().manual_seed(seed)
    stored = shape[::-1] if transposed else shape
    drawn = torch.randint(-127, 128, stored, generator=generator, dtype=torch.int8)
    return drawn.t() if transposed else drawn


def factors(m, n):
    generator = torch.Generator().manual_seed(9)
    return torch.rand(m, generator=generator), torch.rand(n, generator=generator), torch.randn(n)


def in_tiles(monkeypatch):
    """Fail where a product does not go to AMX, and return nothing."""
    monkeypatch.setattr(int8_products, "int8_sums", lambda *_: pytest.fail("not multiplied in tiles"))


@needs_amx
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_in_tiles_is_that_of_exact_sums(shape, dtype, monkeypatch):
    (m, k, n), bias = shape, factors(shape[0], shape[2])[2]
    rows, columns, _ = factors(m, n)
    for a_turned in (False, True):
        for b_turned in (False, True):
            a, b = codes(m, k, transposed=a_turned), codes(k, n, seed=1, transposed=b_turned)
            for offset in (None, bias):
                expected = dequantize(int8_sums(a, b), rows, columns, offset, dtype)
                with monkeypatch.context() as patched:
                    in_tiles(patched)
                    assert torch.equal(scaled_product(a, b, rows, columns, offset, dtype), expected)
                    out = torch.full((m, n), 7.0, dtype=dtype)
                    assert scaled_product(a, b, rows, columns, offset, dtype, out) is out
                assert torch.equal(out, expected)


@needs_amx
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", [Activation("gelu"), Activation("gelu", "tanh"), Activation("relu")])
def test_an_activation_in_tiles_is_that_of_the_pass(function, dtype, monkeypatch):
    a, b, (rows, columns, bias) = codes(70, 130), codes(130, 66, seed=1), factors(70, 66)
    rows = rows / 1e4
    expected = dequantize_activated(int8_sums(a, b), rows, columns, bias, dtype, function)
    in_tiles(monkeypatch)
    got = activated_product(a, b, rows, columns, bias, dtype, function)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


@needs_amx
@pytest.mark.parametrize("offset", [1, 4, 17])
def test_operands_that_begin_inside_of_others(offset, monkeypatch):
    def inside(tensor):
        around = torch.empty(tensor.numel() + offset, dtype=tensor.dtype)
        around[offset:] = tensor.flatten()
        return around[offset:].view(tensor.shape)

    a, b, given = codes(70, 128), codes(66, 128, seed=1), factors(70, 66)
    expected = dequantize(int8_sums(a, b.t()), *given, torch.float32)
    in_tiles(monkeypatch)
    for turned in (inside(b).t(), inside(b.t().contiguous())):
        got = scaled_product(inside(a), turned, *map(inside, given), torch.float32)
        assert torch.equal(got, expected)


@needs_amx
def test_the_largest_sums_and_scales_that_are_not_finite(monkeypatch):
    k = 2**14
    a, b = torch.full((32, k), -127, dtype=torch.int8), torch.full((k, 32), 127, dtype=torch.int8)
    in_tiles(monkeypatch)
    ones = torch.ones(32)
    rows = torch.where(torch.arange(32) == 3, torch.nan, ones)
    y = scaled_product(a, b, rows, ones, None, torch.float32)
    assert y[3].isnan().all()
    assert y[torch.arange(32) != 3].eq(-(127**2) * k).all()


@needs_amx
def test_products_in_tiles_between_those_of_onednn_and_on_two_threads():
    """Both set the shapes of tiles; each thread has its own."""
    a, b, x = codes(200, 256), codes(256, 96, seed=1), torch.randn(40, 72).bfloat16()
    (rows, columns, bias), expected, failed = factors(200, 96), x.float() @ x.float().t(), []
    once = scaled_product(a, b, rows, columns, bias, torch.float32)

    def run():
        torch.set_num_threads(1)
        for _ in range(50):
            if not torch.equal(scaled_product(a, b, rows, columns, bias, torch.float32), once):
                failed.append("int8")
            if not torch.allclose((x @ x.t()).float(), expected, rtol=2e-2, atol=1e-1):
                failed.append("bf16")

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.parametrize(("m", "k", "n"), [(31, 64, 64), (64, 64, 31), (64, 0, 64), (0, 64, 64), (1, 1, 1)])
def test_products_too_small_for_tiles(m, k, n):
    a, b, (rows, columns, bias) = codes(m, k), codes(k, n, seed=1), factors(m, n)
    expected = (a.int() @ b.int()).float() * rows.unsqueeze(1) * columns + bias
    torch.testing.assert_close(scaled_product(a, b, rows, columns, bias, torch.float32), expected)


def test_with_more_threads_onednn_multiplies(monkeypatch):
    torch.set_num_threads(2)
    seen = []
    monkeypatch.setattr(int8_products, "int8_sums", lambda *a: seen.append(a) or int8_sums(*a))
    rows, columns, _ = factors(64, 64)
    scaled_product(codes(64, 64), codes(64, 64), rows, columns, None, torch.float32)
    assert seen


def test_an_inner_dimension_too_long_for_integers():
    k = LONGEST_INT32_SUM + 70
    a, b = torch.full((32, k), 127, dtype=torch.int8), torch.full((k, 32), 127, dtype=torch.int8)
    for out in (None, torch.empty(32, 32)):
        y = scaled_product(a, b, torch.ones(32), torch.ones(32), None, torch.float32, out)
        torch.testing.assert_close(y, torch.full((32, 32), 127.0**2 * k))
