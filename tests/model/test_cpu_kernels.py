"""Each compiled kernel against plain torch, in shapes that no vector width divides; and life without numba."""

import builtins
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cygnet.base.errors import ConfigError
from cygnet.model import ops as ops_module
from cygnet.model.attention import select_backend
from cygnet.model.attention.torch_cpu import TorchBackend
from cygnet.model.cpu import kernels
from cygnet.model.cpu.kernels import numba_works
from cygnet.model.description import AttentionSpec, RopeSpec
from cygnet.model.layers import RmsNorm
from cygnet.model.ops import StepOps, TorchOps, select_ops
from cygnet.model.rope import cos_sin, inverse_frequencies

needs_numba = pytest.mark.skipif(not numba_works(), reason="needs numba")
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
sizes = st.sampled_from([1, 2, 7, 16, 33, 128, 640])


def numba_ops() -> StepOps:
    return select_ops("numba", CPU, torch.float32)


@pytest.fixture(autouse=True, params=["alone", "team"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test on one thread and, in the smallest pieces, on three."""
    if request.param == "team" and numba_works():
        from cygnet.model.cpu import ops

        monkeypatch.setattr(ops, "ALONE", 0)
        monkeypatch.setattr(ops, "PIECE", 5)
        monkeypatch.setattr(ops, "num_threads", lambda: 3)


def norm(size: int, generator: torch.Generator, rows: int = 1) -> RmsNorm:
    made = RmsNorm(size, eps=1e-6, offset=0.0, dtype=torch.float32, device=CPU, rows=rows)
    made.weight.copy_(torch.randn(made.weight.shape, generator=generator))
    return made


def assert_like(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal to a few roundings of the dtype."""
    assert got.dtype == want.dtype
    tolerance = 2e-6 if got.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@needs_numba
@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 9), size=sizes, branch=st.booleans(), post=st.booleans(), seed=st.integers(0, 99))
def test_join(dtype: torch.dtype, rows: int, size: int, branch: bool, post: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, added = (torch.randn(rows, size, generator=generator).to(dtype) for _ in range(2))
    post_norm, next_norm = norm(size, generator) if post else None, norm(size, generator)
    args = (added if branch else None, post_norm, next_norm)
    want_x, want = TorchOps().join(x.clone(), *args)
    got_x, got = numba_ops().join(x.clone(), *args)
    assert_like(got_x, want_x)
    assert_like(got, want)


@needs_numba
@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    dims=st.sampled_from([(4, 4, 4), (24, 16, 8), (34, 5, 34), (64, 64, 16)]),
    normed=st.booleans(),
    value_scale=st.sampled_from([1.0, 0.7]),
    seed=st.integers(0, 99),
)
def test_heads(
    dtype: torch.dtype,
    rows: int,
    kv_heads: int,
    group: int,
    dims: tuple[int, int, int],
    normed: bool,
    value_scale: float,
    seed: int,
) -> None:
    key_dim, value_dim, rotary = dims
    rope = RopeSpec(10_000.0, rotary)
    spec = AttentionSpec(
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        scale=1.0,
        rope=rope,
        value_scale=value_scale,
    )
    generator = torch.Generator().manual_seed(seed)
    width = (spec.num_heads + kv_heads) * key_dim + kv_heads * value_dim
    qkv = torch.randn(rows, width, generator=generator).to(dtype)
    qk_norm = norm(key_dim, generator, rows=spec.num_heads + kv_heads) if normed else None
    positions = torch.randint(0, 5000, (rows,), generator=generator)
    ours, plain = numba_ops(), TorchOps()
    got, want = (
        ops.heads(spec, qkv, qk_norm, cos_sin(inverse_frequencies(rope), positions, ops.rope_dtype(dtype)))
        for ops in (ours, plain)
    )
    for one, other in zip(got, want, strict=True):
        tolerance = 1e-5 if dtype == torch.float32 else 5e-2
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


@needs_numba
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh", "gelu"])
@settings(deadline=None, max_examples=25)
@given(rows=st.integers(1, 9), size=sizes, scale=st.sampled_from([1.0, 30.0]), seed=st.integers(0, 99))
def test_gated(dtype: torch.dtype, name: str, rows: int, size: int, scale: float, seed: int) -> None:
    x = (torch.randn(rows, 2 * size, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)
    # In fp64 where the kernel does it: torch's own tanh form loses digits where the gate closes.
    exact = x if name == "gelu" else x.double()
    got, want = numba_ops().gated(x, name), TorchOps().gated(exact, name).to(dtype)
    tolerance = 5e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@needs_numba
@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 5), size=sizes, levels=st.sampled_from([1, 3, 1000]), seed=st.integers(0, 99))
def test_argmax_takes_the_first_of_equals(dtype: torch.dtype, rows: int, size: int, levels: int, seed: int) -> None:
    x = torch.randint(-levels, levels + 1, (rows, size), generator=torch.Generator().manual_seed(seed)).to(dtype)
    got = numba_ops().argmax(x * 0.25)
    assert got.tolist() == [row.index(max(row)) for row in (x * 0.25).tolist()]


@needs_numba
@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_of_zeros_infinities_and_nan(dtype: torch.dtype) -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[-inf, -0.0, 0.0], [-inf, -inf, -inf], [1.0, inf, nan], [3.0, inf, inf], [-2.0, -1.0, -3.0]])
    assert numba_ops().argmax(x.to(dtype)).tolist() == [1, 0, 2, 1, 1]


@needs_numba
def test_nan_stays_with_its_row() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 40, generator=generator)
    x[1, 7] = float("nan")
    weights = norm(40, generator)
    normed = numba_ops().join(x.clone(), None, None, weights)[1]
    gated = numba_ops().gated(x, "silu")
    for out in (normed, gated):
        assert out.isnan().any(dim=1).tolist() == [False, True, False]


@needs_numba
def test_fp64_is_left_to_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    assert torch.equal(numba_ops().gated(x, "silu"), TorchOps().gated(x, "silu"))
    assert torch.equal(numba_ops().argmax(x), x.argmax(1))


@pytest.fixture
def no_numba(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if numba were not installed."""
    real = builtins.__import__

    def blocked(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "numba":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    kernels.numba_works.cache_clear()
    monkeypatch.setattr(builtins, "__import__", blocked)
    yield
    kernels.numba_works.cache_clear()


@pytest.mark.usefixtures("no_numba")
def test_without_numba_auto_means_torch() -> None:
    assert not kernels.numba_works()
    assert isinstance(select_backend("auto", CPU), TorchBackend)
    assert type(ops_module.select_ops("auto", CPU, torch.bfloat16)) is TorchOps


@pytest.mark.usefixtures("no_numba")
def test_without_numba_asking_for_it_is_an_error_with_the_remedy() -> None:
    for ask in (lambda: select_backend("numba", CPU), lambda: select_ops("numba", CPU, torch.float32)):
        with pytest.raises(ConfigError, match=r"pip install 'cygnet\[cpu\]'"):
            ask()
