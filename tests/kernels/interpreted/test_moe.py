"""Routing, sorting by expert and grouped products against the plain mixture-of-experts layer."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cygnet.model.description import MoeSpec
from cygnet.model.kernels import tiles
from cygnet.model.kernels.fused import ACTIVATIONS, TritonKernels
from cygnet.model.kernels.ops import TritonOps
from cygnet.model.moe import MoeLayer
from cygnet.model.ops import TorchOps

CPU = torch.device("cpu")
# The interpreter's sigmoid of a large negative number is 1 / inf in numpy.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
DTYPES = {torch.float32: 2e-6, torch.bfloat16: 0.03, torch.float16: 3e-3}
"""Error allowed, as a share of the largest result: sums of large terms of both signs are rounded on the way."""


@st.composite
def specs(draw: st.DrawFn) -> MoeSpec:
    num_experts = draw(st.integers(1, 9))
    return MoeSpec(
        num_experts=num_experts,
        top_k=draw(st.integers(1, num_experts)),
        intermediate_size=draw(st.sampled_from([8, 20, 70])),
        activation=draw(st.sampled_from(sorted(ACTIVATIONS))),
        scoring=draw(st.sampled_from(["sigmoid", "softmax"])),
        selection_bias=draw(st.booleans()),
        norm_topk_prob=draw(st.booleans()),
        routed_scaling=draw(st.sampled_from([1.0, 2.5])),
        bias=draw(st.booleans()),
        router_bias=draw(st.booleans()),
        limit=draw(st.sampled_from([None, 0.5])),
        up_offset=draw(st.sampled_from([0.0, 1.0])),
    )


def layer_of(spec: MoeSpec, hidden: int, dtype: torch.dtype, seed: int) -> MoeLayer:
    layer = MoeLayer(spec, hidden, dtype=dtype, device=CPU)
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return layer


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None, max_examples=10)
@given(spec=specs(), tokens=st.integers(1, 24), hidden=st.sampled_from([12, 70]), seed=st.integers(0, 99))
def test_equals_the_plain_layer(dtype: torch.dtype, spec: MoeSpec, tokens: int, hidden: int, seed: int) -> None:
    layer = layer_of(spec, hidden, dtype, seed)
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed + 1)).to(dtype)
    want = layer(x, TorchOps())
    got = layer(x, TritonOps())
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), want.float(), atol=DTYPES[dtype] * float(want.abs().max()), rtol=0)


@settings(deadline=None, max_examples=20)
@given(spec=specs(), tokens=st.integers(1, 12), seed=st.integers(0, 99))
def test_routing_equals_the_plain_one(spec: MoeSpec, tokens: int, seed: int) -> None:
    layer = layer_of(dataclasses.replace(spec, router_bias=False), 8, torch.float32, seed)
    x = torch.randn(tokens, 8, generator=torch.Generator().manual_seed(seed))
    want_experts, want_weights = layer.route(x)
    experts, weights = TritonKernels().route(spec, x @ layer.router.t(), layer.selection_bias)
    assert experts.dtype == torch.int32
    order, want_order = experts.long().argsort(1), want_experts.argsort(1)
    assert torch.equal(experts.long().gather(1, order), want_experts.gather(1, want_order))
    torch.testing.assert_close(weights.gather(1, order), want_weights.gather(1, want_order), atol=1e-6, rtol=1e-5)


def test_of_equal_experts_the_first_is_taken() -> None:
    spec = MoeSpec(6, 3, 8, "silu", "softmax")
    experts, weights = TritonKernels().route(spec, torch.zeros(2, 6), None)
    assert experts.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))


@settings(deadline=None, max_examples=20)
@given(
    experts=st.lists(st.integers(0, 6), min_size=1, max_size=60),
    tile_rows=st.sampled_from([1, 4, 16]),
)
def test_sort_is_stable_and_tiles_cover_each_expert(experts: list[int], tile_rows: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cygnet.model.kernels.fused._SORT_TILE", 16)
        order, tile_experts, first_rows, row_ends = TritonKernels().sort(
            torch.tensor(experts, dtype=torch.int32), 7, tile_rows
        )
    assert order.tolist() == sorted(range(len(experts)), key=lambda pair: experts[pair])
    covered = []
    for expert, first in zip(tile_experts.tolist(), first_rows.tolist(), strict=True):
        if expert >= 0:
            covered += [(expert, row) for row in range(first, min(first + tile_rows, row_ends[expert]))]
    assert covered == [(experts[pair], row) for row, pair in enumerate(order.tolist())]


@pytest.mark.parametrize(("pairs", "rows"), [(8, 16), (32 * 40, 64), (32 * 1000, 64)])
def test_tiles_grow_with_the_load_of_an_expert(pairs: int, rows: int) -> None:
    assert tiles.moe_tiles(pairs, 32, 2).rows <= rows
