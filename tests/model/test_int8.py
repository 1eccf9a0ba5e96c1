"""int8 weights: exact rounding, every way to multiply, and whole models against their own rounded weights."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cygnet.base.config import resolve
from cygnet.base.errors import ConfigError
from cygnet.engine.runtime import setup
from cygnet.engine.runtime.setup import WeightKinds, choose_kv_dtype, choose_weights
from cygnet.model import int8
from cygnet.model.decoder import HybridModel
from cygnet.model.int8 import FEW, Int8Weight
from cygnet.model.loader import build_model
from model.harness import Harness, Request
from model.tiny import FAMILIES, Tiny

DTYPES = [torch.float32, torch.bfloat16]


def matrix(out: int, size: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(out, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def restored(weight: Int8Weight) -> torch.Tensor:
    return weight.panels.wide(0, len(weight.panels.panels), torch.float32)


@settings(deadline=None, max_examples=40)
@given(out=st.integers(1, 70), size=st.integers(1, 70), seed=st.integers(0, 99))
def test_each_weight_is_off_by_half_a_step_at_most(out: int, size: int, seed: int) -> None:
    exact = matrix(out, size, seed)
    kept = Int8Weight(exact, keep_packed=False)
    step = exact.abs().amax(1, keepdim=True) / 127
    assert ((restored(kept) - exact).abs() <= step * 0.501).all()
    torch.testing.assert_close(kept.rows(torch.tensor([0, out - 1]), torch.float32), restored(kept)[[0, out - 1]])


def test_a_row_of_zeros_stays_zero() -> None:
    kept = Int8Weight(torch.zeros(3, 8), keep_packed=True)
    assert not kept.linear(torch.ones(1, 8), None).any()
    assert not kept.linear(torch.ones(9, 8), None).any()


@pytest.mark.parametrize("way", ["default", "bytes only", "no numba"])
@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, FEW + 3),
    out=st.sampled_from([1, 5, 64, 129]),
    size=st.sampled_from([1, 3, 16, 65, 1100]),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products(way: str, dtype: torch.dtype, rows: int, out: int, size: int, bias: bool, seed: int) -> None:
    kept = Int8Weight(matrix(out, size, seed, dtype), keep_packed=way == "default")
    x, b = matrix(rows, size, seed + 1, dtype), matrix(1, out, seed + 2, dtype)[0] if bias else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(int8, "_SLICE", 100)
        if way == "no numba":
            patch.setattr(int8, "numba_works", lambda: False)
        got = kept.linear(x, b)
    want = x.float() @ restored(kept).t() + (0 if b is None else b.float())
    # The kernel rounds activations to 15 bits of the row's largest.
    tolerance = 4e-2 if dtype == torch.bfloat16 else 1e-4 if way == "no numba" else 5e-4
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), want, atol=tolerance * size**0.5, rtol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("packed", [True, False])
def test_a_model_gives_the_same_logits_in_steps_of_any_size(
    tiny_model: Callable[[str], Tiny], family: str, packed: bool
) -> None:
    """fp32 activations, rounded to 15 bits in small steps; and not far from the exact weights' logits.

    By the median: a router near a tie may pick another expert.
    """
    tiny = tiny_model(family)
    model = build_model(tiny.checkpoint, dtype=torch.float32, int8=True, pack_tied_head=packed)
    tokens = torch.randint(0, 160, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    logits = [Harness(model).prefill(Request(tokens), chunk) for chunk in (40, 7, 1)]
    torch.testing.assert_close(logits[1], logits[0], atol=1e-2, rtol=0)
    torch.testing.assert_close(logits[2], logits[0], atol=1e-2, rtol=0)
    exact = Harness(tiny.build()).prefill(Request(tokens), 40)
    assert 0 < (logits[0] - exact).abs().median() < 0.3


def test_weight_dtype_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(*sets: str, device: str = "cpu") -> WeightKinds:
        return choose_weights(resolve(sets=sets).config, torch.device(device))

    half, single = torch.bfloat16, torch.float32
    assert chosen("model.weight_dtype=int8", "model.dtype=float32") == WeightKinds(single, single, True)
    assert chosen("model.weight_dtype=float32") == WeightKinds(single, single, False)
    assert chosen("model.dtype=float32") == WeightKinds(single, single, False)
    assert chosen("model.weight_dtype=bfloat16", "model.dtype=bfloat16") == WeightKinds(half, half, False)
    assert chosen("model.weight_dtype=bfloat16", "model.dtype=float32") == WeightKinds(single, half, False)
    monkeypatch.setattr(setup, "cpu_multiplies_bf16", lambda: False)
    for sets in ((), ("model.weight_dtype=bfloat16",)):
        assert chosen(*sets) == WeightKinds(single, half, False)
    monkeypatch.setattr(setup, "cpu_multiplies_bf16", lambda: True)
    for sets in ((), ("model.weight_dtype=bfloat16",)):
        assert chosen(*sets) == WeightKinds(half, half, False)
    with pytest.raises(ConfigError, match="don't go together"):
        chosen("model.weight_dtype=float32", "model.dtype=bfloat16")
    with pytest.raises(ConfigError, match="for CPUs"):
        chosen("model.weight_dtype=int8", device="cuda")


def test_kv_dtype(tiny_model: Callable[[str], Tiny]) -> None:
    half, single = torch.bfloat16, torch.float32

    def chosen(model: HybridModel, *sets: str) -> torch.dtype:
        return choose_kv_dtype(resolve(sets=sets).config, model)

    checkpoint = tiny_model("gemma3").checkpoint
    exact, widened, rounded = (
        build_model(checkpoint, dtype=single, weight_dtype=weights, int8=int8)
        for weights, int8 in ((None, False), (half, False), (None, True))
    )
    assert [chosen(model) for model in (exact, widened, rounded)] == [single, half, half]
    assert chosen(widened, "model.dtype=float32") == single  # fp32 was asked for
    assert chosen(widened, "kv.dtype=float32") == single
    assert chosen(exact, "kv.dtype=bfloat16") == half
    narrow = build_model(checkpoint, dtype=half)
    assert chosen(narrow) == chosen(narrow, "kv.dtype=bfloat16") == half
    with pytest.raises(ConfigError, match=r"kv\.dtype = 'float32' does not go with a model in bfloat16"):
        chosen(narrow, "kv.dtype=float32")
