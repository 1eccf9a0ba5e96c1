"""Every backend against the spelled-out reference, over generated batches with poisoned dead slots."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cygnet.base.errors import ConfigError
from cygnet.model.attention import ATTENTION_BACKENDS, numba_cpu, select_backend, step_plan, torch_cpu
from cygnet.model.attention.step_plan import plan_step
from cygnet.model.batch import ForwardBatch, GroupBatch, LayerKV, Wanted
from cygnet.model.cpu.kernels import numba_works
from cygnet.model.description import AttentionSpec, RopeSpec


@dataclass(frozen=True)
class Case:
    """One generated step of one layer."""

    spec: AttentionSpec
    block_size: int
    requests: tuple[tuple[int, int, int, bool], ...]
    """Per request: tokens computed before, tokens now, first readable position, whether its KV is authoritative."""
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3, 4]))
    window = draw(st.one_of(st.none(), st.integers(1, 20)))
    spec = AttentionSpec(
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        key_dim=draw(st.sampled_from([4, 5, 12])),
        value_dim=draw(st.sampled_from([4, 8])),
        scale=draw(st.sampled_from([0.25, 0.6])),
        rope=RopeSpec(10_000.0, 4),
        window=window,
        sinks=draw(st.booleans()),
    )
    requests = []
    for _ in range(draw(st.integers(1, 5))):
        before = draw(st.integers(0, 60))
        now = draw(st.one_of(st.just(1), st.integers(1, 40)))
        floor = draw(st.integers(0, before)) if window is not None else 0
        requests.append((before, now, floor, draw(st.booleans())))
    return Case(spec, draw(st.sampled_from([1, 4, 7])), tuple(requests), draw(st.integers(0, 1000)))


def build(case: Case, dtype: torch.dtype) -> tuple[ForwardBatch, GroupBatch, LayerKV]:
    """Shuffled tables; live slots (key_floor up to the step's tokens) random, all others NaN."""
    generator = torch.Generator().manual_seed(case.seed)
    size, spec = case.block_size, case.spec
    needed = [-(-(before + now) // size) - floor // size for before, now, floor, _ in case.requests]
    num_blocks = sum(needed) + 3
    free = torch.randperm(num_blocks, generator=generator).tolist()
    keys = torch.full((num_blocks, size, spec.num_kv_heads, spec.key_dim), float("nan"), dtype=dtype)
    values = torch.full((num_blocks, size, spec.num_kv_heads, spec.value_dim), float("nan"), dtype=dtype)
    table = torch.zeros(len(needed), max(needed), dtype=torch.int64)
    slots: list[int] = []
    positions: list[int] = []
    query_start = [0]
    for r, (before, now, floor, authoritative) in enumerate(case.requests):
        blocks = [free.pop() for _ in range(needed[r])]
        table[r, : len(blocks)] = torch.tensor(blocks)
        for position in range(floor, before + now):
            block, offset = blocks[position // size - floor // size], position % size
            if position < before or authoritative:
                keys[block, offset] = torch.randn(keys.shape[2:], generator=generator).to(dtype)
                values[block, offset] = torch.randn(values.shape[2:], generator=generator).to(dtype)
            if position >= before:
                slots.append(-1 if authoritative else block * size + offset)
                positions.append(position)
        query_start.append(query_start[-1] + now)
    layer = LayerKV(keys, values)
    group = GroupBatch(
        block_table=table,
        first_block=[floor // size for _, _, floor, _ in case.requests],
        key_floor=[floor for _, _, floor, _ in case.requests],
        slot_mapping=torch.tensor(slots),
        layers=[layer],
    )
    batch = ForwardBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.tensor(positions),
        query_start=query_start,
        seq_lens=[before + now for before, now, _, _ in case.requests],
        block_size=size,
        full=group,
        swa=group,
    )
    return batch, group, layer


def run(
    backend_name: str,
    case: Case,
    dtype: torch.dtype,
    wanted: list[int] | None = None,
    cached: torch.dtype | None = None,
) -> tuple[torch.Tensor, LayerKV]:
    """With `wanted`, only the last token of those requests asks. With `cached`, KV is rounded to that dtype; the
    reference, which must not know of it, is given what the rounding left in `dtype`."""
    batch, group, layer = build(case, cached or dtype)
    if backend_name == "reference":
        layer = LayerKV(layer.key.to(dtype), layer.value.to(dtype))
    generator = torch.Generator().manual_seed(case.seed + 1)
    spec, n = case.spec, batch.num_tokens

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    query, key = random(n, spec.num_heads, spec.key_dim), random(n, spec.num_kv_heads, spec.key_dim)
    value = random(n, spec.num_kv_heads, spec.value_dim)
    if cached and backend_name == "reference":
        key, value = key.to(cached).to(dtype), value.to(cached).to(dtype)
    sinks = torch.randn(spec.num_heads, generator=generator) if spec.sinks else None
    backend = select_backend(backend_name, torch.device("cpu"))
    if wanted is not None:
        rows = torch.tensor([batch.query_start[r + 1] - 1 for r in wanted], dtype=torch.int64)
        batch, query = replace(batch, wanted=Wanted(wanted, rows)).queries_wanted(), query[rows]
    out = backend.attend(spec, query, key, value, sinks, backend.plan(spec, batch, group), layer)
    return out, layer


NEEDS = {"numba": pytest.mark.skipif(not numba_works(), reason="needs numba")}
BACKENDS = [
    pytest.param(name, marks=NEEDS.get(name, ())) for name in ATTENTION_BACKENDS if name not in ("reference", "triton")
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tiles", ["small", "default"])
@settings(deadline=None, max_examples=60)
@given(case=cases())
def test_backend_equals_the_reference(backend: str, tiles: str, case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if tiles == "small":
            patch.setattr(numba_cpu, "ALONE", 0)
            patch.setattr(numba_cpu, "CHUNKS_ALONE", 0)
            patch.setattr(numba_cpu, "KEYS_PER_PART", 3)
            patch.setattr(numba_cpu, "num_threads", lambda: 3)
            patch.setattr(torch_cpu, "QUERY_TILE", 5)
            patch.setattr(torch_cpu, "KEY_TILE", 7)
            patch.setattr(step_plan, "DECODE_ELEMENTS", 400)
        got, got_kv = run(backend, case, torch.float32)
    want, want_kv = run("reference", case, torch.float32)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(got_kv.key, want_kv.key, atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(got_kv.value, want_kv.value, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@settings(deadline=None, max_examples=40)
@given(case=cases(), data=st.data())
def test_fewer_queries_than_slots(backend: str, case: Case, data: st.DataObject) -> None:
    """Last tokens alone get what they get among all, and the KV of all is written."""
    every, every_kv = run("reference", case, torch.float32)
    wanted = sorted(data.draw(st.sets(st.integers(0, len(case.requests) - 1))))
    got, kv = run(backend, case, torch.float32, wanted)
    last = [sum(now for _, now, _, _ in case.requests[: r + 1]) - 1 for r in wanted]
    torch.testing.assert_close(got, every[last], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(kv.key, every_kv.key, atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(kv.value, every_kv.value, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=25)
@given(case=cases())
def test_backend_in_bf16(backend: str, case: Case) -> None:
    got, _ = run(backend, case, torch.bfloat16)
    want, _ = run("reference", case, torch.bfloat16)
    torch.testing.assert_close(got.float(), want.float(), atol=0.06, rtol=0.03)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=20)
@given(case=cases())
def test_kv_in_bf16_beside_fp32(backend: str, case: Case) -> None:
    got, layer = run(backend, case, torch.float32, cached=torch.bfloat16)
    want, cache = run("reference", case, torch.float32, cached=torch.bfloat16)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(layer.key.float(), cache.key, atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(layer.value.float(), cache.value, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=20)
@given(case=cases())
def test_backend_in_fp64(backend: str, case: Case) -> None:
    got, _ = run(backend, case, torch.float64)
    want, _ = run("reference", case, torch.float64)
    torch.testing.assert_close(got, want, atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("now", [1, 30])
def test_swa_reads_one_window_whatever_the_prefix(now: int) -> None:
    spec = AttentionSpec(
        num_heads=4, num_kv_heads=2, key_dim=4, value_dim=4, scale=0.5, rope=RopeSpec(1e4, 4), window=10
    )
    batch, group, _ = build(Case(spec, 4, ((5000, now, 4000, False),), 0), torch.float32)
    plan = plan_step(spec, batch, group)
    read = [p.num_keys for p in plan.decodes] + [p.num_keys for p in plan.chunks]
    assert read == [10 + now]


def test_decodes_of_unlike_lengths_are_not_padded_to_the_longest() -> None:
    spec = AttentionSpec(num_heads=1, num_kv_heads=1, key_dim=4, value_dim=4, scale=0.5, rope=RopeSpec(1e4, 4))
    lengths = (1000, 10, 11, 990, 12, 9)
    batch, group, _ = build(Case(spec, 4, tuple((n, 1, 0, False) for n in lengths), 0), torch.float32)
    plan = plan_step(spec, batch, group)
    assert sorted(int(row) for decode in plan.decodes for row in decode.rows) == list(range(6))
    read = sum(decode.index.numel() for decode in plan.decodes)
    assert read <= step_plan.MAX_PADDING * (sum(lengths) + len(lengths))
    assert len(plan.decodes) == 2


def test_unknown_backend_is_named() -> None:
    assert set(ATTENTION_BACKENDS) >= {"reference", "torch", "numba"}
    with pytest.raises(ConfigError, match="attention backend 'torhc'; did you mean 'torch'"):
        select_backend("torhc", torch.device("cpu"))
