"""Matrices in bf16 beside fp32: products of any number of rows, the choice by a head, and whole models."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cygnet.model.cpu.kernels import numba_works
from cygnet.model.cpu.panel_layout import ROW_BLOCK, STRETCH
from cygnet.model.loader import build_model
from cygnet.model.screened import ScreenedHead
from cygnet.model.widened import WidenedWeight
from model.harness import FolderCheckpoint, Harness, Request
from model.tiny import FAMILIES, Tiny

pytestmark = pytest.mark.skipif(not numba_works(), reason="needs numba")


def matrix(out: int, size: int, seed: int) -> torch.Tensor:
    return torch.randn(out, size, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=60)
@given(
    rows=st.one_of(st.integers(1, 40), st.integers(ROW_BLOCK - 2, ROW_BLOCK + 30)),
    out=st.sampled_from([1, 5, 64, 129]),
    size=st.sampled_from([1, 3, 16, 65, STRETCH + 7, 2 * STRETCH]),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products(rows: int, out: int, size: int, bias: bool, seed: int) -> None:
    weight, x = matrix(out, size, seed).bfloat16(), matrix(rows, size, seed + 1)
    b = matrix(1, out, seed + 2)[0] if bias else None
    kept = WidenedWeight(weight)
    got = kept.linear(x, b)
    want = x.double() @ weight.double().t() + (0 if b is None else b.double())
    torch.testing.assert_close(got.double(), want, atol=4e-6 * size**0.5, rtol=1e-5)
    assert torch.equal(kept.linear(x[-1:], b), got[-1:])  # whatever other rows there are
    assert torch.equal(kept.rows(torch.tensor([0, out - 1]), torch.float32), weight[[0, out - 1]].float())


def test_a_strange_activation_shows() -> None:
    kept, x = WidenedWeight(matrix(64, 32, 0).bfloat16()), matrix(30, 32, 1)
    x[3, 5] = float("nan")
    for rows in (4, 30):
        assert kept.linear(x[:rows], None).isnan().any(1).nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("rows", [1, 5, 32])
@pytest.mark.parametrize("out", [64, 1000])
def test_a_screened_head_chooses_as_all_logits_do(rows: int, out: int) -> None:
    weight = matrix(out, 48, rows).bfloat16()
    x, exact = matrix(rows, 48, out), WidenedWeight(weight)
    assert torch.equal(ScreenedHead(weight, exact).argmax(x), exact.linear(x, None).argmax(-1))


class Rounded:
    """A checkpoint whose matrices bf16 holds exactly."""

    def __init__(self, checkpoint: FolderCheckpoint) -> None:
        self._checkpoint = checkpoint
        self.config, self.num_bytes = checkpoint.config, checkpoint.num_bytes

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, int]]:
        for name, tensor, num_bytes in self._checkpoint.tensors():
            yield name, tensor.bfloat16().float() if tensor.dim() == 2 else tensor, num_bytes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("packed", [True, False])
def test_a_model_is_as_exact_as_in_fp32(tiny_model: Callable[[str], Tiny], family: str, packed: bool) -> None:
    """In steps of any size."""
    checkpoint = Rounded(tiny_model(family).checkpoint)
    model = build_model(checkpoint, dtype=torch.float32, weight_dtype=torch.bfloat16, pack_tied_head=packed)
    assert model.weight_dtype == torch.bfloat16
    tokens = torch.randint(0, 160, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    want = Harness(build_model(checkpoint, dtype=torch.float32)).prefill(Request(tokens), 40)
    for chunk in (40, 7, 1):
        torch.testing.assert_close(Harness(model).prefill(Request(tokens), chunk), want, atol=1e-4, rtol=1e-4)
