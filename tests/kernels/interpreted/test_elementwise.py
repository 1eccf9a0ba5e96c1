"""Norms, rotation and gated activations against the layers' plain PyTorch code."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cygnet.model.kernels import triton_kernels
from cygnet.model.kernels.fused import ACTIVATIONS
from cygnet.model.layers import ACTIVATIONS as PLAIN
from cygnet.model.layers import RmsNorm, gated
from cygnet.model.rope import rotate

CPU = torch.device("cpu")
# The interpreter's sigmoid of a large negative number is 1 / inf in numpy.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
DTYPES = {torch.float32: (5e-6, 5e-6), torch.bfloat16: (1e-2, 2e-2), torch.float16: (2e-3, 2e-3)}
SIZES = st.integers(1, 70)


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == want.dtype == dtype
    assert got.shape == want.shape
    atol, rtol = DTYPES[dtype]
    torch.testing.assert_close(got.float(), want.float(), atol=atol, rtol=rtol)


def random(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul_(2).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None, max_examples=12)
@given(tokens=st.integers(1, 5), rows=st.integers(1, 5), size=SIZES, seed=st.integers(0, 99))
def test_rms_norm(dtype: torch.dtype, tokens: int, rows: int, size: int, seed: int) -> None:
    """Also of a view into wider rows, as queries and keys are norms of a part of the projection."""
    norm = RmsNorm(size, eps=1e-6, offset=0.0, dtype=dtype, device=CPU, rows=rows)
    norm.weight.copy_(random(seed + 1, *norm.weight.shape, dtype=torch.float32))
    wide = random(seed, tokens, rows * size + 3, dtype=dtype)
    x = wide[:, : rows * size]
    x = x.view(tokens, size) if rows == 1 else x.view(tokens, rows, size)
    close(triton_kernels().rms_norm(x, norm.weight, norm.eps), norm(x), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None, max_examples=10)
@given(tokens=st.integers(1, 5), size=SIZES, seed=st.integers(0, 99))
def test_norm_of_a_sum(dtype: torch.dtype, tokens: int, size: int, seed: int) -> None:
    norm = RmsNorm(size, eps=1e-6, offset=0.0, dtype=dtype, device=CPU)
    norm.weight.copy_(random(seed + 1, size, dtype=torch.float32))
    x, residual = random(seed, tokens, size, dtype=dtype), random(seed + 2, tokens, size, dtype=dtype)
    total, normed = triton_kernels().add_rms_norm(x, residual, norm.weight, norm.eps)
    # The interpreter cuts bf16 off where the hardware rounds it: one unit of the last place.
    torch.testing.assert_close(total, x + residual, atol=0, rtol=2**-7 if dtype == torch.bfloat16 else 0)
    close(normed, norm(total), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None, max_examples=12)
@given(
    tokens=st.integers(1, 4),
    heads=st.integers(1, 5),
    half=st.integers(1, 20),
    rest=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_rotation(dtype: torch.dtype, tokens: int, heads: int, half: int, rest: int, seed: int) -> None:
    """Partial too, from a view into wider rows."""
    dim = 2 * half + rest
    x = random(seed, tokens, heads * dim + 5, dtype=dtype)[:, : heads * dim].view(tokens, heads, dim)
    angles = random(seed + 1, tokens, 1, half, dtype=torch.float32)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    got, want = triton_kernels().rotate(x, cos, sin), rotate(x, cos, sin)
    close(got, want, dtype)
    torch.testing.assert_close(got[..., 2 * half :], x[..., 2 * half :], atol=0, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
@settings(deadline=None, max_examples=4)
@given(tokens=st.integers(1, 4), size=st.integers(1, 40), seed=st.integers(0, 99))
def test_gated_activation(name: str, dtype: torch.dtype, tokens: int, size: int, seed: int) -> None:
    x = random(seed, tokens, 2 * size, dtype=dtype)
    close(triton_kernels().gated(x, name), gated(x, PLAIN[name]), dtype)


def test_rows_wider_than_a_tile() -> None:
    x = random(0, 2, 2 * 2500, dtype=torch.float32)
    close(triton_kernels().gated(x, "silu"), gated(x, PLAIN["silu"]), torch.float32)


def test_every_fused_activation_has_a_plain_one() -> None:
    assert set(PLAIN) >= ACTIVATIONS
