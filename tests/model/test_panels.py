"""Matrices in panels: products of few rows, on oneDNN's memory and in bytes, and the greedy choice out of bytes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cygnet.model import packed as packed_module
from cygnet.model.int8 import Int8Weight
from cygnet.model.packed import PackedWeight, can_pack
from cygnet.model.screened import ScreenedHead

numba = pytest.importorskip("numba")
needs_packing = pytest.mark.skipif(not can_pack(torch.bfloat16, "cpu"), reason="no packed bf16 products here")


def matrix(out: int, size: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(out, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@needs_packing
@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 35),
    out=st.sampled_from([64, 128, 640]),
    size=st.sampled_from([2, 34, 640]),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_few_rows_with_packed_weights(rows: int, out: int, size: int, bias: bool, seed: int) -> None:
    weight, x = matrix(out, size, seed), matrix(rows, size, seed + 1)
    b = matrix(1, out, seed + 2)[0] if bias else None
    want = x.float() @ weight.float().t() + (0 if b is None else b.float())
    got = PackedWeight(weight).linear(x, b)
    torch.testing.assert_close(got.float(), want, atol=2e-2 * size**0.5, rtol=1e-2)


@needs_packing
def test_memory_that_is_not_in_panels_is_left_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = matrix(128, 64, 0), matrix(3, 64, 1)
    kept = PackedWeight(weight)
    other = matrix(128, 64, 5)
    assert packed_module._panels_of(kept._packed, other) == 0
    monkeypatch.setattr(packed_module, "_panels_of", lambda packed, weight: 0)
    torch.testing.assert_close(PackedWeight(weight).linear(x, None), kept.linear(x, None), atol=0.2, rtol=1e-2)


def run_panel(intrinsic: Any, x: np.ndarray, weight: np.ndarray, sums: np.ndarray) -> None:
    """`intrinsic` over x int32 [rows, pairs] and a panel."""
    from cygnet.model.cpu.jit import _pointer_to, i8_at, i32_at

    del _pointer_to
    from cygnet.model.cpu.jit import f32_at

    bf16 = weight.dtype == np.uint16
    weights_at, sums_at = (i32_at, f32_at) if bf16 else (i8_at, i32_at)

    @numba.njit
    def run(x: int, stride: int, weight: int, pairs: int, sums: int) -> None:
        intrinsic(i32_at(x), stride, weights_at(weight), pairs, sums_at(sums), 0)

    run(x.ctypes.data, x.shape[1], weight.ctypes.data, x.shape[1], sums.ctypes.data)


@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize("plain", [True, False])
def test_sums_of_a_panel(rows: int, plain: bool) -> None:
    """The instruction of this machine and the way that others go, against integers and fp64."""
    from cygnet.model.cpu import vector

    size = 70
    weight, x = matrix(64, size, 0), matrix(rows, size, 1)
    panel = weight.view(64, size // 2, 2).transpose(0, 1).contiguous().view(torch.uint16).numpy()
    sums = np.zeros((rows, 64), np.float32)
    product = vector.bf16_panel(rows, vector.dot_bf16_plain if plain else vector.dot_bf16)
    run_panel(product, x.view(torch.int32).numpy(), panel, sums)
    want = x.double() @ weight.double().t()
    np.testing.assert_allclose(sums, want.numpy(), atol=1e-4)

    generator = np.random.default_rng(0)
    small = generator.integers(-127, 128, (64, size), dtype=np.int8)
    large = generator.integers(-16000, 16000, (rows, size), dtype=np.int16)
    panel = np.ascontiguousarray(small.reshape(64, size // 2, 2).transpose(1, 0, 2))
    totals = np.zeros((rows, 64), np.int32)
    product = vector.i8_panel(rows, vector.dot_i16_plain if plain else vector.dot_i16)
    run_panel(product, large.view(np.int32), panel, totals)
    np.testing.assert_array_equal(totals, large.astype(np.int64) @ small.T.astype(np.int64))


@pytest.mark.parametrize("rows", [1, 4, 6])
@pytest.mark.parametrize("at_once", [1, 4])
def test_float_sums_of_a_panel(rows: int, at_once: int) -> None:
    """As CPUs with few or many registers do them, added to what is there; bf16 widened and fp32, equal to the bit."""
    from cygnet.model.cpu import vector
    from cygnet.model.cpu.jit import f32_at, i32_at

    size = 70
    weight, x = matrix(64, size, 0), matrix(rows, size, 1).float()
    pairs = weight.view(64, size // 2, 2).transpose(0, 1).contiguous()
    wide = weight.float().t().contiguous()
    narrow, floats = vector.widened_panel(rows, at_once), vector.float_panel(rows, at_once)

    @numba.njit
    def run(x: int, stride: int, pairs: int, wide: int, sums: int, same: int) -> None:
        narrow(f32_at(x), stride, i32_at(pairs), stride // 2, f32_at(sums), 0)
        floats(f32_at(x), stride, f32_at(wide), stride, f32_at(same), 0)

    sums, same = torch.ones(rows, 64), torch.ones(rows, 64)
    run(x.data_ptr(), size, pairs.data_ptr(), wide.data_ptr(), sums.data_ptr(), same.data_ptr())
    torch.testing.assert_close(sums.double(), 1 + x.double() @ weight.double().t(), atol=1e-4, rtol=0)
    assert torch.equal(sums, same)


@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize("plain", [True, False])
def test_sums_of_a_panel_of_bytes(rows: int, plain: bool) -> None:
    """Bytes by bytes, of all words and of some, against integers."""
    from cygnet.model.cpu import vector
    from cygnet.model.cpu.jit import i32_at, i64_at

    size, listed, dot = 76, np.array([0, 5, 18]), vector.dot_u8_plain if plain else vector.dot_u8
    generator = np.random.default_rng(rows)
    weight = generator.integers(0, 256, (64, size), dtype=np.uint8)
    x = generator.integers(-128, 128, (rows, size), dtype=np.int8)
    panel = np.ascontiguousarray(weight.reshape(64, size // 4, 4).transpose(1, 0, 2))
    every, some = vector.u8_panel(rows, dot), vector.u8_listed(rows, dot)
    bytes_met, words = x, x.reshape(rows, -1, 4)
    if dot.words == 2:
        bytes_met = np.ascontiguousarray(words[:, :, [0, 2, 1, 3]].astype(np.int16))

    @numba.njit
    def run(x: int, stride: int, weight: int, listed: int, count: int, sums: int, of_some: int) -> None:
        every(i32_at(x), stride, i32_at(weight), stride, i32_at(sums), 0)
        some(i32_at(x), stride, i32_at(weight), count, i64_at(listed), i32_at(of_some))

    sums, of_some = np.zeros((2, rows, 64), np.int32)
    run(*(a if isinstance(a, int) else a.ctypes.data for a in (bytes_met, size // 4, panel, listed, 3, sums, of_some)))
    np.testing.assert_array_equal(sums, x.astype(np.int64) @ weight.T.astype(np.int64))
    met = weight.reshape(64, -1, 4)[:, listed].reshape(64, -1).astype(np.int64)
    np.testing.assert_array_equal(of_some, x[:, :12].astype(np.int64) @ met.T)


def test_a_strange_activation_shows() -> None:
    weight = Int8Weight(matrix(70, 34, 0), keep_packed=False)
    for value in (float("nan"), float("inf")):
        x = matrix(2, 34, 1)
        x[1, 7] = value
        y = weight.linear(x, None)
        assert y[0].isfinite().all()
        assert not y[1].isfinite().any()


# ------------------------------------------------------------------ greedy choice out of bytes


def heads(weight: torch.Tensor) -> list[ScreenedHead]:
    """Every way to hold the exact weights."""
    found = [ScreenedHead(weight)]
    if weight.dtype == torch.bfloat16 and can_pack(weight.dtype, "cpu"):
        packed = PackedWeight(weight)
        if packed.panels:
            found.append(ScreenedHead(weight, packed))
    return found


def check_choice(weight: torch.Tensor, x: torch.Tensor) -> None:
    """The choice is the first of the largest logits, rounded to the weights' type, up to the order of fp32 sums."""
    exact = x.double() @ weight.double().t()
    for head in heads(weight):
        for row, chosen in enumerate(head.argmax(x).tolist()):
            logits = exact[row]
            slack = 1e-5 * float((x[row].double().abs() @ weight.double().abs().t()).max())
            rounded = logits.to(weight.dtype)
            assert rounded[chosen] == rounded.max() or logits[chosen] >= logits.max() - slack, (
                row,
                chosen,
                logits[chosen],
                logits.max(),
            )


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 9),
    out=st.sampled_from([3, 64, 1000, 9000]),
    size=st.sampled_from([2, 34, 640, 1030]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    outlier=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_choice_is_that_of_all_logits(
    rows: int, out: int, size: int, dtype: torch.dtype, outlier: bool, seed: int
) -> None:
    weight, x = matrix(out, size, seed, dtype), matrix(rows, size, seed + 1, dtype)
    if outlier:
        x[:, 0] *= 100
        weight[:, -1] *= 30
    check_choice(weight, x)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 9),
    out=st.sampled_from([3, 64, 700]),
    size=st.sampled_from([2, 35, 640]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    outliers=st.lists(st.tuples(st.integers(0, 639), st.sampled_from([30.0, 1e3, 1e6])), max_size=40),
    magnitude=st.sampled_from([1e-25, 1.0, 1e20]),
    seed=st.integers(0, 99),
)
def test_ends_hold_the_logits(
    rows: int,
    out: int,
    size: int,
    dtype: torch.dtype,
    outliers: list[tuple[int, float]],
    magnitude: float,
    seed: int,
) -> None:
    """Every logit is below its upper end, and the largest of every panel above the lower end that stands for it."""
    weight, x = matrix(out, size, seed, dtype), matrix(rows, size, seed + 1, dtype)
    for place, factor in outliers:
        x[place % rows, place % size] = factor
    x *= magnitude
    weight[0] = weight[0].sign()  # bytes that are off by nothing
    upper, ends = ScreenedHead(weight).screen(x)
    exact = x.double() @ weight.double().t()
    assert (upper.flatten(1)[:, :out] >= exact).all()
    for panel in range(len(upper[0])):
        of_panel = slice(panel * 64, (panel + 1) * 64)
        assert (ends[0][:, panel] <= exact[:, of_panel].amax(1)).all()
        assert torch.equal(ends[1][:, panel], upper[:, panel].amax(1))


def test_ends_are_near() -> None:
    """With a few activations that are much larger than the others, as models have them, a logit is known to 2 % of the
    product of the norms, up or down: else all outputs would be candidates."""
    weight, x = matrix(1000, 640, 0), matrix(8, 640, 1)
    x[:, [3, 77, 300, 301]] *= 12
    upper, _ = ScreenedHead(weight).screen(x)
    above = upper.flatten(1)[:, :1000] - (x.double() @ weight.double().t())
    norms = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)
    assert (above / norms).max() < 0.04


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ties_go_to_the_first(dtype: torch.dtype) -> None:
    weight, x = matrix(500, 64, 0, dtype), matrix(1, 64, 1, dtype)
    weight[[17, 130, 499]] = (x[0] * 3).to(dtype)
    for head in heads(weight):
        assert head.argmax(x).tolist() == [17]


def test_all_alike_and_nothing_finite() -> None:
    """Every output is a candidate: all are worked out."""
    weight = torch.ones(300, 64, dtype=torch.bfloat16)
    for head in heads(weight):
        assert head.argmax(torch.zeros(2, 64, dtype=torch.bfloat16)).tolist() == [0, 0]
        strange = torch.full((1, 64), float("nan"), dtype=torch.bfloat16)
        assert head.argmax(strange).tolist() == [0]


def test_threads_do_not_matter(all_threads: Callable[[], None] | None) -> None:
    weight, x = matrix(5000, 128, 3), matrix(5, 128, 4)
    want = [head.argmax(x).tolist() for head in heads(weight)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if before == 1 else 1)
        assert [head.argmax(x).tolist() for head in heads(weight)] == want
    finally:
        torch.set_num_threads(before)


@needs_packing
@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(1, 34),
    out=st.sampled_from([64, 640, 6400]),
    size=st.sampled_from([2, 640]),
    seed=st.integers(0, 99),
)
def test_the_choice_of_a_packed_head(rows: int, out: int, size: int, seed: int) -> None:
    """The same as that of its own product, to the bit."""
    head, x = PackedWeight(matrix(out, size, seed)), matrix(rows, size, seed + 1)
    chosen = head.argmax(x)
    if chosen is None:
        assert not head.panels or rows > 32
    else:
        assert chosen.tolist() == head.linear(x, None).argmax(1).tolist()
