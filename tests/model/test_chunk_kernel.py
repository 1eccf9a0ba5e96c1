"""The compiled kernel for chunks at the edges of its tiles, panels and vectors, and without the newest instructions."""

import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cygnet.model.attention import chunk_pieces, numba_cpu, select_backend
from cygnet.model.attention.chunk_pieces import panels_per_piece, plan_pieces
from cygnet.model.batch import ForwardBatch, GroupBatch, LayerKV
from cygnet.model.cpu.chunk_layout import PANELS, ROWS, TILE
from cygnet.model.cpu.kernels import numba_works
from cygnet.model.description import AttentionSpec, RopeSpec
from model.test_attention import Case, build, run

pytestmark = pytest.mark.skipif(not numba_works(), reason="needs numba")
CPU = torch.device("cpu")
edges = st.sampled_from([1, 7, 8, 9, TILE - 1, TILE, TILE + 1, 2 * TILE + 3])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 4), (1, 5), (2, 3), (1, 33)]))
    key_dim, value_dim = draw(st.sampled_from([(64, 48), (32, 16), (34, 17), (6, 40), (128, 7)]))
    window = draw(st.one_of(st.none(), edges))
    spec = AttentionSpec(
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        scale=draw(st.sampled_from([0.02, 0.2, 3.0])),
        rope=RopeSpec(10_000.0, 4),
        window=window,
        sinks=draw(st.booleans()),
    )
    requests = []
    for _ in range(draw(st.integers(1, 2))):
        before = draw(st.one_of(st.just(0), edges))
        floor = draw(st.integers(0, before)) if window is not None else 0
        requests.append((before, draw(edges), floor, draw(st.booleans())))
    return Case(spec, draw(st.sampled_from([1, 5, 16])), tuple(requests), draw(st.integers(0, 1000)))


@pytest.mark.parametrize("panels", [1, 2, PANELS])
@pytest.mark.parametrize(
    ("dtype", "cached"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
)
@settings(deadline=None, max_examples=15)
@given(case=cases())
def test_chunks_equal_the_reference(dtype: torch.dtype, cached: torch.dtype, panels: int, case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_pieces, "panels_per_piece", lambda *args: panels)
        patch.setattr(numba_cpu, "CHUNKS_ALONE", 0)
        patch.setattr(numba_cpu, "num_threads", lambda: 3)
        got, _ = run("numba", case, dtype, cached=cached)
    want, _ = run("reference", case, dtype, cached=cached)
    # Large scores have large roundings, of which exp makes relative ones.
    size = case.spec.scale * case.spec.key_dim**0.5
    tolerance = 1e-5 * max(1.0, size) if dtype == torch.float32 else 0.03 * max(1.0, case.spec.scale)
    torch.testing.assert_close(got.float(), want.float(), atol=tolerance, rtol=tolerance)


def random_layer(spec: AttentionSpec, num_keys: int, dtype: torch.dtype) -> tuple[LayerKV, torch.Tensor]:
    """KV of `num_keys` positions in order, and a query for each."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(num_keys, 1, spec.num_kv_heads, spec.key_dim, generator=generator).to(dtype)
    values = torch.randn(num_keys, 1, spec.num_kv_heads, spec.value_dim, generator=generator).to(dtype)
    query = torch.randn(num_keys, spec.num_heads, spec.key_dim, generator=generator).to(dtype)
    return LayerKV(keys, values), query


def attend_from(spec: AttentionSpec, layer: LayerKV, query: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Positions start .. end - 1 as one chunk; their KV is in the cache."""
    table = torch.arange(end).unsqueeze(0)
    group = GroupBatch(table, [0], [0], torch.full((end - start,), -1), [layer])
    tokens = torch.zeros(end - start, dtype=torch.int64)
    batch = ForwardBatch(tokens, tokens, [0, end - start], [end], 1, group, group)
    backend = select_backend("numba", CPU)
    nothing = query.new_zeros(end - start, spec.num_kv_heads, spec.key_dim)
    plan = backend.plan(spec, batch, group)
    return backend.attend(spec, query[start:end], nothing, nothing[..., : spec.value_dim], None, plan, layer)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(
    ("dtype", "cached"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
)
def test_a_prompt_gives_the_same_bits_however_it_is_cut(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, cached: torch.dtype, window: int | None
) -> None:
    spec = AttentionSpec(
        num_heads=6, num_kv_heads=2, key_dim=32, value_dim=24, scale=0.5, rope=RopeSpec(1e4, 4), window=window
    )
    layer, query = random_layer(spec, 300, cached)
    query = query.to(dtype)
    monkeypatch.setattr(numba_cpu, "CHUNKS_ALONE", 1 << 60)
    whole = attend_from(spec, layer, query, 0, 300)
    monkeypatch.setattr(numba_cpu, "CHUNKS_ALONE", 0)
    monkeypatch.setattr(numba_cpu, "num_threads", lambda: 3)
    for cuts in ([0, 300], [0, 2, 67, 128, 300], [0, 100, 110, 250, 300]):
        parts = [attend_from(spec, layer, query, a, b) for a, b in pairwise(cuts)]
        assert torch.equal(torch.cat(parts), whole)


def test_nan_stays_with_the_queries_that_see_it() -> None:
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, key_dim=32, value_dim=32, scale=0.5, rope=RopeSpec(1e4, 4))
    layer, query = random_layer(spec, 100, torch.bfloat16)
    query[3, 1] = float("nan")
    out = attend_from(spec, layer, query, 0, 100)
    broken = out.isnan().any(2)
    assert broken[3].tolist() == [False, True]
    assert int(broken.sum()) == 1


def test_pieces_cover_every_row_and_the_longest_come_first() -> None:
    spec = AttentionSpec(
        num_heads=12, num_kv_heads=2, key_dim=4, value_dim=4, scale=0.5, rope=RopeSpec(1e4, 4), window=30
    )
    case = Case(spec, 4, ((50, 90, 0, False), (0, 1, 0, False), (10, 3, 5, False)), 0)
    batch, group, _ = build(case, torch.float32)
    for threads in (1, 2, 64):
        pieces, cost = plan_pieces(spec, batch, group, [0, 2], threads)
        rows = {(int(p[0]), int(p[3]), int(p[1]) + i) for p in pieces for i in range(p[2])}
        want = {(start, head, row) for start, n in ((0, 90), (91, 3)) for head in (0, 1) for row in range(6 * n)}
        assert rows == want
        assert sum(int(p[2]) for p in pieces) == len(want)
        assert max(int(p[2]) for p in pieces) <= PANELS * ROWS
        assert pieces[-1, 0] == 91
        assert cost > 0


def test_pieces_suit_the_threads() -> None:
    assert panels_per_piece([64], 2) == PANELS
    assert panels_per_piece([36], 2) == 3  # 12 pieces of 3 come out even, 9 of 4 do not
    assert panels_per_piece([16], 16) == 1
    assert panels_per_piece([1, 1], 1) in range(1, PANELS + 1)


WITHOUT = {"products of pairs": ("avx512bf16",), "wide vectors": ("avx512", "avx10")}


@pytest.mark.slow
@pytest.mark.parametrize("missing", list(WITHOUT))
def test_chunks_on_a_lesser_machine(missing: str) -> None:
    from llvmlite.binding import get_host_cpu_features, get_host_cpu_name

    features = get_host_cpu_features()
    names = [name for name, present in features.items() if present and name.startswith(WITHOUT[missing])]
    if not names:
        pytest.skip("this machine is such a one")
    features.update(dict.fromkeys(names, False))
    env = os.environ | {"NUMBA_CPU_NAME": get_host_cpu_name(), "NUMBA_CPU_FEATURES": features.flatten()}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "equal or bits"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
