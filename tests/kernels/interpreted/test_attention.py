"""The `triton` backend against the spelled-out reference, over generated batches with poisoned dead slots."""

import dataclasses

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cygnet.model.attention import select_backend
from cygnet.model.attention.triton_paged import TritonBackend, TritonPlan
from cygnet.model.batch import ForwardBatch, GroupBatch
from cygnet.model.description import AttentionSpec, RopeSpec
from cygnet.model.kernels import tiles
from model.test_attention import Case, build, run

CPU = torch.device("cpu")
ROPE = RopeSpec(10_000.0, 4)
TOLERANCE = {torch.float32: (4e-6, 1e-5), torch.bfloat16: (0.03, 0.03), torch.float16: (4e-3, 4e-3)}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Head dims that need padding and that don't, K dim unlike V dim, groups of 1, 2, 3 (folded rows with a rest)."""
    kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3, 8]))
    window = draw(st.one_of(st.none(), st.integers(1, 40)))
    spec = AttentionSpec(
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        key_dim=draw(st.sampled_from([12, 16, 24])),
        value_dim=draw(st.sampled_from([8, 16, 20])),
        scale=draw(st.sampled_from([0.25, 0.6])),
        rope=ROPE,
        window=window,
        sinks=draw(st.booleans()),
    )
    requests = []
    for _ in range(draw(st.integers(1, 4))):
        before = draw(st.integers(0, 90))
        now = draw(st.one_of(st.just(1), st.integers(1, 25)))
        floor = draw(st.integers(0, before)) if window is not None else 0
        requests.append((before, now, floor, draw(st.booleans())))
    return Case(spec, draw(st.sampled_from([7, 16, 32])), tuple(requests), draw(st.integers(0, 1000)))


def check(case: Case, dtype: torch.dtype) -> None:
    got, got_kv = run("triton", case, dtype)
    want, want_kv = run("reference", case, dtype)
    atol, rtol = TOLERANCE[dtype]
    torch.testing.assert_close(got.float(), want.float(), atol=atol, rtol=rtol)
    torch.testing.assert_close(got_kv.key, want_kv.key, atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(got_kv.value, want_kv.value, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@settings(deadline=None, max_examples=10)
@given(case=cases(), splits=st.sampled_from([1, 2, 5]), tile_keys=st.sampled_from([16, 32]))
def test_equals_the_reference(dtype: torch.dtype, case: Case, splits: int, tile_keys: int) -> None:
    small = tiles.AttentionTiles(16, tile_keys, 4, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "num_splits", lambda *_: splits)
        patch.setattr(tiles, "prefill_tiles", lambda *_: small)
        patch.setattr(tiles, "decode_tiles", lambda *_: small)
        check(case, dtype)


@settings(deadline=None, max_examples=15)
@given(case=cases(), data=st.data())
def test_fewer_queries_than_slots(case: Case, data: st.DataObject) -> None:
    """In the last layer only some requests' last tokens ask; the KV of all tokens is written."""
    wanted = sorted(data.draw(st.sets(st.integers(0, len(case.requests) - 1))))
    got, kv = run("triton", case, torch.float32, wanted)
    want, want_kv = run("reference", case, torch.float32, wanted)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(kv.key, want_kv.key, atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(kv.value, want_kv.value, atol=0, rtol=0, equal_nan=True)


def mimo(window: int | None) -> AttentionSpec:
    """Head dims of MiMo-V2, where K and V differ and K is no power of two."""
    kv_heads = 1 if window is None else 2
    return AttentionSpec(
        num_heads=4,
        num_kv_heads=kv_heads,
        key_dim=192,
        value_dim=128,
        scale=192**-0.5,
        rope=ROPE,
        window=window,
        sinks=window is not None,
    )


@pytest.mark.parametrize("window", [None, 128])
def test_mimo_heads_with_the_tiles_of_a_gpu(window: int | None) -> None:
    requests = ((0, 70, 0, False), (700, 1, 0, False), (300, 9, 0, True), (130, 1, 0, False))
    check(Case(mimo(window), 16, requests, 3), torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_large_scores_do_not_overflow(dtype: torch.dtype) -> None:
    spec = dataclasses.replace(mimo(128), scale=8.0)
    check(Case(spec, 16, ((90, 20, 0, False), (200, 1, 0, False)), 1), dtype)


def decode_step(lengths: tuple[int, ...], spec: AttentionSpec, seed: int) -> tuple[ForwardBatch, GroupBatch]:
    batch, group, _ = build(Case(spec, 16, tuple((n - 1, 1, 0, False) for n in lengths), seed), torch.float32)
    return batch, group


@pytest.mark.parametrize("window", [None, 20])
def test_a_static_plan_serves_every_batch_of_its_size(window: int | None) -> None:
    """As a CUDA graph uses it: tensors keep their addresses, only their contents change."""
    spec = AttentionSpec(
        num_heads=4, num_kv_heads=2, key_dim=16, value_dim=16, scale=0.3, rope=ROPE, window=window, sinks=True
    )
    backend = TritonBackend()
    longest, group = decode_step((600, 1, 1), spec, 0)
    plan = backend.static_plan(spec, longest, group)
    addresses = [t.data_ptr() for t in (plan.table, plan.slots, plan.packed)]
    assert plan.num_splits > 1 or window is not None
    for seed, lengths in enumerate([(600, 3, 77), (1, 2, 300), (16, 17, 500)]):
        batch, now = decode_step(lengths, spec, seed)
        width = now.block_table.shape[1]
        plan.table[:, :width].copy_(now.block_table)
        plan.slots.copy_(now.slot_mapping)
        backend.refill(plan, batch, now)
        assert [t.data_ptr() for t in (plan.table, plan.slots, plan.packed)] == addresses
        q, k, v = torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 16)
        sinks = torch.randn(4)
        got = backend.attend(spec, q, k, v, sinks, plan, now.layers[0])
        reference = select_backend("reference", CPU)
        want = reference.attend(spec, q, k, v, sinks, reference.plan(spec, batch, now), now.layers[0])
        torch.testing.assert_close(got, want, atol=4e-6, rtol=1e-5)
    with pytest.raises(ValueError, match="of the shape it was made for"):
        backend.refill(plan, *decode_step((3, 3), spec, 0))


def test_a_row_without_keys_gives_zero() -> None:
    """Padding rows of a captured step may have a sequence length of 0 and the slot -1."""
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, key_dim=16, value_dim=16, scale=0.3, rope=ROPE)
    batch, group = decode_step((40, 1), spec, 0)
    batch.seq_lens[1] = 0
    group.slot_mapping[1] = -1
    before = group.layers[0].key.clone()
    backend = TritonBackend()
    for splits in (1, 3):
        plan = dataclasses.replace(backend.plan(spec, batch, group), num_splits=splits)
        q, k, v = torch.randn(2, 2, 16), torch.randn(2, 1, 16), torch.randn(2, 1, 16)
        out = backend.attend(spec, q, k, v, None, plan, group.layers[0])
        assert not out[1].any()
        assert out[0].isfinite().all()
    written = before.isnan() & ~group.layers[0].key.isnan()
    assert written.flatten(2).any(-1).sum() == 1, "only the first row's slot is written"


@pytest.mark.parametrize("now", [1, 20])
def test_swa_reads_one_window_whatever_the_prefix(now: int) -> None:
    """All slots but those of the last window and the step are NaN *and* their table entries point nowhere."""
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, key_dim=16, value_dim=16, scale=0.5, rope=ROPE, window=30)
    batch, group, layer = build(Case(spec, 16, ((3000, now, 0, False),), 0), torch.float32)
    first_read = 3000 - 30
    group.block_table[0, : first_read // 16] = 10**12
    for slot in range(first_read // 16 * 16, first_read):
        layer.key[group.block_table[0, slot // 16], slot % 16] = float("nan")
        layer.value[group.block_table[0, slot // 16], slot % 16] = float("nan")
    q, k, v = torch.randn(now, 2, 16), torch.randn(now, 1, 16), torch.randn(now, 1, 16)
    outs = []
    for name in ("triton", "reference"):
        backend = select_backend(name, CPU)
        outs.append(backend.attend(spec, q, k, v, None, backend.plan(spec, batch, group), layer))
    torch.testing.assert_close(*outs, atol=4e-6, rtol=1e-5)


def test_tiles_cover_every_query_once() -> None:
    spec = AttentionSpec(num_heads=3, num_kv_heads=1, key_dim=16, value_dim=16, scale=0.5, rope=ROPE)
    lengths = (1, 100, 7, 1, 43)
    batch, group, _ = build(Case(spec, 16, tuple((5, n, 0, False) for n in lengths), 0), torch.float32)
    plan: TritonPlan = TritonBackend().plan(spec, batch, group)
    assert plan.decodes.tolist() == [0, 3]
    covered = [(r, q) for r, first in plan.query_tiles.tolist() for q in range(first, first + plan.queries)]
    assert {(r, q) for r, q in covered if q < lengths[r]} == {(r, q) for r in (1, 2, 4) for q in range(lengths[r])}
    assert len(covered) == len(set(covered))
    assert plan.requests.tolist()[-1][0] == sum(lengths)


@example(num_decodes=1, kv_heads=1, keys=100_000, processors=132)
@given(
    num_decodes=st.integers(1, 512),
    kv_heads=st.integers(1, 64),
    keys=st.integers(1, 1 << 20),
    processors=st.integers(1, 200),
)
def test_splits_are_bounded(num_decodes: int, kv_heads: int, keys: int, processors: int) -> None:
    splits = tiles.num_splits(num_decodes, kv_heads, keys, processors)
    assert 1 <= splits <= tiles.MAX_SPLITS
    assert splits == 1 or keys // splits >= tiles.MIN_SPLIT_KEYS
    assert splits == 1 or (splits - 1) * num_decodes * kv_heads < tiles.PROGRAMS_PER_PROCESSOR * processors
